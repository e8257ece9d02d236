# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A state knows the parameters, to the last bit, and the model it belongs to.
"""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay.devices import sharding
from branch_replay.engine import fingerprint
from tests import tiny


def of(*leaves) -> int:
  return int(fingerprint.of_params(list(leaves)))


def of_each(x_B) -> np.ndarray:
  """The fingerprints of arrays, each as the only parameter."""
  each = jax.jit(jax.vmap(lambda x: fingerprint.of_params([x])))
  return np.asarray(each(x_B))


@pytest.mark.parametrize(
    "shape", [(13,), (3, 7), (30, 2, 3), (41, 3), (1, 9), (100, 2)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_lowest_bit_of_any_element_counts(shape, dtype):
  rng = np.random.default_rng(0)
  x = np.asarray(jnp.asarray(rng.normal(size=shape), dtype))
  bits = x.view(f"u{x.itemsize}").reshape(-1)
  changed = bits[None] ^ np.eye(bits.size, dtype=bits.dtype)
  found = of_each(jnp.asarray(
      np.concatenate([bits[None], changed]).view(x.dtype).reshape(-1, *shape)
  ))
  assert len(set(found.tolist())) == bits.size + 1


def test_one_row_of_a_wide_table_counts_and_a_stale_state_is_refused():
  config = dataclasses.replace(tiny.BASE, vocab_size=4096)
  decoder, params = tiny.model(config)
  group = tiny.group(config=config)
  state = br.capture(decoder, params, group)
  table = params["embed"]["table"]
  new = params | {"embed": {"table": table.at[5].add(1e-3)}}
  with pytest.raises(ValueError, match="captured under other parameters"):
    br.log_probs(decoder, new, group, state=state)


def test_bits_that_float32_rounds_away_count(x64):
  x = np.linspace(1, 2, 60).reshape(10, 6)
  for at in np.ndindex(x.shape):
    other = x.copy()
    other[at] = np.nextafter(x[at], 3)
    assert np.float32(other[at]) == np.float32(x[at])
    assert of(jnp.asarray(other)) != of(jnp.asarray(x))


def test_order_and_signs_count():
  rng = np.random.default_rng(1)
  for shape in ((24, 2), (48,), (3, 16)):
    x = rng.normal(size=shape).astype(np.float32).reshape(-1)
    others = [x]
    for i, j in itertools.combinations(range(x.size), 2):
      swapped, negated = x.copy(), x.copy()
      swapped[[i, j]] = x[[j, i]]
      negated[[i, j]] *= -1
      others += [swapped, negated]
    others += [-x, x[::-1], np.where(x > 0, x, -x)]
    found = of_each(jnp.asarray(np.stack(others).reshape(-1, *shape)))
    assert len(set(found.tolist())) == len(others), shape
  a, b = jnp.ones((3, 3)), jnp.arange(9.0).reshape(3, 3)
  assert len({of(a, b), of(b, a), of(a, b.T), of(a), of(b)}) == 5
  assert of(jnp.zeros(4)) != of(-jnp.zeros(4)) != of(jnp.zeros(5))


def test_random_steps_of_all_parameters_never_collide():
  """As many pairs as would show a fingerprint of 20 bits instead of 32."""
  x_B = jax.random.normal(jax.random.key(0), (4096, 5, 3))
  found = of_each(x_B * (1 + 1e-4))
  assert len(set(found.tolist())) == 4096
  ones = np.unpackbits(found.astype(">u4").view(np.uint8)).reshape(-1, 32)
  np.testing.assert_allclose(ones.mean(axis=0), 0.5, atol=0.05)


def test_sharded_parameters_have_it_and_travel_nowhere():
  config = dataclasses.replace(
      tiny.BASE, vocab_size=512, width=64, ffn_width=256, num_layers=11
  )
  _, params = tiny.model(config)
  whole = int(fingerprint.of_params(params))
  placed = sharding.sharded(params, 8).place(params)
  assert int(fingerprint.of_params(placed)) == whole
  text = jax.jit(fingerprint.of_params).lower(placed).compile().as_text()
  kinds = r" (all-\w+|collective-\w+|reduce-scatter)[\w-]*\("
  moved = [
      re.split(kinds, line.split(" = ", 1)[1])[:2]
      for line in text.splitlines() if re.search(kinds, line)
  ]
  assert moved
  for shape, kind in moved:  # sums of one number a leaf
    assert kind == "all-reduce" and not re.search(r"\[\d", shape), moved



OTHERS = {
    "rope_theta": dict(rope_theta=5e5),
    "norm_eps": dict(norm_eps=1e-6),
    "activation": dict(activation="gelu_tanh"),
    "scale_embeddings": dict(scale_embeddings=True),
    "rope_scaling": dict(rope_scaling=br.LinearScaling(2.0)),
    "rotary_dim": dict(rotary_dim=8),
    "compute_dtype": dict(compute_dtype="bfloat16"),
    "window": dict(layer_pattern=("sliding",), window=4),
}


@pytest.mark.parametrize("field", OTHERS)
def test_a_state_of_another_model_with_the_same_parameters_is_refused(field):
  decoder, params = tiny.model(tiny.BASE)
  other = br.Decoder(dataclasses.replace(tiny.BASE, **OTHERS[field]))
  group = tiny.group()
  prompt = np.asarray(group.prompt[:12])
  state = br.capture(decoder, params, group, version=3)
  options = dict(state=state, version=3)
  message = f"captured by another model, of .*{field}=.*now"

  def refused():
    return pytest.raises(ValueError, match=message)

  with refused():
    br.log_probs(other, params, group, **options)
  with refused():
    br.log_probs(other, params, group, state=state, allow_stale=True)
  with refused():  # also where values are not known
    jax.jit(lambda p: br.log_probs(other, p, group, **options))(params)
  with refused():
    br.value_and_grad(other, tiny.loss)(
        params, group, tiny.weights(group), **options
    )
  with refused():
    br.sample(
        other, params, prompt, key=jax.random.key(0), branches=1,
        max_tokens=1, **options,
    )
  with refused():
    br.extend(other, params, state, [1], version=3)


def test_what_changes_nothing_that_is_computed_is_no_other_model():
  decoder, params = tiny.model(tiny.BASE)
  longer = br.Decoder(dataclasses.replace(tiny.BASE, max_positions=512))
  group = tiny.group()
  state = br.capture(decoder, params, group)
  np.testing.assert_array_equal(
      br.log_probs(longer, params, group, state=state),
      br.log_probs(decoder, params, group, state=state),
  )


def test_a_state_goes_through_jit_and_keeps_its_model():
  decoder, params = tiny.model(tiny.BASE)
  group = tiny.group()
  state = jax.jit(lambda p: br.capture(decoder, p, group))(params)
  assert int(state.version) == int(fingerprint.of_params(params))
  assert jnp.isfinite(br.log_probs(decoder, params, group, state=state)).all()

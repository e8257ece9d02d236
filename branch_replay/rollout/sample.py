# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Sampling of a group's branches from one captured prefix.

The token at position t of row b is argmax(log pₜ / τ + Gumbel(key, b, t)): a
pure function of parameters, prompt and key. Rows and positions have keys of
their own, so a row does not change with the rows beside it or with the device
it is on, and a speculative sampler can be tested against this one token by
token (the coupling of Daliri et al. 2024, https://arxiv.org/abs/2408.07978).
"""

import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp

from branch_replay import config as config_lib
from branch_replay import group as group_lib
from branch_replay import prefix
from branch_replay import segment
from branch_replay import state as state_lib
from branch_replay.models import decoder
from branch_replay.ops import attention
from branch_replay.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Law:
  """The distribution tokens are drawn from.

  Attributes:
    temperature: τ ≥ 0; 0 is greedy.
    top_k: keep the k most likely ids; None for all.
    top_p: keep the smallest set of most likely ids whose probability reaches
      p; None for all.
  """

  temperature: float = 1.0
  top_k: int | None = None
  top_p: float | None = None

  def __post_init__(self):
    if not self.temperature >= 0:
      raise ValueError(f"temperature must be ≥ 0, not {self.temperature}.")
    if self.top_k is not None and self.top_k < 1:
      raise ValueError(f"top_k must be at least 1, not {self.top_k}.")
    if self.top_p is not None and not 0 < self.top_p <= 1:
      raise ValueError(f"top_p must lie in (0, 1], not {self.top_p}.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rollout:
  """Sampled branches.

  Attributes:
    tokens: i32[G, T], 0 after a row's end; a stop id is part of its row.
    lengths: i32[G], sampled tokens of each row.
    log_probs: f32[G, T], of the sampled tokens under the temperature and
      before truncation: what `log_probs(..., temperature=τ)` gives. Greedy
      rows are scored at temperature 1.
    finished: bool[G], whether the row ended with a stop id; the others were
      truncated at T.
    state: the captured prefix, to be replayed for learning.
  """

  tokens: jax.Array
  lengths: jax.Array
  log_probs: jax.Array
  finished: jax.Array
  state: state_lib.PrefixState

  def tails(self) -> list[list[int]]:
    """The sampled ids, row by row, without padding."""
    return [
        row[:length].tolist()
        for row, length in zip(self.tokens, self.lengths, strict=True)
    ]


def noise(key, row, position, size: int, dtype) -> jax.Array:
  """Gumbel noise of one row and position, [size]."""
  key = jax.random.fold_in(jax.random.fold_in(key, row), position)
  return jax.random.gumbel(key, (size,), dtype)


def truncate(log_probs_GV, law: Law):
  """Log-probs with −∞ for the ids that top-k and top-p leave out.

  Both look at the distribution they are given; an id is kept if both keep it.
  """
  if law.top_k is None and law.top_p in (None, 1.0):
    return log_probs_GV
  order_GV = jnp.argsort(-log_probs_GV, axis=-1)
  sorted_GV = jnp.take_along_axis(log_probs_GV, order_GV, axis=-1)
  keep_GV = jnp.ones(sorted_GV.shape, bool)
  if law.top_k is not None:
    keep_GV &= (jnp.arange(sorted_GV.shape[-1]) < law.top_k)[None]
  if law.top_p is not None and law.top_p < 1:  # 1 less rounding keeps all
    probs_GV = jnp.exp(sorted_GV)
    # Mass of the ids before: the one that reaches p is the last that is kept.
    keep_GV &= jnp.cumsum(probs_GV, axis=-1) - probs_GV < law.top_p
  rank_GV = jnp.argsort(order_GV, axis=-1)
  keep_GV = jnp.take_along_axis(keep_GV, rank_GV, axis=-1)
  return jnp.where(keep_GV, log_probs_GV, -jnp.inf)


def sample(
    model: decoder.Decoder,
    params,
    prompt,
    *,
    key,
    branches: int,
    max_tokens: int,
    law: Law = Law(),
    stop_ids: tuple[int, ...] = (),
    state: state_lib.PrefixState | None = None,
    version=None,
    schedule: Schedule = Schedule(),
) -> Rollout:
  """Samples G answers to one prompt, which is run once.

  Compiles what it needs; not to be called under `jit` itself.

  Args:
    model: the decoder.
    params: its parameters.
    prompt: ids, at least one.
    key: a PRNG key.
    branches: G.
    max_tokens: T, the most tokens of an answer.
    law: temperature and truncation.
    stop_ids: ids that end an answer.
    state: of this prompt and these parameters, if captured before.
    version: what that state is marked with, if not by a fingerprint.
    schedule: of the capture.

  Returns:
    The rollout, with the state to learn from.

  Raises:
    ValueError: an empty prompt or group, ids outside the vocabulary, or more
      positions than the model has.
  """
  config = model.config
  if branches < 1 or max_tokens < 1:
    raise ValueError(
        f"branches={branches} and max_tokens={max_tokens} must be at least 1."
    )
  group_lib.check_tokens(stop_ids, config, "stop ids")
  group = group_lib.Group.create(prompt, [[]], config=config)
  length = int(group.prompt_length)
  group_lib.check_positions(length + max_tokens, config)
  if schedule.layout.devices > 1:
    raise ValueError("Sampling runs on one device.")
  if state is None:
    state = prefix.capture(model, params, group, schedule=schedule)
  else:
    prefix.check_samplable(state, params, group, version)
  boundary = group.prompt[length - 1]
  stop_ids = jnp.asarray(stop_ids, jnp.int32)
  return _sample(
      model, branches, max_tokens, law, params, boundary, key, stop_ids, state
  )


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _sample(
    model, branches, max_tokens, law, params, boundary, key, stop_ids, state
):
  config = model.config
  dtype = config_lib.at_least_float32(config.compute_dtype)
  shape = (
      config.num_layers, config.num_kv_heads, branches, max_tokens,
      config.head_dim,
  )
  caches = tuple(jnp.zeros(shape, config.compute_dtype) for _ in range(2))
  rows_G = jnp.arange(branches)

  def unfinished(carry):
    step, _, rollout, _ = carry
    return (step < max_tokens) & ~jnp.all(rollout.finished)

  def advance(carry):
    step, tokens_G, rollout, caches = carry
    logits_GV, caches = _step(model, params, state, caches, step, tokens_G)
    token_G, log_prob_G = _draw(
        law, key, rows_G, state.length + 1 + step, logits_GV
    )
    live_G = ~rollout.finished
    rollout = Rollout(
        rollout.tokens.at[:, step].set(jnp.where(live_G, token_G, 0)),
        rollout.lengths + live_G,
        rollout.log_probs.at[:, step].set(jnp.where(live_G, log_prob_G, 0)),
        rollout.finished | jnp.isin(token_G, stop_ids),
        None,
    )
    return step + 1, token_G, rollout, caches

  rollout = Rollout(
      jnp.zeros((branches, max_tokens), jnp.int32),
      jnp.zeros(branches, jnp.int32),
      jnp.zeros((branches, max_tokens), dtype),
      jnp.zeros(branches, bool),
      None,
  )
  start = (
      jnp.int32(0), jnp.full(branches, boundary, jnp.int32), rollout, caches,
  )
  _, _, rollout, _ = lax.while_loop(unfinished, advance, start)
  return dataclasses.replace(rollout, state=state)


def _step(model, params, state, caches, step, tokens_G):
  """Logits of one new token of every row, and the caches it is added to."""
  config = model.config
  outer = {"params": segment.outer(params)}
  x_GTM = model.apply(outer, tokens_G[:, None], method="embed_tokens")
  branches, room = caches[0].shape[2:4]
  positions_GT = jnp.full((branches, 1), state.length + step)
  zero = jnp.zeros((), step.dtype)
  seen_GTS = jnp.broadcast_to(jnp.arange(room) <= step, (branches, 1, room))

  def layer(carry, inputs):
    x_GTM, caches = carry
    index, layer_params = inputs

    def attend(q, k, v):
      start = (index, zero, zero, step, zero)
      new = tuple(
          lax.dynamic_update_slice(cache, x[None], start)
          for cache, x in zip(caches, (k, v), strict=True)
      )
      keys, values = (
          lax.dynamic_index_in_dim(cache, index, 0, keepdims=False)
          for cache in new
      )
      out = attention.decode(
          q, keys, values, state.mixer, index, state.length, seen_GTS
      )
      return out, new

    x_GTM, caches, _ = segment.layer_forward(
        config, layer_params, x_GTM, positions_GT, attend
    )
    return (x_GTM, caches), None

  numbered = jnp.arange(config.num_layers, dtype=step.dtype), params["layers"]
  (x_GTM, caches), _ = lax.scan(layer, (x_GTM, caches), numbered)
  hidden_GM = model.apply(outer, x_GTM, method="normalize")[:, 0]
  table_VM = model.apply(outer, method="head_table")[: config.vocab_size]
  logits_GV = lax.dot_general(
      hidden_GM,
      table_VM.astype(hidden_GM.dtype),
      (((1,), (1,)), ((), ())),
      preferred_element_type=config_lib.at_least_float32(hidden_GM.dtype),
  )
  return logits_GV, caches


def _draw(law: Law, key, rows_G, position, logits_GV):
  """One token of every row, and its log-prob before truncation."""
  tempered_GV = logits_GV / (law.temperature or 1.0)
  log_probs_GV = jax.nn.log_softmax(tempered_GV, axis=-1)
  score_GV = truncate(log_probs_GV, law)
  if law.temperature:
    size, dtype = logits_GV.shape[-1], logits_GV.dtype
    score_GV += jax.vmap(lambda row: noise(key, row, position, size, dtype))(
        rows_G
    )
  token_G = jnp.argmax(score_GV, axis=-1).astype(jnp.int32)
  log_prob_G = jnp.take_along_axis(log_probs_GV, token_G[:, None], axis=-1)
  return token_G, log_prob_G[:, 0]

# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Two hundred gradients: 25 problems that are compiled, of eight data each.

Everything is drawn by numpy from the number of the case, parameters by their
names. What is kept of a gradient are norms and projections on random
directions: of a leaf g and directions r of independent normal numbers ⟨g, r⟩
changes by about ‖Δ‖ where g changes by Δ.
"""

import dataclasses
import math
from typing import Any
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from tests.witness import library

CASES, DATA = 25, 8  # data of each case
PROJECTIONS = 3
BASE = dict(
    vocab_size=61, width=24, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=12, ffn_width=28, max_positions=256, param_dtype="float64",
    compute_dtype="float64",
)
_YARN = dict(kind="yarn", factor=4.0, original_max_positions=16)
_DELTA = dict(key_heads=2, value_heads=4, key_dim=6, value_dim=5)
_LATENT = dict(rank=9, nope_dim=6, rope_dim=4, value_dim=7)
# Fields over `BASE`.
ARCHITECTURES = {
    "llama": {},
    "qwen2": dict(qkv_bias=True, tied_embeddings=True),
    "qwen3": dict(qk_norm=True, num_kv_heads=1, num_layers=3),
    "one query a key": dict(num_kv_heads=4),
    "llama3": dict(rope_scaling=dict(
        kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_positions=16,
    )),
    "yarn": dict(rope_scaling=_YARN),
    "mistral": dict(layer_pattern=("sliding",), window=4),
    "window and full": dict(
        num_layers=3, layer_pattern=("sliding", "full"), window=5
    ),
    "gemma3": dict(
        num_layers=3, layer_pattern=("sliding", "full"), window=7,
        rope_theta=1000.0, rope_theta_local=50.0, qk_norm=True,
        rope_scaling=dict(kind="linear", factor=4.0), post_norms=True,
        activation="gelu_tanh", scale_embeddings=True, tied_embeddings=True,
        norms_from_one=True, score_divisor=24,
    ),
    "delta": dict(layer_pattern=("delta",), delta=_DELTA),
    "hybrid": dict(
        layer_pattern=("delta", "full"), delta=dict(
            key_heads=3, value_heads=3, key_dim=8, value_dim=4, conv_width=3
        ),
    ),
    "qwen3.5": dict(
        num_layers=3, layer_pattern=("delta", "delta", "full"), rotary_dim=6,
        qk_norm=True, output_gate=True, delta=_DELTA,
    ),
    "latent": dict(layer_pattern=("latent",), latent=_LATENT),
    "deepseek": dict(
        num_layers=3, layer_pattern=("latent",),
        latent=_LATENT | dict(query_rank=5),
        rope_scaling=_YARN | dict(mscale=1.0, mscale_all_dim=0.7),
        experts=dict(
            count=8, top_k=3, width=10, shared_width=12, first_dense=1,
            scores="sigmoid", scaling=2.5, correction=True, groups=4,
            top_groups=2, group_top=2,
        ),
    ),
    "experts": dict(experts=dict(count=4, top_k=2, width=14)),
    "shared expert": dict(
        layer_pattern=("sliding", "full"), window=6,
        experts=dict(
            count=6, top_k=2, width=9, shared_width=8, shared_gate=True,
            normalised=False,
        ),
    ),
    "every kind": dict(
        num_layers=5, layer_pattern=("delta", "latent", "sliding", "full"),
        window=3, delta=_DELTA, latent=_LATENT,
    ),
    "large vocabulary": dict(vocab_size=2051, width=8, num_layers=1),
    "adapters": dict(
        qkv_bias=True,
        adapter=dict(rank=2, alpha=3.0, matrices=("query", "value", "down")),
    ),
    "one layer": dict(num_layers=1, num_heads=6, num_kv_heads=3),
}
MODES = ("exact", "sampled", "stop", "exact", "full", "exact", "sampled")
LAWS = ("importance", "importance")
KINDS = ("group", "tree", "stacked", "group", "tree", "blocks", "group")


@dataclasses.dataclass(frozen=True)
class Case:
  """What is compiled; with a number of data, a gradient.

  Attributes:
    number: of the case, the seed of all that is drawn for it.
    architecture: its name.
    kind: "group", "stacked", "blocks" or "tree".
    mode: see `branch_replay`.
    driver: "one pass", "autodiff" or "host".
    devices: 1 or 8.
    schedule: fields of `Schedule`.
    sampling: fields of `Sampling`.
    temperature, balance, trainable: as in `branch_replay`.
  """

  number: int
  architecture: str
  kind: str
  mode: str
  driver: str
  devices: int
  schedule: Any
  sampling: Any
  temperature: float
  balance: float
  trainable: str


def fields_of(case: Case) -> dict:
  return BASE | ARCHITECTURES[case.architecture]


def cases() -> list[Case]:
  names = list(ARCHITECTURES)
  return [make(number, names[number % len(names)])
          for number in range(CASES)]


def make(number: int, name: str) -> Case:
  """A case: kinds and modes take turns, the rest is drawn."""
  random = np.random.default_rng([7, number])

  def one(*options):
    return options[random.integers(len(options))]

  fields = ARCHITECTURES[name]
  recurrent = "delta" in fields.get("layer_pattern", ())
  kind, mode = KINDS[number % 7], MODES[(number + number // 7) % 7]
  if kind == "blocks" and recurrent:
    kind = "group"
  devices = 8 if number % 5 in (2, 4) else 1
  balance = 0.0
  if "experts" in fields and kind == "group":
    balance = 2.0
  adapted = "adapter" in fields and number % 2 == 0
  driver = "one pass"
  if number % 4 == 1 and not balance and not adapted:
    driver = "autodiff"
  elif kind == "group" and mode in ("exact", "stop") and number % 3 == 0:
    driver = "host"
  return Case(
      number, name, kind, mode, driver, devices,
      schedule=dict(
          chunk_size=max(one(3, 7, 8, 10), devices),
          activations=one("keep", "recompute", "recompute_layers"),
          branches_at_once=one(None, 1, 2), readout_tokens=one(5, 1024),
      ),
      sampling=dict(chunks=1.5, law=LAWS[random.integers(2)]),
      temperature=one(1.0, 1.0, 0.8), balance=balance,
      trainable="adapters" if adapted else "all",
  )


def parameters(case: Case, model):
  """By numpy, every leaf by its name."""
  def leaf(keys, like):
    name = library.path_of(keys)
    random = np.random.default_rng([case.number, zlib.crc32(name.encode())])
    normal, last = random.normal(size=like.shape), name.split("/")[-1]
    if last == "scale":
      value = 1 + 0.3 * normal
    elif last == "table":
      value = 0.5 * normal
    elif last in ("bias", "correction", "log_rate", "rate_bias"):
      value = 0.4 * normal
    elif last in ("filter", "key_up"):
      value = normal / math.sqrt(like.shape[-1])
    else:
      value = normal / math.sqrt(like.shape[-2])
    return jnp.asarray(value, like.dtype)

  return jax.tree_util.tree_map_with_path(leaf, library.shapes_of(model))


def data_of(case: Case, model, turn: int):
  """Of one shape for every turn, so that it is compiled for once."""
  random = np.random.default_rng([11, case.number, turn])
  vocab = fields_of(case)["vocab_size"]

  def ids(length):
    return random.integers(0, vocab, length).tolist()

  if case.kind == "tree":
    return tree_of(case, model, ids, random)
  groups = []
  for _ in range(2 if case.kind == "stacked" else 1):
    prompt = ids(1 + random.integers(17, 25))
    tails = [ids(random.integers(9, 17)), *(
        ids(random.integers(1, 17)) for _ in range(2)
    )]
    if case.kind == "blocks":
      masked = [
          np.where(random.random(len(x)) < 0.5, vocab - 1, x) for x in tails
      ]
      groups.append(library.group_of(
          model, prompt, tails, inputs=masked, block=3
      ))
    else:
      groups.append(library.group_of(model, prompt, tails))
  return library.stack_of(groups) if case.kind == "stacked" else groups[0]


def tree_of(case, model, ids, random):
  """A root, an inner segment of two leaves, and a third leaf.

  The inner segment has loss in every second case.
  """
  root, inner = ids(random.integers(18, 24)), ids(random.integers(18, 24))
  ends = [
      [token, *ids(random.integers(low, low + 6))]
      for token, low in ((1, 10), (2, 3), (3, 10))
  ]
  inner[0] = 4
  sequences = [root + inner + ends[0], root + inner + ends[1], root + ends[2]]
  begin, loss = len(root) + len(inner), case.number % 2 == 0
  trained = [
      [at >= (begin if not loss and row < 2 else len(root))
       for at in range(len(x))]
      for row, x in enumerate(sequences)
  ]
  return library.tree_of(model, sequences, trained)


def gradients(case: Case):
  """Names of leaves, and [DATA, 1 + leaves, 1 + PROJECTIONS] of numbers.

  The first row is of the loss and the log-probs, then one a leaf: its norm and
  its projections.
  """
  with jax.enable_x64(True):
    model = library.model_of(fields_of(case))
    params = parameters(case, model)
    function = library.gradient_function(case, model, params)
    found, names = [], []
    for turn in range(DATA):
      data = data_of(case, model, turn)
      weights = np.random.default_rng([13, case.number, turn]).normal(
          size=library.output_shape(data)
      )
      value, outputs, grads = function(params, data, jnp.asarray(weights))
      grads = library.named(grads)
      names = sorted(grads)
      outputs = np.asarray(outputs)
      found.append([
          [float(value), *projected("outputs", outputs)],
          *([np.linalg.norm(grads[name]), *projected(name, grads[name])]
            for name in names),
      ])
  return names, np.array(found)


def projected(name: str, x) -> list[float]:
  """⟨x, r⟩ for the random directions of a name and a shape."""
  random = np.random.default_rng([17, zlib.crc32(name.encode())])
  return [
      float(np.vdot(random.normal(size=x.shape), x))
      for _ in range(PROJECTIONS)
  ]


def error(found, wanted) -> float:
  """Of one gradient: the relative difference of the worst row.

  A leaf's is divided by its norm, or a thousandth of the whole gradient's.
  """
  whole = np.linalg.norm(wanted[1:, 0])
  norms = np.maximum(wanted[1:, 0], 1e-3 * whole)
  off = np.linalg.norm(found[1:, 1:] - wanted[1:, 1:], axis=1)
  of_leaves = off / math.sqrt(PROJECTIONS) / norms
  first = np.abs(found[0] - wanted[0]) / np.maximum(1, np.abs(wanted[0]))
  return float(max(of_leaves.max(), first.max()))

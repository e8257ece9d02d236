# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws a problem from a seed: a model, data, and how it is run.

Lengths lie at and around the places where code changes its way: one token,
chunks, buckets of eight, blocks of the recurrence, tiles of attention.
"""

import dataclasses
from typing import Any
from typing import NamedTuple

import numpy as np

import branch_replay as br
from branch_replay.config import KINDS
from branch_replay.config import Adapter
from branch_replay.data import group as group_lib
from branch_replay.mixers import kinds
from tests import tiny

TEXTS = 6  # lengths in one shape, of a problem of groups
ATTENTION_MATRICES = ("query", "key", "value", "output")


@dataclasses.dataclass(frozen=True)
class Run:
  """One way to compute a gradient.

  Attributes:
    driver: "one pass", "jit", "autodiff", "state", "state autodiff", "kept",
      "extended" (a state that was captured in two parts), "host", "offload".
    mode: "exact", "full", "stop", or "sampled".
    devices: 1 for the plain layout.
    schedule: fields of `br.Schedule`.
    sampling: of "sampled".
  """

  driver: str
  mode: str
  devices: int = 1
  schedule: Any = dataclasses.field(default_factory=dict)
  sampling: Any = None


class Text(NamedTuple):
  """Ids of some groups.

  Attributes:
    prompts: of every group.
    tails: of every group, ids of every tail.
    inputs: what tails in blocks run on, like `tails`; None for themselves.
  """

  prompts: Any
  tails: Any
  inputs: Any = None


@dataclasses.dataclass(frozen=True)
class Problem:
  """What is computed, and how.

  Attributes:
    seed: of the parameters and of the weights of the loss.
    config: the model, its dtypes included.
    kind: "group", "stacked", "blocks" or "tree".
    texts: of groups; all of one shape, so that they are compiled for once.
    shape: padded tokens of prompts, and of tails.
    block: of "blocks".
    sequences: of "tree".
    trained: of "tree".
    empty: branches of no tokens that are added.
    temperature: of the softmax.
    balance: coefficient of the load-balance term.
    trainable: "all" or "adapters".
    updates: how many gradients in a row, each after a step along the last.
    small: whether tiles and blocks are made so small that these lengths are
      cut.
    runs: ways to compute it.
  """

  seed: int
  config: br.ModelConfig
  kind: str
  texts: tuple[Text, ...] = ()
  shape: tuple[int, int] = (0, 0)
  block: int | None = None
  sequences: Any = ()
  trained: Any = ()
  empty: int = 0
  temperature: float = 1.0
  balance: float = 0.0
  trainable: str = "all"
  updates: int = 1
  small: bool = False
  runs: tuple[Run, ...] = ()


class Draw:
  """Random choices of one seed."""

  def __init__(self, seed: int):
    self.rng = np.random.default_rng([seed, 20261130])

  def chance(self, p: float) -> bool:
    return bool(self.rng.random() < p)

  def one(self, *options):
    return options[self.rng.integers(len(options))]

  def between(self, low: int, high: int) -> int:
    return int(self.rng.integers(low, high + 1))

  def ids(self, length: int, vocab: int):
    return self.rng.integers(0, vocab, length).tolist()

  def length(self, least: int, most: int, chunk: int) -> int:
    """A length, often one that something is cut at."""
    if self.chance(0.35):
      return self.between(least, most)
    around = self.one(least, chunk, 2 * chunk, 3 * chunk, 8, 16, 24)
    return int(np.clip(around + self.between(-1, 1), least, most))


def draw(seed: int) -> Problem:
  """The problem of a seed."""
  d = Draw(seed)
  config = draw_config(d)
  kind = d.one("group", "group", "group", "stacked", "tree", "tree", "blocks")
  if kind == "blocks" and kinds.recurrent(config):
    kind = "group"
  chunk = d.between(1, 12)
  dtype = "float32" if d.chance(0.15) else "float64"
  config = dataclasses.replace(config, param_dtype=dtype, compute_dtype=dtype)
  fields = dict(
      seed=seed, config=config, kind=kind,
      temperature=d.one(1.0, 1.0, 0.7, 1.9),
      small=seed % 20 >= 10,  # not by chance: a change compiles all again
      updates=3 if d.chance(0.1) else 1,
  )
  if config.adapter is not None and d.chance(0.7):
    fields["trainable"] = "adapters"
  if config.experts is not None and kind != "stacked" and d.chance(0.4):
    fields["balance"] = d.one(0.5, 5.0)
  make = draw_tree if kind == "tree" else draw_groups
  fields |= make(d, config, kind, chunk, bool(fields.get("balance")))
  problem = Problem(**fields)
  runs = tuple(draw_run(d, problem, chunk) for _ in range(d.between(2, 3)))
  return dataclasses.replace(problem, runs=runs)


def draw_config(d: Draw) -> br.ModelConfig:
  if d.chance(0.35):
    config = tiny.ARCHITECTURES[d.one(*sorted(tiny.ARCHITECTURES))]
    return dataclasses.replace(config, vocab_size=d.between(11, 64))
  while True:
    try:
      return mixture(d)
    except ValueError:  # a pattern that repeats itself, or no such experts
      continue


def mixture(d: Draw) -> br.ModelConfig:
  """A model that no family has."""
  layers = d.one(1, 2, 2, 3, 3, 4, 5)
  period = d.between(1, min(3, layers))
  kinds = tuple(d.one("full", *KINDS) for _ in range(period))
  kv_heads, head_dim = d.one(1, 2, 3), 2 * d.between(1, 8)
  sliding = "sliding" in kinds
  fields = dict(
      vocab_size=d.between(9, 70), width=d.one(8, 16, 20, 24, 32),
      num_layers=layers, num_heads=kv_heads * d.one(1, 2, 3),
      num_kv_heads=kv_heads, head_dim=head_dim, ffn_width=d.between(1, 48),
      max_positions=256, layer_pattern=kinds,
      rope_theta=d.one(100.0, 10_000.0, 1e6),
      rope_scaling=d.one(
          None, None, br.LinearScaling(4.0),
          br.Llama3Scaling(8.0, 1.0, 4.0, 16), br.YarnScaling(4.0, 16),
          br.YarnScaling(4.0, 16, mscale=1.0, mscale_all_dim=0.7),
      ),
      rope_theta_local=d.one(None, 50.0) if sliding else None,
      window=d.one(1, 2, 3, 5, 9, 13) if sliding else None,
      norm_eps=d.one(1e-6, 1e-5), qk_norm=d.chance(0.4),
      qkv_bias=d.chance(0.3), output_gate=d.chance(0.25),
      scale_embeddings=d.chance(0.2), tied_embeddings=d.chance(0.3),
  )
  if d.chance(0.03):  # the head goes by in chunks
    fields |= dict(vocab_size=d.between(2047, 2056), width=8)
  if head_dim > 2 and d.chance(0.25):
    fields["rotary_dim"] = 2 * d.between(1, head_dim // 2 - 1)
  if "delta" in kinds:
    keys = d.one(1, 2, 3)
    fields["delta"] = br.GatedDelta(
        keys, keys * d.one(1, 2), d.one(2, 5, 8), d.one(1, 4, 9),
        conv_width=d.one(2, 3, 4),
    )
  if "latent" in kinds:
    fields["latent"] = br.LatentAttention(
        d.between(1, 12), d.between(1, 8), 2 * d.between(1, 3),
        d.between(1, 10), query_rank=d.one(None, None, 7),
    )
  if d.chance(0.3):
    fields["experts"] = draw_experts(d, layers)
  else:
    fields |= dict(
        post_norms=d.chance(0.25), activation=d.one("silu", "gelu_tanh")
    )
  if d.chance(0.2):
    matrices = ATTENTION_MATRICES
    if "experts" not in fields:
      matrices += ("gate", "up", "down")
    picked = tuple(name for name in matrices if d.chance(0.6))
    fields["adapter"] = Adapter(d.between(1, 3), 2.0, picked or matrices)
  return br.ModelConfig(**fields)


def draw_experts(d: Draw, layers: int) -> br.Experts:
  groups = d.one(1, 1, 1, 2, 4)
  size = d.one(2, 3) if groups > 1 else d.between(2, 6)
  open_ = d.between(1, groups)
  shared = d.one(0, 0, 5, 12)
  return br.Experts(
      groups * size, d.between(1, min(4, size * open_)), d.between(1, 20),
      shared_width=shared, shared_gate=bool(shared) and d.chance(0.5),
      first_dense=d.between(0, layers - 1) if d.chance(0.4) else 0,
      scores=d.one("softmax", "sigmoid"), normalised=d.chance(0.7),
      scaling=d.one(1.0, 2.5), correction=d.chance(0.4), groups=groups,
      top_groups=open_, group_top=d.between(1, size),
  )


def draw_groups(d: Draw, config, kind: str, chunk: int, balance: bool):
  """Prompts and tails, several times in one shape."""
  count = d.between(2, 3) if kind == "stacked" else 1
  # A term over all branches is that of one where there is one.
  branches, longest = d.between(2 if balance else 1, 5), d.one(8, 16, 24)
  lengths = d.length(0, 40, chunk), d.length(1, longest, d.one(chunk, 8))
  shape = (
      group_lib.bucket(lengths[0]) + 1 + d.one(0, 0, d.between(1, 9)),
      group_lib.bucket(lengths[1]) + d.one(0, 0, d.between(1, 9)),
  )
  block = d.one(1, 2, 3, 5, 8, 30) if kind == "blocks" else None
  masked = kind == "blocks" and d.chance(0.7)
  texts = []
  for turn in range(TEXTS):
    prompts, tails = [], []
    for _ in range(count):
      prefix = d.length(0, shape[0] - 1, chunk)
      if not turn:
        prefix = lengths[0]
      prompts.append(d.ids(1 + prefix, config.vocab_size))
      tails.append([
          d.ids(d.length(int(balance), shape[1], d.one(chunk, 8)),
                config.vocab_size)
          for _ in range(branches)
      ])
    tails[0][0] = tails[0][0] or d.ids(1, config.vocab_size)
    inputs = None
    if masked:
      inputs = [
          [
              [config.vocab_size - 1 if d.chance(0.5) else x for x in tail]
              for tail in of_group
          ] for of_group in tails
      ]
    texts.append(Text(prompts, tails, inputs))
  return dict(
      texts=tuple(texts), shape=shape, block=block,
      empty=0 if balance else d.one(0, 0, 0, d.between(1, 2)),
  )


def draw_tree(d: Draw, config, kind: str, chunk: int, balance: bool):
  """Sequences that begin alike, and which of their tokens have loss."""
  del kind
  vocab, found, marks = config.vocab_size, [], []
  some = d.chance(0.5)  # inner segments with loss too

  def grow(depth, before, marked):
    length = d.length(1 if depth else 0, 20, d.one(chunk, 16, 17))
    length = max(length, 1) if not before else length
    children = d.between(2, 3) if depth and (not before or d.chance(0.7)) else 0
    with_loss = not children or (some and d.chance(0.5))
    if not children and balance:
      length = max(length, 1)
    ids = before + d.ids(length, vocab)
    mine = [with_loss and d.chance(0.9) for _ in range(length)]
    mine = marked + mine
    mine[0] = False
    if not children:
      found.append(ids)
      marks.append(mine)
    for _ in range(children):
      grow(depth - 1, ids, mine)

  grow(d.between(1, 3), [], [])
  if len(found[0]) < 2:
    found[0] += d.ids(2, vocab)
    marks[0] += [True, True]
  if not any(map(any, marks)):
    marks[0][-1] = True
  return dict(sequences=found, trained=marks)


def draw_run(d: Draw, problem: Problem, chunk: int) -> Run:
  """How one of the gradients is computed."""
  tree, config = problem.kind == "tree", problem.config
  mode = d.one("exact", "exact", "exact", "stop", "stop", "full", "sampled")
  if tree and problem.balance and mode == "stop":
    mode = "exact"
  drivers = ["one pass", "one pass"]
  if problem.trainable == "all" and not problem.balance:
    drivers += ["autodiff"]
  if not tree:
    drivers += ["jit"]
  if problem.kind in ("group", "blocks") and mode in ("exact", "stop"):
    drivers += ["host", "state"]
  if problem.kind in ("group", "blocks") and mode == "exact":
    drivers += ["kept"]
    if problem.trainable == "all" and not problem.balance:
      drivers += ["state autodiff"]
  if problem.kind == "group" and (
      mode == "stop" or (mode == "exact" and kinds.positional(config))
  ):
    drivers += ["extended"]
  driver = d.one(*drivers)
  if driver == "host" and kinds.positional(config) and d.chance(0.3):
    driver = "offload"
  devices = d.one(1, 1, 1, 8, d.one(2, 3, 4))
  if driver in ("kept", "offload", "extended"):
    devices = 1
  narrow = config.param_dtype == "float64" and d.chance(0.05)
  schedule = dict(
      chunk_size=max(d.one(chunk, chunk, d.between(1, 12), 1024), devices),
      activations=d.one("keep", "recompute", "recompute_layers", None),
      branches_at_once=d.one(None, 1, 2, 3),
      readout_tokens=d.one(1024, d.between(1, 9)),
      accumulator_dtype="float32" if narrow else None,
      memory_budget=d.one(4 << 30, 1, 40_000),
  )
  if config.param_dtype == "float32" and d.chance(0.15) and not (
      problem.kind == "blocks"
  ):
    schedule["attention"] = "splash"
  sampling = None
  if mode == "sampled" and kinds.recurrent(config):
    mode = "exact"
  if mode == "sampled":
    law = d.one("importance", "top")
    whole = tree or driver != "one pass" or d.chance(0.3)
    sampling = br.Sampling(
        chunks=99.0 if whole else d.one(0.5, 1.0, 1.7, 2.5), law=law,
    )
  return Run(driver, mode, devices, schedule, sampling)

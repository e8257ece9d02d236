# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Branch replay: run a shared prefix once, train on its divergent tails.

One capital letter per axis, carried in the names of arrays (`q_KGRTD`):

  G  branches of a group          L  layers
  T  tokens of a tail or segment  K  key-value heads
  S  tokens of a whole row, or    R  query heads per key-value head
     keys that are here or cached D  head_dim
  P  positions of the prefix      H  half of head_dim (RoPE)
  C  positions of a chunk         N  any number: rows, heads, chunks
  V  vocabulary                   B  positions in one attention tile
  M  model width                  F  feed-forward width
  U  ids of a draft vocabulary

Gated delta layers: K key heads of D with R value heads of E each, W inputs of
the short convolution, X = 2D + R·E of its channels a key head. Latent layers: C
numbers of a position's latent. Layers of experts: E of them, k a token, R rows
one a token and choice.

Words, each for one thing:

  prompt      the ids that all answers of a group begin with
  prefix      a prompt without its last token, which is run with every tail
  tail        the ids of one answer; branch: a tail on top of its prefix
  group       a prompt and G tails; tree: sequences that branch again and again
  segment     consecutive tokens that run on top of a state
  chunk       a segment of a prefix, as long as `Schedule.chunk_size` at most
  run         rows of tokens that stand at the same positions: the unit of work
  state       what a prefix leaves behind in every layer for later tokens
  capture     to run a prefix and keep its state
  replay      to run tails on a state that was captured, not on their prompts
  push, visit, pop   to append a run to the state; to run one on top of it there
              and back; to take one off and pull its cotangent back
  accumulator the cotangent of a state, added up over branches and chunks
  band        the keys that a query of a prefix reaches in "banded": those near
              before it, and the sinks, the first of all
  readout     what is read of hidden states: log-probs, values, entropies
  spec        what is asked for, the static half of a computation
  schedule    sizes and policies of a computation, which never change its result
  learning rate      what varies over updates; nothing else is called a schedule
  layout      on which devices tokens and parameters are
  kind, mixer, stack   a kind of layer; the class that knows all about it; the
              layers of one kind that one scan runs
  rollout     answers that are sampled; draft: tokens that are proposed for one
"""

# isort: off
from branch_replay.config import Experts
from branch_replay.config import GatedDelta
from branch_replay.config import LatentAttention
from branch_replay.config import LinearScaling
from branch_replay.config import Llama3Scaling
from branch_replay.config import ModelConfig
from branch_replay.config import YarnScaling
from branch_replay.mixers.mixer import Mixer
from branch_replay.engine.band import Band
from branch_replay.engine.prefix import capture
from branch_replay.engine.prefix import extend
from branch_replay.engine.estimators import Sampling
from branch_replay.engine.dense import dense_log_probs
from branch_replay.engine.gradients import log_probs
from branch_replay.engine.gradients import replay
from branch_replay.engine.gradients import value_and_grad
from branch_replay.data.group import Group
from branch_replay.data.group import stack
from branch_replay.engine.hosted import Hosted
from branch_replay.models.decoder import Decoder
from branch_replay.engine.readout import LogProbs
from branch_replay.rollout.law import Law
from branch_replay.rollout.result import Finish
from branch_replay.rollout.result import Rollout
from branch_replay.rollout.sample import sample
from branch_replay.engine.schedule import Schedule
from branch_replay.engine.state import PrefixState
from branch_replay.data.token_tree import Tree
from branch_replay.data.token_tree import Turn
from branch_replay.weights.gguf import load_gguf
from branch_replay.weights.hf import load_hf
from branch_replay.weights.hf import save_hf
from branch_replay.weights.hf import save_pretrained
from branch_replay.weights.load import load

__all__ = [
    "Band",
    "Decoder",
    "Experts",
    "Finish",
    "GatedDelta",
    "Group",
    "Hosted",
    "Law",
    "LatentAttention",
    "LinearScaling",
    "Llama3Scaling",
    "LogProbs",
    "Mixer",
    "ModelConfig",
    "PrefixState",
    "Rollout",
    "Sampling",
    "Schedule",
    "Tree",
    "Turn",
    "YarnScaling",
    "capture",
    "dense_log_probs",
    "extend",
    "load",
    "load_gguf",
    "load_hf",
    "log_probs",
    "replay",
    "sample",
    "save_hf",
    "save_pretrained",
    "stack",
    "value_and_grad",
]

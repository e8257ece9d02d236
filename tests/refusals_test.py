# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments end in an error of ours that names them, before any work.

Each row is a call and what its message must say. The error is a `ValueError` or
a `TypeError` that code of the package raised: one from the depths of jax, flax
or numpy does not say what to do.
"""

import ast
import dataclasses
import functools
import math
import pathlib
import re
import traceback
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import branch_replay as br
from branch_replay import config as config_lib
from branch_replay import tasks
from branch_replay.devices import sharding
from branch_replay.engine import spec as spec_lib
from branch_replay.models import adapters
from branch_replay.planning import presets
from branch_replay.rl import advantages
from branch_replay.rl import objectives
from branch_replay.rollout import drafters
from branch_replay.rollout import sample as sample_lib
from branch_replay.training import step
from tests import tiny

_PACKAGE = pathlib.Path(br.__file__).parent
NAN, INF = math.nan, math.inf


def refused(call, match):
  """Makes a call that must end in an error of ours."""
  with pytest.raises((ValueError, TypeError), match=match) as caught:
    call()
  frame = traceback.extract_tb(caught.value.__traceback__)[-1]
  assert _PACKAGE in pathlib.Path(frame.filename).parents, (
      f"raised in {frame.filename}, not in the package: {caught.value}"
  )


@functools.cache
def one():
  """Everything that the calls are made of, nothing of it computed."""
  config = tiny.BASE
  model = br.Decoder(config)
  shapes = jax.eval_shape(
      lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
  )["params"]
  params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
  other = br.Decoder(dataclasses.replace(config, width=64))
  group = tiny.group()
  return types.SimpleNamespace(
      config=config, model=model, params=params, group=group, other=other,
      stacked=br.stack([group, group]), key=jax.random.key(0),
      weights=np.ones(group.tails.shape, np.float32),
      tree=br.Tree.from_sequences([[1, 2, 3], [1, 2, 4]], config=config),
      schedule=br.Schedule(), mask=np.ones((2, 3), bool),
      sgd=optax.sgd(0.1),
  )


def config(**changes):
  return lambda: dataclasses.replace(one().config, **changes)


def with_params(change):
  """`one().params` with some of it changed."""
  params = {name: dict(child) for name, child in one().params.items()}
  return change(params) or params


def gradient(*args, **options):
  """A call of `value_and_grad` and of the function that it gives."""
  into, of = {}, {}
  for name, value in options.items():
    to_function = name in ("state", "key", "version", "balance_share")
    (of if to_function else into)[name] = value
  function = br.value_and_grad(
      into.pop("model", one().model), into.pop("loss", tiny.loss), **into
  )
  return function(*args, **of)


def loop(*args, **options):
  return br.value_and_grad(
      one().model, tiny.loss, hosted=br.Hosted(), **options
  )(*args)


def draw(*args, **options):
  args = (one().model, one().params, [1, 2]) if not args else args
  given = dict(key=one().key, branches=2, max_tokens=3) | options
  return br.sample(*args, **given)


def log_probs(**options):
  return br.log_probs(one().model, one().params, one().group, **options)


CONFIGS = [
    (config(width=0), "width must be at least 1"),
    (config(width=-32), "width must be at least 1, not -32"),
    (config(width=32.0), "width must be a whole number, not 32.0"),
    (config(width="32"), "width must be a whole number, not '32'"),
    (config(num_layers=True), "num_layers must be a whole number"),
    (config(num_layers=None), "num_layers must be a whole number"),
    (config(head_dim=15), "even head_dim"),
    (config(num_kv_heads=3), "num_heads=4 is not a multiple of"),
    (config(rope_theta=0.0), "rope_theta must be > 0"),
    (config(rope_theta=NAN), "rope_theta must be finite"),
    (config(rope_theta="1e4"), "rope_theta must be a number"),
    (config(rope_theta_local=-1.0), "rope_theta_local"),
    (config(norm_eps=-1e-5), "norm_eps must be ≥ 0"),
    (config(norm_eps=INF), "norm_eps must be finite"),
    (config(qk_norm="no"), "qk_norm must be True or False"),
    (config(tied_embeddings=1), "tied_embeddings must be True or False"),
    (config(activation="relu"), "activation='relu'"),
    (config(param_dtype="bf16"), "param_dtype='bf16' is no dtype"),
    (config(compute_dtype="int8"), "compute_dtype must be a float"),
    (config(compute_dtype=None), "compute_dtype must be a float"),
    (config(layer_pattern="full"), "layer_pattern='full' must be a tuple"),
    (config(layer_pattern=()), "layer_pattern"),
    (config(layer_pattern=("sliding",)), "sliding layers need a window"),
    (config(window=4), "nothing else has one"),
    (config(layer_pattern=("sliding",), window=0), "window must be at least"),
    (config(rotary_dim=3), "rotary_dim=3 must be even"),
    (config(delta=4), "delta must be a GatedDelta"),
    (config(experts=dict(count=4)), "experts must be an Experts"),
    (config(adapter=8), "adapter must be an Adapter"),
    (config(rope_scaling=2.0), "Unknown RoPE scaling"),
    (lambda: br.GatedDelta(2, 3, 8, 8), "value_heads=3 is not a multiple"),
    (lambda: br.GatedDelta(2, 2, 8, 8, conv_width=1), "conv_width must be at"),
    (lambda: br.GatedDelta(2, 2, 8.5, 8), "key_dim must be a whole number"),
    (lambda: br.LatentAttention(0, 8, 4, 8), "rank must be at least 1"),
    (lambda: br.LatentAttention(8, 8, 3, 8), "even LatentAttention.rope_dim"),
    (lambda: br.LatentAttention(8, 8, None, 8), "rope_dim must be a whole"),
    (lambda: br.Experts(4, 5, 8), "top_k=5 is more than the 4"),
    (lambda: br.Experts(4, 2, -8), "width must be at least 1"),
    (lambda: br.Experts(4, 2, 8, scores="relu"), "scores must be"),
    (lambda: br.Experts(4, 2, 8, scaling=NAN), "scaling must be finite"),
    (lambda: br.Experts(4, 2, 8, normalised=None), "normalised must be True"),
    (config(layer_pattern=(object,)), "object in layer_pattern lacks posit"),
]

SETTINGS = [
    (lambda: br.Schedule(chunk_size=0), "chunk_size must be at least 1"),
    (lambda: br.Schedule(chunk_size=None), "chunk_size must be a whole"),
    (lambda: br.Schedule(chunk_size=8.0), "chunk_size must be a whole number"),
    (lambda: br.Schedule(branches_at_once=-1), "branches_at_once must be at"),
    (lambda: br.Schedule(readout_tokens="all"), "readout_tokens must be a"),
    (lambda: br.Schedule(memory_budget=-1), "memory_budget must be at least 0"),
    (lambda: br.Schedule(memory_budget=4e9), "memory_budget must be a whole"),
    (lambda: br.Schedule(activations="all"), "'all': use one of keep"),
    (lambda: br.Schedule(accumulator_dtype="fp8"), "'fp8' is no dtype"),
    (lambda: br.Schedule(accumulator_dtype="int32"), "accumulator_dtype must"),
    (lambda: br.Schedule(layout=8), "layout must be a Layout.*sharded"),
    (lambda: br.Schedule(attention="flash"), "'flash'"),
    (lambda: br.Sampling(chunks=0), "Sampling.chunks must be > 0"),
    (lambda: br.Sampling(chunks=NAN), "Sampling.chunks must be finite"),
    (lambda: br.Sampling(chunks="4"), "Sampling.chunks must be a number"),
    (lambda: br.Sampling(law="best"), "'best': use one of importance"),
    (lambda: br.Law(temperature=-1), "temperature must be ≥ 0"),
    (lambda: br.Law(temperature=NAN), "temperature must be finite"),
    (lambda: br.Law(temperature=None), "temperature must be a number"),
    (lambda: br.Law(top_k=0), "top_k must be at least 1"),
    (lambda: br.Law(top_k=0.9), "top_k must be a whole number"),
    (lambda: br.Law(top_p=0.0), "top_p must be > 0"),
    (lambda: br.Law(top_p=50), "top_p must be ≤ 1"),
    (lambda: br.LogProbs(0.0), "temperature must be > 0"),
    (lambda: br.LogProbs("1"), "temperature must be a number"),
    (lambda: br.LogProbs(INF), "temperature must be finite"),
]


def create(prompt=(1, 2), tails=((3,),), **options):
  return lambda: br.Group.create(
      prompt, tails, **dict(config=one().config) | options
  )


GROUPS = [
    (create(prompt=[]), "Empty prompt"),
    (create(prompt="Hello"), "prompt must be ids, not text"),
    (create(prompt=3), "prompt must be one sequence"),
    (create(prompt=None), "prompt must be one sequence"),
    (create(prompt=[1.0, 2.0]), "prompt must be one sequence of integer ids"),
    (create(prompt=[True, False]), "prompt must be one sequence of integer"),
    (create(prompt=[[1, 2]]), "prompt must be one sequence"),
    (create(prompt=[[1], [2, 3]]), "prompt must be one sequence"),
    (create(prompt=[1, 64]), "outside the vocabulary of 64"),
    (create(tails=[]), "at least one tail"),
    (create(tails=[1, 2]), "tails must be one sequence"),
    (create(tails=3), "tails must be a list of sequences"),
    (create(tails="ab"), "tails must be a list of sequences"),
    (create(tails=[["a"]]), "tails must be one sequence of integer ids"),
    (create(tails=[[-100]]), "tails lie outside"),
    (create(tails=[[1] * 300]), "302 positions exceed"),
    (create(config=None), "config must be a ModelConfig"),
    (create(branches=0), "branches must be at least 1"),
    (create(branches=2.0), "branches must be a whole number"),
    (create(tails=[[1], [2]], branches=1), "do not fit branches=1"),
    (create(block=0), "block must be at least 1"),
    (create(block="2"), "block must be a whole number"),
    (create(tail_inputs=[[1]]), "say block="),
    (create(tail_inputs=[[1, 2]], block=1), "each input has one target"),
    (lambda: br.stack([]), "No groups to stack"),
    (lambda: br.stack(one().group), "groups must be a list of Groups"),
    (lambda: br.stack([one().group, 3]), "groups must be a Group"),
    (lambda: br.stack([one().stacked]), "stacked already"),
    (
        lambda: br.stack([tiny.group(tails=(1,)), tiny.group(tails=(1, 2))]),
        r"Groups of \[1, 2\] branches",
    ),
    (lambda: br.Tree.from_sequences([], config=one().config), "at least one"),
    (lambda: br.Tree.from_sequences([[]], config=one().config), "at least one"),
    (lambda: br.Tree.from_sequences("ab", config=one().config), "sequences"),
    (lambda: br.Tree.from_sequences([["a"]], config=one().config), "sequences"),
    (lambda: br.Tree.from_sequences([[1, 2]], config=3), "config must be a"),
    (
        lambda: br.Tree.from_sequences([[1, 2], [2, 3]], config=one().config),
        "begin with different tokens",
    ),
    (
        lambda: br.Tree.from_sequences(
            [[1, 2]], config=one().config, trained=[[False]]
        ),
        "trained has masks of shapes",
    ),
    (
        lambda: br.Tree.from_sequences(
            [[1, 2]], config=one().config, trained=[[True, True]]
        ),
        "neither can carry loss",
    ),
    (lambda: br.Tree.from_turns([], config=one().config), "at least one"),
    (
        lambda: br.Tree.from_turns([[([1, 2], True)]], config=one().config),
        "episodes must be a Turn",
    ),
    (
        lambda: br.Tree.from_turns(
            [[br.Turn([1, 2], "no")]], config=one().config
        ),
        "Turn.trained must be True or False",
    ),
]

def by_hand(**changes):
  """A call with a group made by hand."""
  return lambda: br.log_probs(
      one().model, one().params, dataclasses.replace(one().group, **changes)
  )


CALLS = [
    # The model and its parameters.
    (
        lambda: br.log_probs(one().config, one().params, one().group),
        r"model must be a Decoder, not a ModelConfig. Wrap it: Decoder\(config",
    ),
    (
        lambda: br.log_probs(
            one().model, {"params": one().params}, one().group
        ),
        r"pass its 'params', variables\['params'\]",
    ),
    (
        lambda: br.log_probs(one().model, None, one().group),
        "params must be the dict",
    ),
    (
        lambda: br.log_probs(br.Decoder("llama"), one().params, one().group),
        "Decoder.config must be a ModelConfig",
    ),
    (lambda: presets.geometry(3), "model must be a str or PathLike"),
    (lambda: presets.geometry("qwen3-8"), "did you mean 'qwen3-8b'"),
    (
        lambda: br.log_probs(
            one().model, step.TrainState(one().params, (), 0, 0), one().group
        ),
        "TrainState. Pass its .params",
    ),
    (
        lambda: br.log_probs(one().other, one().params, one().group),
        r"embed/table of shape \(64, 32\), and the model's is \(64, 64\)",
    ),
    (
        lambda: gradient(with_params(lambda p: p.pop("head") and None),
                         one().group, one().weights),
        "params has no head/table",
    ),
    (
        lambda: gradient(
            one().params, one().group, one().weights,
            model=br.Decoder(dataclasses.replace(
                one().config, tied_embeddings=True
            )),
        ),
        "params has head/table, which a model of this config does not read",
    ),
    (
        lambda: gradient(
            one().params, one().group, one().weights,
            model=br.Decoder(dataclasses.replace(
                one().config, adapter=config_lib.Adapter(2, 4.0)
            )),
        ),
        "params has no layers/.*adapter",
    ),
    (
        lambda: gradient(
            with_params(lambda p: p.update(
                embed={"table": np.zeros((64, 32), np.int8)}
            )),
            one().group, one().weights,
        ),
        "embed/table of int8: parameters are arrays of floats",
    ),
    (
        lambda: gradient(
            with_params(lambda p: p.update(embed={"table": [[0.0]]})),
            one().group, one().weights,
        ),
        "params has no embed/table, of shape",
    ),
    # The group.
    (
        lambda: br.log_probs(one().model, one().params, [[1, 2], [3]]),
        "group must be a Group, as Group.create makes one, not a list",
    ),
    (
        lambda: br.log_probs(
            one().model, one().params, dataclasses.replace(
                one().group, tails=one().group.tails[0]
            )
        ),
        "A group of no branches",
    ),
    (
        lambda: br.dense_log_probs(one().model, one().params, one().stacked),
        "one group, not stacked",
    ),
    (
        lambda: br.dense_log_probs(
            one().model, one().params, one().group, temperature=0
        ),
        "temperature must be > 0",
    ),
    (by_hand(tails=np.ones((4, 8))), "Group.tails must be an array of int"),
    (by_hand(prompt=[1, 2]), "Group.prompt must be an array of int"),
    (by_hand(prompt_length=3), "Group.prompt_length must be an array"),
    (
        by_hand(tail_lengths=np.ones(3, int)),
        r"Group.tail_lengths has shape \(3,\), not \(4,\)",
    ),
    (
        by_hand(tail_lengths=np.ones((4, 1), int)),
        r"Group.tail_lengths has shape \(4, 1\), not \(4,\)",
    ),
    (
        by_hand(prompt=np.ones((2, 17), int), prompt_length=np.ones(2, int)),
        "as many groups must be stacked in both",
    ),
    # Settings of a gradient.
    (lambda: log_probs(temperature=0.0), "temperature must be > 0"),
    (lambda: log_probs(prefix_gradient="none"), "'none': use one of full"),
    (lambda: log_probs(prefix_gradient=None), "prefix_gradient None"),
    (lambda: log_probs(schedule=None), "schedule must be a Schedule"),
    (lambda: log_probs(schedule=1024), "schedule must be a Schedule"),
    (lambda: log_probs(sampling=4), "sampling must be a Sampling"),
    (lambda: log_probs(prefix_gradient="sampled"), "pass key="),
    (
        lambda: log_probs(prefix_gradient="sampled", key=0),
        "key must be one PRNG key",
    ),
    (
        lambda: log_probs(
            prefix_gradient="sampled", key=jax.random.split(one().key, 3)
        ),
        "key must be one PRNG key",
    ),
    (lambda: log_probs(version=3), "version= belongs to a state="),
    (lambda: log_probs(state=3), "state must be a PrefixState"),
    (
        lambda: br.replay(
            one().model, one().params, one().group, readout="log_probs"
        ),
        "readout must be a function",
    ),
    (lambda: br.value_and_grad(one().model, None), "loss must be a function"),
    (
        lambda: br.value_and_grad(one().config, tiny.loss),
        "model must be a Decoder",
    ),
    (
        lambda: gradient(
            one().params, one().group, one().weights, trainable="lora"
        ),
        "trainable='lora': use one of all, adapters",
    ),
    (
        lambda: gradient(
            one().params, one().group, one().weights, trainable="adapters"
        ),
        "the model has none: use adapters.add",
    ),
    (
        lambda: gradient(
            one().params, one().group, one().weights, balance=-0.1
        ),
        "balance must be ≥ 0",
    ),
    (
        lambda: gradient(one().params, one().group, one().weights, balance=NAN),
        "balance must be finite",
    ),
    (
        lambda: gradient(one().params, one().group, one().weights, balance=0.1),
        "the model has no experts",
    ),
    (
        lambda: gradient(
            one().params, one().group, one().weights, balance_share=0.5
        ),
        "belongs to a load-balance term",
    ),
    # Arguments of a loss.
    (
        lambda: gradient(one().params, one().group, np.ones((6, 8))),
        r"shape \(6, 8\): its leading axes must be \(4,\)",
    ),
    (
        lambda: gradient(one().params, one().group, np.ones((3, 8))),
        r"shape \(3, 8\): its leading axes must be \(4,\)",
    ),
    (
        lambda: gradient(one().params, one().group, 1.0),
        r"shape \(\): its leading axes must be \(4,\)",
    ),
    (
        lambda: gradient(one().params, one().group, {"w": [one().weights, 3]}),
        r"shape \(\): its leading axes must be \(4,\)",
    ),
    (
        lambda: gradient(one().params, one().stacked, one().weights),
        r"shape \(4, 8\): its leading axes must be \(2, 4\)",
    ),
    (
        lambda: gradient(one().params, one().stacked, np.ones((2, 6, 8))),
        r"shape \(2, 6, 8\): its leading axes must be \(2, 4\)",
    ),
    (
        lambda: loop(one().params, one().group, np.ones((6, 8))),
        r"shape \(6, 8\): its leading axes must be \(4,\)",
    ),
    (
        lambda: loop(one().params, one().group, 1.0),
        r"shape \(\): its leading axes must be \(4,\)",
    ),
    (
        lambda: br.value_and_grad(one().model, tiny.loss)(
            one().params, one().tree, np.ones(3)
        ),
        r"shape \(3,\): its leading axes must be \(8,\), one a token",
    ),
    # The driver on the host.
    (lambda: loop(one().params, one().stacked), "not stacked groups"),
    (
        lambda: br.value_and_grad(one().model, tiny.loss, hosted=True),
        "hosted must be a Hosted",
    ),
    (lambda: br.Hosted(progress=1), "Hosted.progress must be True or"),
    (
        lambda: br.replay(
            one().model, one().params, one().tree, version=1
        ),
        "are for a Group",
    ),
    # Trees.
    (
        lambda: br.log_probs(one().model, one().params, [1, 2]),
        "group must be a Group, .* not a list",
    ),
    (
        lambda: br.replay(one().other, one().params, one().tree),
        "embed/table of shape",
    ),
    (
        lambda: br.value_and_grad(one().config, tiny.loss),
        "model must be a Decoder",
    ),
    (
        lambda: br.log_probs(
            one().model, one().params, one().tree, temperature=-1
        ),
        "temperature must be > 0",
    ),
    # States.
    (
        lambda: br.capture(one().other, one().params, [1, 2]),
        "embed/table of shape",
    ),
    (
        lambda: br.capture(one().model, one().params, []),
        "Empty prompt",
    ),
    (
        lambda: br.capture(one().model, one().params, "Hello"),
        "prompt must be ids, not text",
    ),
    (
        lambda: br.capture(one().model, one().params, [1, 2], version=-1),
        "version must be at least 0",
    ),
    (
        lambda: br.capture(one().model, one().params, [1, 2], version=1 << 32),
        "version must be less than 2³²",
    ),
    (
        lambda: br.capture(one().model, one().params, [1, 2], version="a"),
        "version must be a whole number",
    ),
    (
        lambda: br.capture(one().model, one().params, [1, 2], version=1.5),
        "version must be a whole number",
    ),
    (
        lambda: br.capture(one().model, one().params, [1, 2, 3], capacity=1),
        "capacity=1 is less than the prefix of 2",
    ),
    (
        lambda: br.capture(one().model, one().params, [1, 2], capacity=1e3),
        "capacity must be a whole number",
    ),
    (
        lambda: br.capture(one().model, one().params, one().stacked),
        "one group, not stacked",
    ),
    (
        lambda: br.capture(one().model, one().params, [1, 2], schedule=8),
        "schedule must be a Schedule",
    ),
    (
        lambda: br.capture(one().model, one().params, [1, 2], keep=None),
        "keep must be True or False",
    ),
    (
        lambda: br.extend(one().model, one().params, None, [1]),
        "state must be a PrefixState",
    ),
    (
        lambda: br.extend(one().model, None, one().group, [1]),
        "params must be the dict",
    ),
    # Sampling.
    (lambda: draw(one().config, one().params, [1]), "model must be a Decoder"),
    (lambda: draw(one().other, one().params, [1]), "embed/table of shape"),
    (lambda: draw(one().model, one().params, []), "Empty prompt"),
    (lambda: draw(one().model, one().params, one().group), "takes no Group"),
    (lambda: draw(one().model, one().params, "Hi"), "not text"),
    (lambda: draw(one().model, one().params, [[1, 2]]), "prompt must be one"),
    (lambda: draw(branches=0), "branches must be at least 1"),
    (lambda: draw(branches=2.0), "branches must be a whole number"),
    (lambda: draw(branches=None), "branches must be a whole number"),
    (lambda: draw(max_tokens=-3), "max_tokens must be at least 1"),
    (lambda: draw(max_tokens=255), "257 positions exceed"),
    (lambda: draw(key=0), "key must be one PRNG key"),
    (lambda: draw(key=None), "key must be one PRNG key"),
    (lambda: draw(key=np.ones(2)), "key must be one PRNG key"),
    (lambda: draw(law=0.7), "law must be a Law"),
    (lambda: draw(stop_ids=64 * [64]), "stop ids lie outside"),
    (lambda: draw(stop_ids=2), "stop_ids must be one sequence"),
    (lambda: draw(stop_ids="</s>"), "stop_ids must be ids, not text"),
    (lambda: draw(draft_length=2), "without a drafter"),
    (lambda: draw(draft_length=-1), "draft_length must be at least 0"),
    (lambda: draw(draft_length="2"), "draft_length must be a whole number"),
    (lambda: draw(draft_length={7: 1}), "no entry for the batch buckets"),
    (lambda: draw(drafter="ngram", draft_length=1), "drafter must be one of"),
    (lambda: draw(drafter=drafters.NGram, draft_length=1), "drafter must be"),
    (lambda: draw(compact="yes"), "compact must be True or False"),
    (lambda: draw(state=[1, 2]), "state must be a PrefixState"),
    (lambda: draw(layers=one().params), "layers must be a Layers"),
    (lambda: draw(schedule="fast"), "schedule must be a Schedule"),
]


def answers(objective, mask=None, values=(1.0, 0.0), **options):
  mask = one().mask if mask is None else mask
  return lambda: objective.answers(mask, np.asarray(values), **options)


LEARNING = [
    (lambda: objectives.grpo(clip=-0.2), "clip_low must lie in"),
    (lambda: objectives.grpo(clip=NAN), "clip_low"),
    (lambda: objectives.grpo(kl_coefficient=-1), "kl_coefficient must be"),
    (lambda: objectives.grpo(kl_coefficient=NAN), "kl_coefficient must be"),
    (lambda: objectives.ppo(dual_clip=1.0), "dual_clip must be"),
    (lambda: objectives.dr_grpo(max_tokens=0), "max_tokens must be at least"),
    (lambda: objectives.PolicyLoss("tok", "token_mean"), "Unknown ratio 'tok'"),
    (lambda: objectives.PolicyLoss("token", "mean"), "reduction 'mean'"),
    (lambda: objectives.PolicyLoss("token", "constant"), "max_tokens=None"),
    (answers(objectives.dapo()), "needs old_log_probs"),
    (
        answers(objectives.reinforce(), old_log_probs=np.ones((2, 3))),
        "has no use for old_log_probs",
    ),
    (
        answers(objectives.dapo(), old_log_probs=np.ones((2, 4))),
        r"old_log_probs has shape \(2, 4\) and mask \(2, 3\)",
    ),
    (
        answers(objectives.reinforce(), mask=np.ones((2, 3))),
        "mask of float",
    ),
    (
        answers(objectives.reinforce(), values=(1.0, 0.0, 2.0)),
        r"advantages has shape \(3,\)",
    ),
    (
        answers(
            objectives.gspo(), values=np.ones((2, 3)),
            old_log_probs=np.ones((2, 3)),
        ),
        "takes one advantage an answer",
    ),
    (
        lambda: advantages.group_relative([1.0, 0.0], epsilon=-1),
        "epsilon=-1",
    ),
    (lambda: advantages.group_relative([1.0, 0.0], ddof=2), "ddof=2"),
    (
        lambda: advantages.group_relative([1.0, 0.0], np.ones(3, bool)),
        r"rewards of shape \(2,\) with a mask of \(3,\)",
    ),
    (lambda: advantages.group_relative([1.0, NAN]), "1 rewards are not finite"),
    (lambda: advantages.leave_one_out([INF, 1.0]), "1 rewards are not finite"),
    (lambda: advantages.leave_one_out("best"), "rewards must be"),
    (lambda: advantages.leave_one_out(None), "rewards must be"),
    (lambda: advantages.leave_one_out(1.0), "rewards must be"),
    (
        lambda: advantages.whiten(np.ones((2, 2)), np.ones((2, 3), bool)),
        "one entry of the mask for each value",
    ),
    (
        lambda: advantages.gae(
            np.ones((1, 2)), np.ones((1, 2)), np.ones((1, 2), bool),
            discount=1.5, trace=1.0,
        ),
        "discount must lie in",
    ),
    (
        lambda: advantages.gae(
            np.ones((1, 2)), np.ones((1, 3)), np.ones((1, 2), bool),
            discount=1.0, trace=1.0,
        ),
        r"values has shape \(1, 3\)",
    ),
    (
        lambda: advantages.check_rewards([1.0, NAN], (2,)),
        "1 rewards are not finite",
    ),
    (lambda: advantages.check_rewards([1.0], (2,)), "rewards have shape"),
    (lambda: sharding.sharded(one().params, 0), "0 devices asked for"),
    (lambda: sharding.sharded(one().params, 999), "999 devices asked for"),
    (lambda: sharding.sharded(one().params, 2.0), "devices.* a whole number"),
    (lambda: sharding.sharded(one().params, "cpu"), "devices.* a whole number"),
    (lambda: sharding.sharded(one().model, 1), "params must be"),
    (
        lambda: adapters.add(
            one().model, one().params, dict(rank=2), one().key
        ),
        "adapter must be an Adapter",
    ),
    (
        lambda: adapters.add(
            one().model, one().params, config_lib.Adapter(2, 4.0), 0
        ),
        "key must be one PRNG key",
    ),
    (
        lambda: adapters.add(
            one().other, one().params, config_lib.Adapter(2, 4.0), one().key
        ),
        "embed/table of shape",
    ),
    (lambda: adapters.merge(one().model, one().params), "has no adapters"),
    (lambda: step.create(one().params, "adam"), "optimizer must be"),
    (lambda: step.create(one().model, one().sgd), "params must be"),
    (
        lambda: step.create(one().params, one().sgd, trainable="some"),
        "trainable='some'",
    ),
    (
        lambda: step.create(one().params, one().sgd, trainable="adapters"),
        "no adapters",
    ),
    (
        lambda: step.make_step(one().model, tiny.loss, optax.sgd),
        "optimizer must be",
    ),
    (
        lambda: step.make_step(one().model, None, one().sgd),
        "loss must be a function",
    ),
    (lambda: tasks.recipe("retrival"), "Did you mean 'retrieval'"),
    (lambda: tasks.recipe("arithmetic", digit=3), "setting of task"),
    (lambda: tasks.recipe(3), "Unknown task"),
    (lambda: tasks.prepare("arithmetic"), "recipe must be a Recipe"),
    (lambda: tasks.load("arithmetic"), "recipe must be a Recipe"),
    (lambda: br.load_hf("/no/such/place"), "does not exist"),
    (lambda: br.load_hf(3), "directory must be"),
    (lambda: br.load_gguf("/no/such.gguf"), "no/such.gguf"),
    (lambda: br.load_gguf(None), "file must be"),
    (
        lambda: br.save_hf("never", one().model, one().params),
        "config must be a ModelConfig",
    ),
    (
        lambda: br.save_hf("never", one().config, None),
        "params must be",
    ),
]


@pytest.mark.parametrize(
    "call,match",
    [
        pytest.param(*row, id=f"{name}{place}: {row[1][:40]}")
        for name, rows in dict(
            config=CONFIGS, setting=SETTINGS, group=GROUPS, call=CALLS,
            learning=LEARNING,
        ).items()
        for place, row in enumerate(rows)
    ],
)
def test_a_wrong_argument_is_refused_by_name(call, match):
  refused(call, match)


def advice(call, pattern):
  """What the message of a refused call advises."""
  with pytest.raises((ValueError, TypeError), match=pattern) as caught:
    call()
  return re.search(pattern, str(caught.value)).groups()


def shapes_of(*args, **options):
  """`gradient`, traced and not run."""
  return jax.eval_shape(lambda: gradient(*args, **options))


def test_advice_about_arguments_works_when_it_is_followed():
  it = one()
  # To wrap, to unwrap, to call.
  (wrap,) = advice(
      lambda: br.log_probs(it.config, it.params, it.group), r"Wrap it: (\w+)\("
  )
  (part,) = advice(
      lambda: br.log_probs(it.model, {"params": it.params}, it.group),
      r"variables\['(\w+)'\]",
  )
  jax.eval_shape(lambda: br.log_probs(
      getattr(br, wrap)(it.config), {"params": it.params}[part], it.group
  ))
  (attribute,) = advice(
      lambda: step.create(step.TrainState(it.params, (), 0, 0), it.sgd),
      r"Pass its \.(\w+)",
  )
  train_state = step.TrainState(it.params, (), 0, 0)
  step.create(getattr(train_state, attribute), it.sgd)
  name, rate = advice(
      lambda: step.create(it.params, optax.adamw), r"optax\.(\w+)\(([\d.e-]+)\)"
  )
  step.create(it.params, getattr(optax, name)(float(rate)))
  # What is the same for all branches is made part of the loss.
  def scaled(scale, log_probs_GT, weights_GT):
    return scale * tiny.loss(log_probs_GT, weights_GT)

  advice(
      lambda: gradient(it.params, it.group, it.weights, 2.0),
      r"(functools\.partial)\(loss",
  )
  shapes_of(
      it.params, it.group, it.weights, loss=functools.partial(scaled, 2.0)
  )
  (name,) = advice(
      lambda: log_probs(prefix_gradient="sampled"), r"pass (\w+)="
  )
  shapes_of(
      it.params, it.group, it.weights, prefix_gradient="sampled",
      **{name: it.key},
  )


def test_advice_about_names_works_when_it_is_followed():
  (modes,) = advice(
      lambda: log_probs(prefix_gradient="none"), r"use one of (.*)\."
  )
  for mode in modes.split(", "):
    spec_lib.Spec(one().model, prefix_gradient=mode)
  (policies,) = advice(
      lambda: br.Schedule(activations="all"), r"use one of (.*) or None"
  )
  for policy in policies.split(", "):
    br.Schedule(activations=policy)
  for dtype in re.findall("'([a-z0-9]+)'", advice(
      config(param_dtype="half-precision"), "(use .*)"
  )[0]):
    config(param_dtype=dtype)()
  (name,) = advice(lambda: tasks.recipe("retrival"), "Did you mean '(.*?)'")
  tasks.recipe(name)
  (laws,) = advice(lambda: br.Sampling(law="best"), r"use one of (.*)\.")
  for law in laws.split(", "):
    br.Sampling(law=law)


def test_advice_about_models_works_when_it_is_followed():
  (pattern,) = advice(
      config(layer_pattern=("full", "full")), r"write it as (\(.*\))\."
  )
  config(layer_pattern=ast.literal_eval(pattern))()
  advice(config(rotary_dim=16), "(None to rotate all)")
  config(rotary_dim=None)()
  experts = dataclasses.replace(one().config, experts=br.Experts(4, 2, 8))
  adapter = config_lib.Adapter(2, 4.0)
  (matrices,) = advice(
      lambda: dataclasses.replace(experts, adapter=adapter),
      r"as in (\(.*\))\.",
  )
  dataclasses.replace(experts, adapter=dataclasses.replace(
      adapter, matrices=ast.literal_eval(matrices)
  ))
  advice(create(tails=[[1] * 300]), "raise (max_positions)")
  create(tails=[[1] * 300], config=config(max_positions=302)())()
  recurrent = br.Decoder(tiny.ARCHITECTURES["delta"])
  (mode,) = advice(
      lambda: spec_lib.Spec(recurrent, prefix_gradient="sampled"),
      r"use '(\w+)'",
  )
  spec_lib.Spec(recurrent, prefix_gradient=mode)


@pytest.mark.exhaustive
def test_advice_about_groups_and_states_works_when_it_is_followed():
  short, long = tiny.group(tails=(1,)), tiny.group(tails=(1, 2))
  (name,) = advice(
      lambda: br.stack([short, long]), r"Group\.create\(\.\.\., (\w+)="
  )
  padded = create(tails=[[1]], **{name: 2})()
  br.stack([padded, long])
  (buckets,) = advice(
      lambda: draw(draft_length={7: 1}), r"one for each of (\[.*\])"
  )
  lengths = dict.fromkeys(ast.literal_eval(buckets), 0)
  sample_lib._draft_lengths(lengths, tuple(lengths), None)
  model, params = tiny.model(tiny.BASE)
  state = br.capture(model, params, [1, 2, 3], version=1)
  (capacity,) = advice(
      lambda: br.extend(model, params, state, 9 * [1], version=1),
      r"capacity=(\d+)",
  )
  roomy = br.capture(
      model, params, [1, 2, 3], version=1, capacity=int(capacity)
  )
  longer = br.extend(model, params, roomy, 9 * [1], version=1)
  assert int(longer.length) == 11

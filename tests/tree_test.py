# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Trees: every shared token once, and the same gradient all the same."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import branch_replay as br
from branch_replay.data import token_tree
from branch_replay.data.token_tree import NO_PARENT
from branch_replay.data.token_tree import NOWHERE
from branch_replay.data.token_tree import Turn
from branch_replay.devices import sharding
from branch_replay.engine import gradients
from branch_replay.engine import hosted
from branch_replay.engine import hosted_steps
from branch_replay.engine import program as program_lib
from branch_replay.engine import state as state_lib
from branch_replay.engine.runs import Action
from branch_replay.ops.attention import reference
from tests import tiny

TOLERANCE = 1e-11  # float64, relative, worst parameter

# A root; below it A, with an inner segment and two leaves, B, too short to be
# run once for its two leaves, and a leaf. Chunks of 7 divide none of them.
SHAPE = (21, [
    (19, [(17, [(3, []), (6, []), (0, []), (1, [])]), (4, []), (9, [])]),
    (5, [(4, []), (2, [])]),
    (7, []),
])
SCHEDULE = br.Schedule(chunk_size=7, activations="recompute")


def sequences_of(shape, seed=0):
  """Random sequences whose tree has a shape; siblings begin differently."""
  random, found = np.random.default_rng(seed), []

  def grow(shape, before, first):
    length, children = shape
    ids = random.integers(0, 64, length)
    ids[:1] = first
    path = [*before, *ids.tolist()]
    for child, below in enumerate(children):
      grow(below, path, 11 * child + 5)
    if not children:
      found.append(path)

  grow(shape, [], 1)
  return found


def trained_of(sequences):
  """Position by position, so that what is shared is marked alike."""
  return [
      [p >= 14 and p % 7 != 3 for p in range(len(ids))] for ids in sequences
  ]


def make(shape=SHAPE, seed=0, config=tiny.BASE):
  sequences = sequences_of(shape, seed)
  return br.Tree.from_sequences(
      sequences, config=config, trained=trained_of(sequences)
  )


def weights_of(tree, seed=1):
  """Mixed-sign weights for every token of every sequence."""
  random = np.random.default_rng(seed)
  return jnp.asarray(random.normal(size=tree.paths.shape))


def dense_gradient(decoder, params, tree, weights_GS):
  """The ground truth: whole sequences, plain attention, ordinary autodiff."""
  return jax.jit(jax.grad(lambda params: tiny.loss(
      br.dense_log_probs(decoder, params, tree), weights_GS
  )))(params)


def one_pass(decoder, params, tree, weights_GS, **options):
  options = dict(schedule=SCHEDULE) | options
  return br.value_and_grad(decoder, tiny.loss, **options)(
      params, tree, tree.sum_over_leaves(weights_GS)
  )


def by_autodiff(decoder, params, tree, weights_GS, **options):
  options = dict(schedule=SCHEDULE) | options
  return jax.grad(lambda params: tiny.loss(
      br.log_probs(decoder, params, tree, **options), weights_GS
  ))(params)


def problem(name="llama", shape=SHAPE):
  decoder, params = tiny.model(tiny.in_float64(tiny.ARCHITECTURES[name]))
  tree = make(shape)
  return decoder, params, tree, weights_of(tree)


@pytest.mark.exhaustive(but="llama")
@pytest.mark.parametrize(
    "name", ("llama", "window and full", "latent", "hybrid", "expert groups")
)
def test_exact_equals_dense_for_every_mixer(x64, name):
  decoder, params, tree, weights = arguments = problem(name)
  wanted = dense_gradient(*arguments)
  (value, outputs, _), gradient = one_pass(*arguments)
  assert tiny.worst(gradient, wanted) <= TOLERANCE
  dense = br.dense_log_probs(decoder, params, tree)
  np.testing.assert_allclose(tree.by_leaf(outputs), dense, atol=1e-12)
  np.testing.assert_allclose(value, tiny.loss(dense, weights), rtol=1e-12)


@pytest.mark.exhaustive
def test_autodiff_gives_the_dense_gradient(x64):
  """A token that leaves share has the sum of their cotangents."""
  arguments = decoder, params, tree, weights = problem()
  wanted = dense_gradient(*arguments)
  assert tiny.worst(by_autodiff(*arguments), wanted) <= TOLERANCE
  shared = int(tree.starts[1]) + 5  # in A, of six of the nine sequences
  seen = jax.vjp(tree.by_leaf, jnp.zeros(tree.tokens.size))[1](weights)[0]
  by_hand = sum(
      weights[row, 26] for row in range(9) if tree.paths[row, 26] == shared
  )
  assert (tree.paths[:, 26] == shared).sum() == 6
  np.testing.assert_allclose(seen[shared], by_hand, rtol=1e-12)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name,activations", [
    ("hybrid", "recompute_layers"), ("expert groups", "keep"),
])
def test_every_policy_gives_the_dense_gradient(x64, name, activations):
  arguments = problem(name)
  schedule = br.Schedule(
      chunk_size=50, activations=activations, branches_at_once=2
  )
  found = one_pass(*arguments, schedule=schedule)[1]
  assert tiny.worst(found, dense_gradient(*arguments)) <= TOLERANCE


@pytest.mark.exhaustive
def test_full_runs_every_sequence_on_its_own(x64):
  arguments = decoder, params, tree, weights = problem()
  program = program_lib.of_tree(tree, "full", chunk_size=7)
  # The empty leaf has no output that its siblings do not have too.
  assert [step.action for step in program.steps] == [Action.VISIT] * 8
  assert program.capacity == 0
  (value, outputs, _), found = one_pass(*arguments, prefix_gradient="full")
  assert tiny.worst(found, dense_gradient(*arguments)) <= TOLERANCE
  dense = br.dense_log_probs(decoder, params, tree)
  np.testing.assert_allclose(tree.by_leaf(outputs), dense, atol=1e-12)


def stopped_gradient(decoder, params, tree, weights_GS):
  """Of every segment on its own, on keys and values that are constants."""
  weights_N = tree.sum_over_leaves(weights_GS)
  total = None
  for segment, start in enumerate(tree.positions):
    end = start + tree.lengths[segment]
    own = tree.indices(segment, start, end)
    if not tree.trained[own].any():
      continue
    path = jnp.asarray(tree.tokens[tree.indices(segment, 0, end)])[None]
    first = max(start - 1, 0)  # the token it starts on is run with it

    def attend(q, k, v, first=first):
      def stop(x):
        return jnp.concatenate(
            [jax.lax.stop_gradient(x[:, :, :first]), x[:, :, first:]], axis=2
        )

      return reference.causal(q, stop(k), stop(v))

    def loss(params, path=path, attend=attend, own=own, start=start):
      logits = decoder.apply({"params": params}, path[:, :-1], attend=attend)
      picked = jnp.take_along_axis(
          jax.nn.log_softmax(logits), path[:, 1:, None], axis=2
      )[0, :, 0]
      mine = jnp.concatenate([jnp.zeros(1), picked])[start:]
      return tiny.loss(
          jnp.where(tree.trained[own], mine, 0), weights_N[own]
      )

    gradient = jax.jit(jax.grad(loss))(params)
    total = gradient if total is None else jax.tree.map(
        jnp.add, total, gradient
    )
  return total


@pytest.mark.exhaustive
def test_stop_holds_constant_what_ancestors_left_behind(x64):
  shape = (20, [(9, [(3, []), (6, [])]), (4, [])])
  arguments = problem(shape=shape)
  wanted = stopped_gradient(*arguments)
  found = one_pass(*arguments, prefix_gradient="stop")[1]
  assert tiny.worst(found, wanted) <= TOLERANCE
  exact = dense_gradient(*arguments)
  assert tiny.worst(found, exact) > 0.1, "stop must be visibly biased here"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name,devices", [("hybrid", 8), ("mistral", 3), ("experts", 2)]
)
def test_several_devices_give_the_dense_gradient(x64, name, devices):
  arguments = decoder, params, tree, weights = problem(name)
  layout = sharding.sharded(params, devices)
  schedule = br.Schedule(
      chunk_size=8, activations="recompute", layout=layout
  )
  (_, outputs, _), found = br.value_and_grad(
      decoder, tiny.loss, schedule=schedule
  )(layout.place(params), tree, tree.sum_over_leaves(weights))
  assert tiny.worst(found, dense_gradient(*arguments)) <= TOLERANCE
  dense = br.dense_log_probs(decoder, params, tree)
  np.testing.assert_allclose(tree.by_leaf(outputs), dense, atol=1e-12)


@pytest.mark.exhaustive(but="stop")
@pytest.mark.parametrize("mode", ("exact", "stop"))
def test_a_tree_of_one_level_is_a_group_bit_for_bit(mode):
  decoder, params = tiny.model(tiny.BASE)
  sequences = sequences_of((12, [(5, []), (1, []), (7, [])]))
  tree = br.Tree.from_sequences(
      sequences, config=tiny.BASE,
      trained=[[p >= 12 for p in range(len(ids))] for ids in sequences],
  )
  group = br.Group.create(
      sequences[0][:12], [ids[12:] for ids in sequences], config=tiny.BASE
  )
  weights_GS = weights_of(tree)
  weights_GT = jnp.where(group.mask(), weights_GS[:, 12:20], 0)
  options = dict(prefix_gradient=mode, schedule=SCHEDULE)
  (value, outputs, _), found = one_pass(
      decoder, params, tree, weights_GS, **options
  )
  (wanted_value, log_probs, _), wanted = br.value_and_grad(
      decoder, tiny.loss, **options
  )(params, group, weights_GT)
  chex.assert_trees_all_equal(found, wanted)
  chex.assert_trees_all_equal(value, wanted_value)
  chex.assert_trees_all_equal(tree.by_leaf(outputs)[:, 12:20], log_probs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ("hybrid", "window and full"))
def test_in_stop_an_inner_segment_with_loss_is_a_tail_of_its_root(x64, name):
  decoder, params = tiny.model(tiny.in_float64(tiny.ARCHITECTURES[name]))
  sequences = sequences_of((21, [(19, [(4, []), (3, [])]), (7, [])]))
  trained = [[21 <= p < 40 for p in range(len(ids))] for ids in sequences]
  trained[2] = [False] * len(sequences[2])
  tree = br.Tree.from_sequences(
      sequences, config=decoder.config, trained=trained
  )
  weights_GS = weights_of(tree)
  (_, outputs, _), found = one_pass(
      decoder, params, tree, weights_GS, prefix_gradient="stop",
      schedule=SCHEDULE,
  )
  group = br.Group.create(
      sequences[0][:21], [sequences[0][21:40]], config=decoder.config
  )
  weights_1T = jnp.pad((weights_GS[0] + weights_GS[1])[None, 21:40], (
      (0, 0), (0, group.tails.shape[1] - 19)
  ))
  (_, log_probs, _), wanted = br.value_and_grad(
      decoder, tiny.loss, prefix_gradient="stop", schedule=SCHEDULE
  )(params, group, weights_1T)
  np.testing.assert_allclose(
      tree.by_leaf(outputs)[0, 21:40], log_probs[0, :19], atol=1e-12
  )
  assert tiny.worst(found, wanted) <= TOLERANCE


def test_a_root_of_one_token_leaves_nothing_to_push(x64):
  """By the steps of trees, though it is a group."""
  decoder, params = tiny.model(tiny.in_float64(tiny.BASE))
  tree = br.Tree.from_sequences(
      sequences_of((1, [(5, []), (1, [])])), config=tiny.BASE
  )
  assert tree.is_group
  weights = weights_of(tree)
  task, program = gradients.plan_tree(
      decoder, tree, br.LogProbs(), "exact", SCHEDULE
  )
  assert program.capacity == 0
  _, found = hosted.gradient(
      task, params, program, tiny.loss, (tree.sum_over_leaves(weights),)
  )
  wanted = dense_gradient(decoder, params, tree, weights)
  assert tiny.worst(found, wanted) <= TOLERANCE


@pytest.mark.exhaustive
def test_perturbing_one_leaf_leaves_the_others_bit_equal():
  decoder, params = tiny.model(tiny.ARCHITECTURES["hybrid"])
  tree = make()
  leaf = tree.leaves[1]  # of six tokens, visited with two others
  tokens = tree.tokens.copy()
  mine = tree.indices(leaf, 57, 63)
  tokens[mine] = (tokens[mine] + 1) % 64
  other = dataclasses.replace(tree, tokens=tokens)
  before, after = (
      np.asarray(br.log_probs(decoder, params, x, schedule=SCHEDULE))
      for x in (tree, other)
  )
  rest = np.delete(np.arange(len(before)), 1)
  np.testing.assert_array_equal(before[rest], after[rest])
  carried = tree.mask()[1, 57:63]
  assert (before[1, 57:63][carried] != after[1, 57:63][carried]).all()
  np.testing.assert_array_equal(before[1, :57], after[1, :57])


@pytest.mark.exhaustive
def test_another_tree_of_the_same_buckets_compiles_nothing():
  # A width of its own: no other test has compiled for it.
  decoder, params = tiny.model(dataclasses.replace(tiny.BASE, ffn_width=56))
  steps = hosted_steps.push, hosted_steps.visit, hosted_steps.pop

  def compiled():
    return np.array([step._cache_size() for step in steps])

  before, found = compiled(), []
  for seed, shape in enumerate((
      SHAPE,
      # Other lengths, another order, one level less on one side.
      (20, [(7, []), (18, [(9, []), (5, []), (17, [(2, []), (7, []), (3, [])])
                           ]), (6, [(3, []), (1, [])])]),
  )):
    tree = make(shape, seed)
    br.value_and_grad(decoder, tiny.loss, schedule=SCHEDULE)(
        params, tree, tree.sum_over_leaves(weights_of(tree))
    )
    found.append((compiled() - before).tolist())
  assert min(found[0]) > 0, "the first tree compiles every step"
  assert found[0] == found[1], "a compilation a tree, not a bucket"


def test_memory_is_that_of_one_path():
  """More leaves and segments leave the state as large as it is."""
  wide = (21, [(19, [(17, [(3, [])] * 3), (4, [])])] * 6)
  programs = [
      program_lib.of_tree(make(shape), "exact", chunk_size=7)
      for shape in (SHAPE, wide)
  ]
  assert programs[0].capacity == programs[1].capacity == 64
  assert programs[1].tokens > 2 * programs[0].tokens


def test_the_budget_of_a_tree_counts_a_pushed_run_once():
  """By hand: 104 positions of a path, and two leaves of 8 on top of it.

  Each of two layers keeps of a token in float32 the inputs of its two halves
  (32 each), queries and outputs of 4 heads of 16, keys and values of 2, four
  log-sum-exps, and 2 · 48 of the feed-forward: 356 numbers.
  """
  tree = make((100, [(5, []), (6, [])]))
  needed = (104 + 2 * 8) * 2 * 4 * (2 * 32 + 2 * 4 * 16 + 2 * 2 * 16 + 4 + 96)

  def policy(memory_budget):
    schedule = br.Schedule(memory_budget=memory_budget)
    spec, _ = gradients.plan_tree(
        br.Decoder(tiny.BASE), tree, br.LogProbs(), "exact", schedule
    )
    return spec.schedule.activations

  assert policy(needed) == "keep"
  assert policy(needed - 1) == "recompute"


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", ("push", "visit", "pop", "stop"))
def test_no_step_copies_the_state_or_its_cotangent(step):
  """Compiled: temporaries do not follow the capacity of either."""
  decoder, params = tiny.model(tiny.BASE)
  tree = make()
  mode = "stop" if step == "stop" else "exact"
  task, program = gradients.plan_tree(
      decoder, tree, br.LogProbs(), mode, SCHEDULE
  )
  run, index = next(
      (run, index) for action, run, index in program.steps
      if run.read and (action == Action.VISIT) == (step == "visit")
  )

  def temporaries(capacity):
    state = jax.eval_shape(lambda: hosted_steps.empty(task, capacity, params))
    grads = jax.eval_shape(lambda: hosted_steps.zero_grads(task, params))
    accumulator = rest = None
    if mode == "exact":
      accumulator = jax.eval_shape(
          lambda: hosted_steps.zero_accumulator(task, capacity, params)
      )
      rest = state_lib.rest_of(tiny.BASE, accumulator)
    args = (jax.ShapeDtypeStruct(run.tokens_RS.shape, jnp.float32),)
    lowered = {
        "push": lambda: hosted_steps.push.lower(
            task, None, False, params, state, run
        ),
        "visit": lambda: hosted_steps.visit.lower(
            task, tiny.loss, params, grads, accumulator, state, run, index,
            args, None,
        ),
        "pop": lambda: hosted_steps.pop.lower(
            task, tiny.loss, params, grads, accumulator, state, run,
            hosted_steps.Pushed((), None, rest), index, args, None, None,
        ),
        "stop": lambda: hosted_steps.push_and_visit.lower(
            task, tiny.loss, params, grads, state, run, index, args, None
        ),
    }[step]()
    return lowered.compile().memory_analysis().temp_size_in_bytes

  positions = 3 * 2048
  state = 2 * 2 * tiny.BASE.num_kv_heads * tiny.BASE.head_dim * positions * 4
  assert temporaries(4 * 2048) - temporaries(2048) <= state / 20


def test_each_distinct_token_is_run_once():
  shape = (40, [(30, [(20, [(9, []), (8, [])]), (7, [])]), (31, [])])
  tree = make(shape)
  program = program_lib.of_tree(tree, "exact", chunk_size=1024)
  # The last token of a leaf predicts nothing: four leaves; a child more than
  # one of the root, of the segment of 30, and of that of 20.
  distinct = 40 + 30 + 20 + 9 + 8 + 7 + 31
  assert program.tokens == distinct - 4 + 3
  pushed = [(int(run.first), int(run.lengths_R[0])) for run in program.pushed]
  assert pushed == [(0, 39), (39, 30), (69, 20)]
  stack = []
  for action, run, _ in program.steps:  # depth first, last in first out
    if action == Action.PUSH:
      stack.append(run)
    elif action == Action.POP:
      assert run is stack.pop()
    else:
      assert run.first == sum(int(x.lengths_R[0]) for x in stack)
  assert not stack


def test_targets_are_read_once_whatever_the_devices():
  tree = make()
  for devices in (1, 3, 8):
    program = program_lib.of_tree(
        tree, "exact", chunk_size=16, devices=devices
    )
    index = np.concatenate([
        index[index >= 0] for action, _, index in program.steps
        if action != Action.POP and index is not None
    ])
    np.testing.assert_array_equal(np.sort(index), np.flatnonzero(tree.trained))
    for run in program.started:
      assert run.first % devices == 0
      assert run.tokens_RS.shape[1] % devices == 0


def test_what_no_output_depends_on_is_not_run():
  sequences = sequences_of((20, [(18, [(4, []), (5, [])]), (3, [])]))
  trained = [np.zeros(len(ids), bool) for ids in sequences]
  trained[2][21] = True  # the second token of the last leaf
  tree = br.Tree.from_sequences(
      sequences, config=tiny.BASE, trained=trained
  )
  program = program_lib.of_tree(tree, "exact", chunk_size=1024)
  assert [step.action for step in program.steps] == [
      Action.PUSH, Action.VISIT, Action.POP
  ]
  assert program.started[1].lengths_R.tolist() == [2]


def test_a_tree_by_hand():
  tree = br.Tree.from_sequences(
      [[5, 6, 7, 8], [5, 6, 9], [5, 6, 7, 8, 1], [5, 6, 9]], config=tiny.BASE
  )
  # The first ends where the third goes on; the second and last are one.
  assert tree.parents.tolist() == [NO_PARENT, 0, 1, 1, 0, 4, 4]
  assert tree.lengths.tolist() == [2, 2, 0, 1, 1, 0, 0]
  assert tree.leaves.tolist() == [2, 5, 3, 6]
  assert tree.tokens.tolist() == [5, 6, 7, 8, 1, 9, 0, 0]
  assert tree.trained.tolist() == [False] + [True] * 5 + [False] * 2
  assert tree.positions.tolist() == [0, 2, 4, 4, 2, 3, 3]
  assert tree.paths[:, :5].tolist() == [
      [0, 1, 2, 3, NOWHERE], [0, 1, 5, NOWHERE, NOWHERE], [0, 1, 2, 3, 4],
      [0, 1, 5, NOWHERE, NOWHERE],
  ]
  ones = tree.sum_over_leaves(np.ones((4, 8)))
  assert ones.tolist() == [4, 4, 2, 2, 1, 2, 0, 0]
  assert tree.by_leaf(tree.tokens)[2].tolist() == [5, 6, 7, 8, 1, 0, 0, 0]


def test_turns_are_segments_and_observations_carry_no_loss():
  ask, call, see = Turn([1, 2, 3], False), Turn([4, 5], True), [7, 8, 9]
  tree = br.Tree.from_turns([
      [ask, call, Turn(see, False), Turn([6], True)],
      [ask, call, Turn(see, False), Turn([5, 6], True)],
      # The same ids where they were sampled are other tokens.
      [ask, call, Turn(see, True)],
  ], config=tiny.BASE)
  assert tree.parents.tolist() == [NO_PARENT, 0, 1, 2, 2, 1]
  assert tree.lengths.tolist() == [3, 2, 3, 1, 2, 3]
  assert tree.leaves.tolist() == [3, 4, 5]
  marks = [False] * 3 + [True] * 2 + [False] * 3 + [True] * 6
  assert tree.trained[:14].tolist() == marks
  assert tree.mask().sum(axis=1).tolist() == [3, 4, 5]


def test_errors():
  decoder, params = tiny.model(tiny.BASE)
  make_tree = br.Tree.from_sequences
  for sequences, message in (
      ([], "at least one token"), ([[1], []], "at least one token"),
      ([[1, 2], [2, 1]], "begin with different tokens"),
      ([[1, 64]], "outside the vocabulary"), ([[1] * 257], "257 positions"),
  ):
    with pytest.raises(ValueError, match=message):
      make_tree(sequences, config=tiny.BASE)
  with pytest.raises(ValueError, match=r"masks of shapes \[\(1,\)\]"):
    make_tree([[1, 2]], trained=[[True]], config=tiny.BASE)
  with pytest.raises(ValueError, match="first token of the root"):
    make_tree([[1, 2]], trained=[[True, True]], config=tiny.BASE)
  with pytest.raises(ValueError, match="no tokens"):
    br.Tree.from_turns([[Turn([], False)]], config=tiny.BASE)
  tree = make_tree([[1, 2, 3], [1, 2, 4]], config=tiny.BASE)
  with pytest.raises(ValueError, match="'sampled' draws chunks: pass key="):
    br.log_probs(decoder, params, tree, prefix_gradient="sampled")
  with pytest.raises(ValueError, match="Unknown prefix_gradient 'half'"):
    br.log_probs(decoder, params, tree, prefix_gradient="half")
  with pytest.raises(TypeError, match="must be a Group, .*not a list"):
    br.replay(decoder, params, [1, 2])
  silent = dataclasses.replace(tree, trained=np.zeros(8, bool))
  with pytest.raises(ValueError, match="No token of the tree carries loss"):
    br.replay(decoder, params, silent)
  orphan = dataclasses.replace(tree, parents=np.array([NO_PARENT, 2, 0]))
  with pytest.raises(ValueError, match="comes after its parent"):
    token_tree.check(orphan, tiny.BASE)
  with pytest.raises(ValueError, match="tree.tokens.size"):
    br.value_and_grad(decoder, tiny.loss)(params, tree, np.ones(3))


def test_a_tree_may_be_closed_over_under_jit():
  """Traced alone: the loops unroll."""
  decoder, params = tiny.model(tiny.BASE)
  tree = make((18, [(17, [(3, []), (2, [])]), (2, [])]))
  found = jax.eval_shape(
      lambda params: by_autodiff(decoder, params, tree, weights_of(tree)),
      params,
  )
  chex.assert_trees_all_equal_shapes_and_dtypes(found, params)

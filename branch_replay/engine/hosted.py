# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The hosted driver: a loop in Python over the steps of a program.

It runs trees, which differ from each other, and groups whose prefix takes
minutes or hours: it shows progress, can be interrupted between two steps, and
may keep the state in the host's memory. A step is compiled once for the shapes
of its run, whatever the order of steps (`hosted_steps`). One state holds the
path of runs that are pushed and not yet popped, one accumulator its cotangent;
both are donated from step to step, so memory is that of the deepest path. For
layers without a place for every position (a window, a recurrence) the cotangent
accumulated for a run's parent waits on a Python stack while the run is on the
state. Under `jit` the loop unrolls, and every program compiles anew.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import tqdm

from branch_replay import checks
from branch_replay.devices import host_memory
from branch_replay.engine import balance as balance_lib
from branch_replay.engine import draws as draws_lib
from branch_replay.engine import hosted_steps
from branch_replay.engine import spec as spec_lib
from branch_replay.engine import state as state_lib
from branch_replay.engine.program import Program
from branch_replay.engine.runs import Action
from branch_replay.engine.spec import Spec
from branch_replay.mixers import kinds


@dataclasses.dataclass(frozen=True)
class Hosted:
  """Settings of the hosted driver.

  Attributes:
    progress: whether to show a progress bar.
    offload: whether the prefix state and its cotangent stay in the host's
      memory and only one layer at a time is on the device (outputs of
      attention that are kept, `Schedule.keep_attention`, stay on the device).
      Every step then
      copies the whole state to the device, and in "exact" the cotangent there
      and back.
  """

  progress: bool = False
  offload: bool = False

  def __post_init__(self):
    checks.flag(self.progress, "Hosted.progress")
    checks.flag(self.offload, "Hosted.offload")

  def check(self, spec: Spec):
    """Raises ValueError if these settings do not fit a spec."""
    if self.offload and not kinds.positional(spec.config):
      raise ValueError(
          "offload=True is for full and latent attention: the state of "
          f"{spec.config.layer_pattern} does not grow with the prefix."
      )
    if self.offload and spec.layout.devices > 1:
      raise ValueError(
          f"offload=True is for one device, not {spec.layout.devices}."
      )


def outputs(spec: Spec, params, program: Program):
  """Runs a program forward and returns the outputs of the readout.

  Args:
    spec: model, readout and schedule.
    params: parameters.
    program: the program of a tree or a group.

  Returns:
    The readout's pytree, each leaf [N, ...], and 0 where no output is wanted.
    N counts the tokens of a tree, or the branches of a group.
  """
  found = []

  def step(action, run, index, state):
    looks, saved = run.read is not None, None
    if action == Action.PUSH:
      state, saved, _, out = hosted_steps.push(
          spec, None, looks, params, state, run
      )
    else:
      out = hosted_steps.look(spec, params, state, run) if looks else None
    if looks:
      found.append((index, out))
    return state, saved

  _forward(spec, params, program, step)
  return hosted_steps.collect(found, program.outputs)


def gradient(
    spec: Spec, params, program: Program, loss, args, *, key=None, share=1.0,
    how: Hosted = Hosted(),
):
  """Runs a program forward and backward and returns the gradient.

  With a load-balance term experts are counted first, which runs the program
  forward once more. A program whose runs are all pushed before the first visit,
  as that of a group, pushes them only once: they are counted on the state.

  Args:
    spec: model, readout, mode and schedule.
    params: parameters.
    program: the program of a tree or a group.
    loss: (outputs, *args) -> scalar, for the rows of one run; None if the only
      one of `args` is the cotangent of the outputs.
    args: tuple of pytrees of arrays with leading axis N, see `outputs`.
    key: PRNG key for "sampled"; else unused.
    share: factor on the load-balance term.
    how: whether to show progress, and where the state is.

  Returns:
    An `Evaluation` (a `Balanced` with a load-balance term): the loss summed
    over runs, outputs [N, ...], and in "sampled" which runs were drawn; and
    gradients like `spec.trained(params)`, at least float32.
  """
  if spec.layout.devices > 1 and spec.schedule.activations == "keep":
    spec = spec.with_policy("recompute")  # activations are kept on one only
  seeds = load = None

  def settle(counts):
    nonlocal seeds, load
    seeds = balance_lib.seeds(spec.config, share * spec.balance, counts)
    load = balance_lib.load(spec.config, counts)

  if spec.balance and not _pushes_first(spec, program):
    settle(_count(spec, params, program, how))
  shown = [
      step for step in program.steps
      if spec.accumulates or step.action != Action.POP
  ]
  with tqdm.tqdm(
      total=len(shown), unit="step", disable=not how.progress
  ) as bar:
    running = _Gradient(spec, params, program, loss, args, key=key, how=how)
    for step in program.steps:
      if spec.balance and seeds is None and step.action != Action.PUSH:
        settle(_count_on(spec, params, program, running.state))
      running.run(step, seeds)
      if how.progress and (spec.accumulates or step.action != Action.POP):
        jax.block_until_ready((running.state, running.grads))  # not enqueued
        bar.set_description(_SHOWN[step.action])
        bar.update()
  return running.evaluation(load), running.grads


_SHOWN = {
    Action.PUSH: "prefix forward", Action.VISIT: "branches",
    Action.POP: "prefix backward",
}


class _Gradient:
  """A gradient in the making: what is carried from step to step.

  Attributes:
    state: the state of the path of runs that are pushed and not yet popped.
    grads: gradients so far; None before the first run is pulled back.
  """

  def __init__(self, spec, params, program, loss, args, *, key, how):
    self._spec, self._params, self._program = spec, params, program
    self._loss, self._args, self._how = loss, args, how
    self.state = _placed(
        how, hosted_steps.empty, spec, program.capacity, params
    )
    self.grads = self._accumulator = None
    self._path, self._found, self._values = [], [], []
    self._keep = self._draws = None
    if spec.schedule.activations == "keep" and spec.accumulates:
      self._keep = "stages"
    if spec.prefix_gradient == "sampled":
      self._draws = draws_lib.Draws(spec, program, key)

  def run(self, step, seeds):
    """Runs one step of the program, with the seeds of a load-balance term."""
    action, run, index = step
    accumulates = self._spec.accumulates
    if action == Action.PUSH and (accumulates or run.read is None):
      self._push(run)
      return
    if self.grads is None:
      self.grads = hosted_steps.zero_grads(self._spec, self._params)
      if accumulates:
        self._accumulator = _placed(
            self._how, hosted_steps.zero_accumulator, self._spec,
            self._program.capacity, self._params,
        )
    if action == Action.POP and not accumulates:
      self.state = _restored(self._spec, self.state, run, self._path.pop())
      return
    args = () if run.read is None else hosted_steps.take(self._args, index)
    pull = {
        Action.PUSH: self._push_and_visit, Action.VISIT: self._visit,
        Action.POP: self._pop,
    }[action]
    out, value = pull(run, index, args, seeds)
    if run.read is not None:
      self._found.append((index, out))
      self._values.append(value)

  def _push(self, run):
    self.state, saved, kept, _ = hosted_steps.push(
        self._spec, self._keep, False, self._params, self.state, run
    )
    of_parent, self._accumulator = _set_aside(
        self._spec.config, self._accumulator
    )
    self._path.append(hosted_steps.Pushed(saved, kept, of_parent))
    if self._draws:
      self._draws.pushed(run)

  def _push_and_visit(self, run, index, args, seeds):
    self.grads, self.state, saved, *out = hosted_steps.push_and_visit(
        self._spec, self._loss, self._params, self.grads, self.state, run,
        index, args, seeds,
    )
    self._path.append(hosted_steps.Pushed(saved))
    return out

  def _visit(self, run, index, args, seeds):
    self.grads, self._accumulator, *out = hosted_steps.visit(
        self._spec, self._loss, self._params, self.grads, self._accumulator,
        self.state, run, index, args, seeds,
    )
    return out

  def _pop(self, run, index, args, seeds):
    draw = self._draws.draw() if self._draws else None
    self.grads, self._accumulator, rest, report, *out = hosted_steps.pop(
        self._spec, self._loss, self._params, self.grads, self._accumulator,
        self.state, run, self._path.pop(), index, args, draw, seeds,
    )
    self.state = state_lib.with_rest(self._spec.config, self.state, rest)
    if self._draws:
      self._draws.popped(report)
    return out

  def evaluation(self, load):
    """The `Evaluation` after the last step; a `Balanced` with a load."""
    return spec_lib.evaluation(
        sum(self._values),
        hosted_steps.collect(self._found, self._program.outputs),
        self._draws.report() if self._draws else None, load,
    )


def _forward(spec, params, program, step, how: Hosted = Hosted()):
  """Runs a program forward, calling step for each push and visit.

  `step` is (action, run, index, state) -> (state, saved).
  """
  state = _placed(how, hosted_steps.empty, spec, program.capacity, params)
  path = []
  for action, run, index in program.steps:
    if action == Action.POP:
      state = _restored(spec, state, run, path.pop())
      continue
    state, saved = step(action, run, index, state)
    if action == Action.PUSH:
      path.append(hosted_steps.Pushed(saved))


def _pushes_first(spec, program) -> bool:
  """Whether all pushes come before anything is pulled back.

  Then the experts of a load-balance term can be counted after the last push.
  """
  first = program.started[: len(program.pushed)]
  return all(
      run is pushed and (spec.accumulates or run.read is None)
      for run, pushed in zip(first, program.pushed, strict=True)
  )


def _count_on(spec, params, program, state):
  """Counts experts when all of a program's runs are on the state."""
  counts = balance_lib.zeros(spec.config)
  for pushed, runs in (True, program.pushed), (False, program.visited):
    for run in runs:
      counts = hosted_steps.count(spec, pushed, params, counts, state, run)
  return counts


def _count(spec, params, program, how):
  """Counts experts in a forward pass of its own."""
  counts = balance_lib.zeros(spec.config)

  def step(action, run, index, state):
    nonlocal counts
    del index
    saved, pushed = None, action == Action.PUSH
    if pushed:
      state, saved, *_ = hosted_steps.push(
          spec, None, False, params, state, run
      )
    counts = hosted_steps.count(spec, pushed, params, counts, state, run)
    return state, saved

  _forward(spec, params, program, step, how)
  return counts



def _placed(how: Hosted, make, *args):
  """Makes zeros by `make(*args)`, in the host's memory if it is offloaded."""
  if not how.offload:
    return make(*args)
  shapes = jax.eval_shape(functools.partial(make, *args))
  if not isinstance(shapes, state_lib.PrefixState):
    return host_memory.zeros(shapes)
  rest = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype),
      dataclasses.replace(shapes, mixer=None),
  )
  return dataclasses.replace(rest, mixer=host_memory.zeros(shapes.mixer))


def _set_aside(config, accumulator):
  """Takes `rest_of` an accumulator out until a run is popped; leaves zeros."""
  if accumulator is None or kinds.positional(config):
    return None, accumulator
  rest = state_lib.rest_of(config, accumulator)
  zeros = jax.tree.map(jnp.zeros_like, rest)
  return rest, state_lib.with_rest_of(config, accumulator, zeros)


def _restored(spec, state, run, pushed: hosted_steps.Pushed):
  """Rebuilds the state before the run that was pushed last."""
  if kinds.positional(spec.config):
    return state
  return state_lib.with_rest(
      spec.config, state, hosted_steps.restore(spec, state, run, pushed.saved)
  )

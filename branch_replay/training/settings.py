# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""What a training run is made of, as plain values with defaults.

`build` turns these into phases and learners, whose defaults they have. The
fields of a training config are the fields of `RunSettings`.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any
from typing import ClassVar
from typing import get_args

from branch_replay.engine.band import Band
from branch_replay.engine.estimators import Sampling
from branch_replay.training import experience
from branch_replay.training import loop
from branch_replay.training import pairwise
from branch_replay.training import phases as phases_lib

_SUPERVISED, _REINFORCE = phases_lib.Supervised, phases_lib.Reinforce
_PAIRWISE = pairwise.Pairwise
_EVALUATION, _RUN = loop.HeldOutEvaluation, loop.TrainingRun


def _empty() -> Mapping[str, Any]:
  return dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
  """AdamW, its learning rate over the updates, and clipping.

  Attributes:
    learning_rate: highest learning rate.
    warmup: updates until the highest rate is reached.
    decay: what the rate does after the warm-up: "constant", or "linear" or
      "cosine" down to a tenth at the end of the phase.
    b1: β₁ of Adam.
    b2: β₂ of Adam.
    weight_decay: decoupled decay of matrices and tables.
    clip_norm: largest norm of the gradient; 0 for no clipping.
  """

  learning_rate: float = 1e-5
  warmup: int = 0
  decay: str = "constant"
  b1: float = 0.9
  b2: float = 0.99
  weight_decay: float = 0.0
  clip_norm: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmSettings:
  """What reinforcement optimizes.

  Attributes:
    name: "grpo", "dr_grpo", "dapo", "gspo", "reinforce", "ppo", "dpo" or "ipo".
    settings: arguments of that algorithm; those not given have its defaults.
      See `by_name`.
  """

  name: str = "grpo"
  settings: Mapping[str, Any] = _empty()


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudySettings:
  """How a learned drafter is trained while the run samples.

  Attributes:
    vocabulary: number of ids that it drafts, the most frequent ones.
    updates: updates in every step of the run.
    until: step of the run after which it is frozen; 0 for never.
    learning_rate: learning rate of its AdamW.
    rows: rows of packed answers in an update.
    width: tokens of such a row.
    most_tokens: tokens of answers that are kept to learn from.
    fresh: how often an answer of the newest step is drawn, from 0 to 1.
  """

  vocabulary: int = 4096
  updates: int = 8
  until: int = 0
  learning_rate: float = 1e-3
  rows: int = 4
  width: int = 128
  most_tokens: int = 65_536
  fresh: float = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculationSettings:
  """Who drafts tokens for the sampler. No token depends on it, only time does.

  Attributes:
    drafter: "none", "ngram" or "learned".
    draft_lengths: lengths that the tuner chooses from; 0 must be one of them.
    epsilon: how often the tuner tries another length than the best so far.
    studies: how a learned drafter is trained.
  """

  drafter: str = "none"
  draft_lengths: tuple[int, ...] = (0, 1, 2, 4)
  epsilon: float = 0.05
  studies: StudySettings = StudySettings()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisedSettings:
  """A phase that learns the answers that the rows come with.

  Attributes:
    task: settings of the task that differ in this phase.
    steps: updates of the phase.
    prompts: rows of an update.
    max_tokens: tokens that answers are padded to; a longer answer is refused.
    optimizer: how parameters are updated.
  """

  kind: ClassVar[str] = "supervised"

  task: Mapping[str, Any] = _empty()
  steps: int = _SUPERVISED.steps
  prompts: int = _SUPERVISED.prompts
  max_tokens: int = _SUPERVISED.max_tokens
  optimizer: OptimizerSettings = OptimizerSettings()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforceSettings:
  """A phase that samples answers and learns from their rewards.

  Attributes:
    task: settings of the task that differ in this phase.
    steps: steps of the phase; each samples one batch of prompts.
    prompts: prompts of a step.
    branches: answers to every prompt.
    max_tokens: the most tokens of an answer.
    temperature: temperature that answers are sampled at.
    hold: what is kept of a prompt from sampling to learning: "activations",
      "state" or "nothing". It changes time and memory only.
    truncated: reward of an answer that reaches `max_tokens`: "score" asks the
      task, "zero" is 0, "leave_out" takes the answer out of learning.
    epochs: passes over a batch.
    updates: updates in a pass; must divide `prompts`.
    capture_every: updates that one capture of a prompt serves; more than 1
      replays stale states, which is an approximation.
    most_prompts: prompts that are sampled at most until `prompts` of them have
      answers that differ in reward; 0 takes the first `prompts`.
    speculation: who drafts tokens for the sampler.
    algorithm: what is optimized.
    optimizer: how parameters are updated.
  """

  kind: ClassVar[str] = "reinforce"

  task: Mapping[str, Any] = _empty()
  steps: int = _REINFORCE.steps
  prompts: int = _REINFORCE.prompts
  branches: int = 8
  max_tokens: int = 128
  temperature: float = 1.0
  hold: experience.Hold = experience.Rollouts.hold
  truncated: experience.Truncated = experience.Rollouts.truncated
  epochs: int = _REINFORCE.epochs
  updates: int = _REINFORCE.updates
  capture_every: int = _REINFORCE.capture_every
  most_prompts: int = 0
  speculation: SpeculationSettings = SpeculationSettings()
  algorithm: AlgorithmSettings = AlgorithmSettings()
  optimizer: OptimizerSettings = OptimizerSettings()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairwiseSettings:
  """A phase that learns from pairs of answers that the rows come with.

  Attributes:
    task: settings of the task that differ in this phase.
    steps: updates of the phase.
    prompts: pairs of an update.
    max_tokens: the most tokens of an answer; a longer one is refused.
    algorithm: "dpo" or "ipo".
    optimizer: how parameters are updated.
  """

  kind: ClassVar[str] = "pairwise"

  task: Mapping[str, Any] = _empty()
  steps: int = _PAIRWISE.steps
  prompts: int = _PAIRWISE.prompts
  max_tokens: int = _PAIRWISE.max_tokens
  algorithm: AlgorithmSettings = AlgorithmSettings(name="dpo")
  optimizer: OptimizerSettings = OptimizerSettings()


PhaseSettings = SupervisedSettings | ReinforceSettings | PairwiseSettings
PHASES = {kind.kind: kind for kind in get_args(PhaseSettings)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
  """How a run is evaluated on held-out prompts.

  Attributes:
    split: split that the prompts are of.
    prompts: number of prompts, the first of the split; 0 for all, but at most
      32.
    branches: answers to every prompt.
    max_tokens: the most tokens of an answer; 0 for those of the last phase.
    temperature: temperature that answers are sampled at; 0 is greedy.
    every: steps between two evaluations.
  """

  split: str = _EVALUATION.split
  prompts: int = 0
  branches: int = 4
  max_tokens: int = 0
  temperature: float = 1.0
  every: int = _EVALUATION.every


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterSettings:
  """Low-rank adapters that are trained instead of all parameters.

  Attributes:
    rank: columns of an adapter; 0 trains all parameters.
    alpha: scale of the adapters' output times rank; None for 2 · rank.
  """

  rank: int = 0
  alpha: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WandbSettings:
  """Weights & Biases, which is told what the files of a run are told.

  Attributes:
    project: name of the project; "" for no Weights & Biases.
    name: name of the run; "" lets it choose one.
  """

  project: str = ""
  name: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
  """A training run.

  Attributes:
    pretrained: model to begin with: "smollm2", a GGUF file, a Hugging Face
      directory or a name on the hub; "" for random parameters of `model`.
    model: geometry of a model that begins with random parameters.
    compute_dtype: dtype of activations; "file" for that of the weights.
    param_dtype: dtype of what is trained; "file" for that of the weights.
    adapter: low-rank adapters.
    task: the task's `name` and its settings.
    data_dir: folder of prepared rows; "" for ~/.cache/branch_replay/tasks.
    seed: seed of everything random in the run.
    devices: devices that tokens and parameters are dealt to.
    phases: names of the phases, in their order; each is a field of its own.
    evaluation: how the run is evaluated.
    prefix_gradient: how the gradient reaches the prompt: "exact", "full",
      "banded", "sampled" or "stop".
    sampled: which chunks of the prompt "sampled" runs backward.
    band: how far "banded" reaches back inside the prompt.
    schedule: sizes and policies of the computation; see `Schedule`.
    checkpoint_every: steps between two checkpoints.
    most_skipped: updates in a row that may be skipped because they are not
      finite; then the run stops with an error.
    warn_after: steps in a row that something is wrong, such as rewards that are
      all equal, after which the run warns; 0 for never.
    completions_every: steps between two at which sampled answers are written
      and shown; 0 for never.
    completion_prompts: prompts of such a step whose answers are written.
    wandb: Weights & Biases.
    export: whether the trained model is written in Hugging Face's format.
  """

  pretrained: str = ""
  model: Mapping[str, Any] = _empty()
  compute_dtype: str = "file"
  param_dtype: str = "float32"
  adapter: AdapterSettings = AdapterSettings()
  task: Mapping[str, Any] = dataclasses.field(
      default_factory=lambda: {"name": "retrieval"}
  )
  data_dir: str = ""
  seed: int = _RUN.seed
  devices: int = 1
  phases: Mapping[str, PhaseSettings] = dataclasses.field(
      default_factory=lambda: {"reinforce": ReinforceSettings()}
  )
  evaluation: EvaluationSettings = EvaluationSettings()
  prefix_gradient: str = "exact"
  sampled: Sampling = Sampling()
  band: Band = Band()
  schedule: Mapping[str, Any] = _empty()
  checkpoint_every: int = _RUN.checkpoint_every
  most_skipped: int = _RUN.most_skipped
  warn_after: int = _RUN.warn_after
  completions_every: int = _RUN.completions_every
  completion_prompts: int = _RUN.completion_prompts
  wandb: WandbSettings = WandbSettings()
  export: bool = True

# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""The problem that every peer is given: geometry, weights, tokens, advantages.

Numpy alone, since the peers live in environments of their own. Weights carry
the package's names and shapes (docs/formats.md).
"""

import dataclasses
import json
import pathlib

import numpy as np


@dataclasses.dataclass(frozen=True)
class Problem:
  """One group and the model it is run on.

  Attributes:
    model: fields of `branch_replay.ModelConfig`.
    weights: f32 by name.
    prompt_P: i32 ids.
    tails_GT: i32 ids, all tails of full length.
    advantages_G: f32; the loss is −Σ_b A_b Σₜ log π(t) / (G·T).
  """

  model: dict
  weights: dict[str, np.ndarray]
  prompt_P: np.ndarray
  tails_GT: np.ndarray
  advantages_G: np.ndarray

  @property
  def coefficients_G(self) -> np.ndarray:
    """A_b / (G·T): loss = −Σ_b coefficient_b Σₜ log π(t)."""
    return (self.advantages_G / self.tails_GT.size).astype(np.float32)


def random_weights(model: dict, seed: int) -> dict[str, np.ndarray]:
  """Weights of a Llama of this geometry, norms included, untied."""
  rng = np.random.default_rng(seed)
  width, layers = model["width"], model["num_layers"]
  heads = model["num_heads"] * model["head_dim"]
  kv_heads = model["num_kv_heads"] * model["head_dim"]

  def normal(*shape, scale):
    return (scale * rng.standard_normal(shape)).astype(np.float32)

  def kernel(rows, columns):
    return normal(layers, rows, columns, scale=rows**-0.5)

  def norm(*shape):
    return 1 + normal(*shape, scale=0.1)

  return {
      "embed/table": normal(model["vocab_size"], width, scale=0.5),
      "head/table": normal(model["vocab_size"], width, scale=width**-0.5),
      "final_norm/scale": norm(width),
      "layers/project/norm/scale": norm(layers, width),
      "layers/project/query/kernel": kernel(width, heads),
      "layers/project/key/kernel": kernel(width, kv_heads),
      "layers/project/value/kernel": kernel(width, kv_heads),
      "layers/join/output/kernel": kernel(heads, width),
      "layers/expand/norm/scale": norm(layers, width),
      "layers/expand/gate/kernel": kernel(width, model["ffn_width"]),
      "layers/expand/up/kernel": kernel(width, model["ffn_width"]),
      "layers/contract/down/kernel": kernel(model["ffn_width"], width),
  }


def create(
    model: dict, *, prompt: int, branches: int, tail: int, seed: int
) -> Problem:
  """A random problem; the weights depend on `model` and `seed` alone."""
  rng = np.random.default_rng((seed, prompt))
  return Problem(
      model=model, weights=random_weights(model, seed),
      prompt_P=rng.integers(0, model["vocab_size"], prompt, np.int32),
      tails_GT=rng.integers(0, model["vocab_size"], (branches, tail), np.int32),
      advantages_G=rng.standard_normal(branches).astype(np.float32),
  )


def save(problem: Problem, file: pathlib.Path) -> None:
  """Writes one .npz file."""
  np.savez(
      file, model=json.dumps(problem.model), prompt_P=problem.prompt_P,
      tails_GT=problem.tails_GT, advantages_G=problem.advantages_G,
      **{f"weights:{name}": x for name, x in problem.weights.items()},
  )


def load(file: pathlib.Path) -> Problem:
  """Reads the problem that `save` wrote."""
  with np.load(file) as arrays:
    return Problem(
        model=json.loads(str(arrays["model"])),
        weights={
            name.removeprefix("weights:"): arrays[name]
            for name in arrays.files
            if name.startswith("weights:")
        },
        prompt_P=arrays["prompt_P"],
        tails_GT=arrays["tails_GT"],
        advantages_G=arrays["advantages_G"],
    )

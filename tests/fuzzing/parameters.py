# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Parameters by numpy: the same numbers whatever initialises a model."""

import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np


def fill(model, seed: int):
  """Parameters of a model, every leaf by its own path and the seed.

  Matrices keep the size of what goes through them, tables are large enough to
  matter, scales lie around 1, and every bias and adapter is there.
  """
  shapes = jax.eval_shape(
      lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
  )["params"]

  def leaf(path, like):
    names = [entry.key for entry in path]
    place = zlib.crc32("/".join(names).encode())
    normal = np.random.default_rng([seed, place]).normal(size=like.shape)
    return jnp.asarray(scaled(names, normal), like.dtype)

  return jax.tree_util.tree_map_with_path(leaf, shapes)


def scaled(names, normal):
  match names[-1]:
    case "scale":
      return 1 + 0.3 * normal
    case "bias" | "correction" | "log_rate" | "rate_bias":
      return 0.4 * normal
    case "table":
      return 0.5 * normal
    case "filter":
      return normal / math.sqrt(normal.shape[-1])
    case "key_up":  # [.., D, C], reads C
      return normal / math.sqrt(normal.shape[-1])
    case _:  # kernels, adapters, value_up: [.., in, out]
      return normal / math.sqrt(normal.shape[-2])

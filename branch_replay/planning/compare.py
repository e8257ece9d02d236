# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures how far a gradient is from another, as a whole and by parameter."""

import dataclasses

import jax
import numpy as np

from branch_replay import checks

_FLOOR = 1e-3


@dataclasses.dataclass(frozen=True)
class Comparison:
  """How far a gradient g is from a reference gradient r.

  Attributes:
    cosine: g·r / (‖g‖‖r‖).
    relative_error: ‖g − r‖ / ‖r‖.
    norm_ratio: ‖g‖ / ‖r‖.
    worst_parameter: name of the parameter p with the largest error.
    worst_error: its error, ‖g_p − r_p‖ / max(‖r_p‖, 10⁻³ ‖r‖).
    per_matrix_cosine: cosine of each parameter, all layers of a stack together.
    per_layer_cosine: cosines of each parameter of the layers, layer by layer.
  """

  cosine: float
  relative_error: float
  norm_ratio: float
  worst_parameter: str
  worst_error: float
  per_matrix_cosine: dict[str, float]
  per_layer_cosine: dict[str, list[float]]


def _cosine(a, b) -> float:
  """Cosine of two arrays; 1 if both are zero, 0 if one is."""
  norms = float(np.linalg.norm(a) * np.linalg.norm(b))
  if norms == 0:
    return float(not a.any() and not b.any())
  return float(a.ravel() @ b.ravel()) / norms


def named(tree) -> dict[str, np.ndarray]:
  """Maps names of leaves, as "layers/project/key/kernel", to numpy arrays."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {
      checks.path_name(path): np.asarray(leaf)
      for path, leaf in leaves
  }


def compare(gradient, reference) -> Comparison:
  """Compares two gradients with respect to the same parameters, in float64.

  Args:
    gradient: tree of arrays.
    reference: tree of the same names and shapes.

  Returns:
    The comparison.

  Raises:
    ValueError: different names or shapes, or a reference of zeros.
  """
  gradient, reference = named(gradient), named(reference)
  shapes, wanted = (
      {name: leaf.shape for name, leaf in tree.items()}
      for tree in (gradient, reference)
  )
  if shapes != wanted:
    different = sorted(shapes.items() ^ wanted.items())
    raise ValueError(f"Gradients of different trees: {different[:6]}")
  dots, squares, errors, norms = 0.0, 0.0, {}, {}
  per_matrix, per_layer = {}, {}
  for name, leaf in gradient.items():
    g, r = leaf.astype(np.float64), reference[name].astype(np.float64)
    dots += float(g.ravel() @ r.ravel())
    squares += float(np.sum(g * g))
    errors[name] = float(np.linalg.norm(g - r))
    norms[name] = float(np.linalg.norm(r))
    per_matrix[name] = _cosine(g, r)
    if name.startswith("layers/"):
      per_layer[name] = [_cosine(*pair) for pair in zip(g, r, strict=True)]
  norm = float(np.sqrt(sum(n * n for n in norms.values())))
  if norm == 0:
    raise ValueError("The reference gradient is zero: nothing to compare to.")
  relative = {
      name: errors[name] / max(norms[name], _FLOOR * norm) for name in errors
  }
  # NaN counts as the worst error; max() alone would pass over it.
  worst = max(relative, key=lambda name: np.nan_to_num(
      relative[name], nan=np.inf
  ))
  return Comparison(
      cosine=dots / (norm * np.sqrt(squares)) if squares else 0.0,
      relative_error=float(np.linalg.norm(list(errors.values()))) / norm,
      norm_ratio=float(np.sqrt(squares)) / norm,
      worst_parameter=worst,
      worst_error=relative[worst],
      per_matrix_cosine=per_matrix,
      per_layer_cosine=per_layer,
  )

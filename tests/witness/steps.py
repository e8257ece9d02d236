# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory and operations of a dozen compiled training steps."""

import optax

from tests.witness import library

FIELDS = dict(
    vocab_size=256, width=64, num_layers=4, num_heads=4, num_kv_heads=2,
    head_dim=16, ffn_width=96, max_positions=100_000,
)
SHAPE = dict(prompt=2049, branches=4, tail=64)
KINDS = ("temp", "argument", "output")
HYBRID = dict(
    layer_pattern=("delta", "full"),
    delta=dict(key_heads=2, value_heads=4, key_dim=16, value_dim=16),
)
# Name: mode, activations, devices, fields over `FIELDS`.
STEPS = {
    "exact, keep": ("exact", "keep", 1, {}),
    "exact, recompute": ("exact", "recompute", 1, {}),
    "exact, recompute layers": ("exact", "recompute_layers", 1, {}),
    "stop, keep": ("stop", "keep", 1, {}),
    "stop, recompute": ("stop", "recompute", 1, {}),
    "sampled, recompute": ("sampled", "recompute", 1, {}),
    "full, recompute layers": ("full", "recompute_layers", 1, {}),
    "exact, recompute, 8 devices": ("exact", "recompute", 8, {}),
    "exact, recompute layers, 8 devices": ("exact", "recompute_layers", 8, {}),
    "stop, recompute, 8 devices": ("stop", "recompute", 8, {}),
    "sampled, recompute layers, 8 devices": (
        "sampled", "recompute_layers", 8, {}
    ),
    "hybrid, exact, recompute": ("exact", "recompute", 1, HYBRID),
}


def figures(name: str) -> dict[str, float]:
  """Bytes of a device, the compiler's count of operations, and the project's.

  The compiler counts the body of a loop once.
  """
  mode, activations, devices, fields = STEPS[name]
  model = library.model_of(FIELDS | fields)
  compiled = library.compiled_step(
      model, optax.adam(1e-3), mode=mode, devices=devices,
      activations=activations, chunk_size=256, branches_at_once=1, **SHAPE,
  )
  memory = compiled.memory_analysis()
  found = {
      kind: float(getattr(memory, f"{kind}_size_in_bytes")) for kind in KINDS
  }
  return found | {
      "compiled operations": float(compiled.cost_analysis()["flops"]),
      "counted operations": library.operations(
          model, mode=mode, activations=activations, **SHAPE
      ),
  }

# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Faults of the band, and of outputs of attention that are kept."""

from tests.mutants.fault import faults

_BAND = "banded_test.py::test_"
_KEEP = "keep_attention_test.py::test_"
MIXERS = _BAND + "equals_the_reference_for_every_mixer[llama]"
TREES = _BAND + "trees[llama-8]"
_TILES = (
    _BAND + "tiles_outside_the_band_are_skipped_and_others_are_not[{}]"
)
DEVICES = _BAND + "several_devices[llama-3]"
WIDE = _BAND + "a_band_as_wide_as_the_prefix_is_exact"

BAND = faults(
    ("the band is one position wider", "engine/band.py",
     "positions - self.window + 1", "positions - self.window", WIDE),
    ("tails are banded too", "engine/band.py",
     "jnp.maximum(positions - self.window + 1, 0), 0",
     "jnp.maximum(positions - self.window + 1, 0), positions", MIXERS),
    ("sinks before the chunk are left out", "ops/attention/op.py",
     "dq += of_sinks", "dq += 0", MIXERS),
    ("sinks inside of the band count twice", "ops/attention/op.py",
     "lowest_GT = jnp.maximum(band.lowest_GT, band.sinks)",
     "lowest_GT = band.lowest_GT", MIXERS),
    ("keys of the sinks get nothing", "ops/attention/loops.py",
     "tiling.add_stretch(x, layer, 0, new[0])", "x", MIXERS),
    ("sinks in the own chunk are left out", "ops/attention/tiling.py",
     " | (key[None] < reach.sinks)", "", _TILES.format("30-45")),
    ("tiles of sinks are skipped", "ops/attention/tiling.py",
     "    some |= j * tokens < reach.sinks\n", "", _TILES.format("30-45")),
    ("a tile that only some rows reach is skipped", "ops/attention/tiling.py",
     "some = jnp.min(lowest) < (j + 1) * tokens",
     "some = jnp.max(lowest) < (j + 1) * tokens", _TILES.format("6-3")),
    ("the last token of an inner segment is banded", "data/token_tree.py",
     "inner[start : start + length - 1]", "inner[start : start + length]",
     TREES),
    ("which tokens are banded is off by one", "engine/program.py",
     "tree.inner[at[:-1]]", "tree.inner[at[1:]]", TREES),
    ("only pushed runs are banded", "engine/program.py",
     "inner if inner.any() else None", "None", TREES),
    ("places on a device are taken for positions", "mixers/attention.py",
     "layout.here(reach.lowest_GT)", "reach.lowest_GT", DEVICES),
    ("kept outputs are not used", "engine/segment.py",
     "    if attended:\n", "    if False:\n",
     _KEEP + "a_captured_state_keeps_them_and_they_are_used"),
    ("kept outputs outlive an extension", "engine/compiled.py",
     "saved=None, kept=None, attended={},", "saved=None, kept=None,",
     _KEEP + "a_captured_state_keeps_them_and_they_are_used"),
    ("kept outputs have the budget to themselves", "engine/schedule.py",
     "outputs <= budget * devices - held[policy]",
     "outputs <= budget * devices", _KEEP + "the_budget_decides"),
)

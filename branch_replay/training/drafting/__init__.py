# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Drafting during training: a drafter that learns from what rollouts gave.

  lessons.py     answers as a drafter learns from them, packed into rows
  buffer.py      which of them are kept, and drawn
  trainer.py     one update of the drafter
  watch.py       an alarm, and drafts switched off
  speculator.py  all of it, beside the rollouts of a run

Nothing here can change a token: see docs/rollouts.md.
"""

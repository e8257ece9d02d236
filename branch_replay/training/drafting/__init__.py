# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""A drafter that is trained during a run, on the run's own rollouts.

  lessons.py     answers to learn from, packed into rows
  buffer.py      which lessons are kept, and which is drawn next
  trainer.py     one update of the drafter
  watch.py       switches drafts off when they are no longer accepted
  speculator.py  all of this, beside the rollouts of a run

Nothing here can change a sampled token: see docs/rollouts.md.
"""

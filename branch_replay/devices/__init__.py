# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Where parameters, tokens and the prefix state live.

`layout` is one device, and says what each hook is for; `sharding` has the same
hooks for several devices, and is the only file that names a mesh axis;
`host_memory` keeps a state in the host's memory, one layer on the device.
"""

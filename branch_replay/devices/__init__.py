# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Where parameters, tokens and the prefix state live.

`layout` defines the hooks that the engine calls, for one device; `sharding`
implements them for several, and is the only file that names a mesh axis;
`host_memory` keeps a state on the host and brings single layers to the device.
"""

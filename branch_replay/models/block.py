# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""One layer of any kind: its stages in order."""

import flax.linen as nn

from branch_replay import config as config_lib
from branch_replay.mixers import kinds
from branch_replay.models import expert_layers
from branch_replay.models import layers


def feed_forward(params):
  """The two stages after the mixer, which a layer's parameters tell."""
  if "router" in params["expand"]:
    return expert_layers.ExpertExpand, expert_layers.ExpertContract
  return layers.Expand, layers.Contract


def choose(config: config_lib.ModelConfig, params, h_GTM):
  """i32[G·T, k]: the experts of every token; None in a layer without them.

  They are an argument of the feed-forward stages, after h_GTM.
  """
  if "router" in params["expand"]:
    return expert_layers.choose(config, params["expand"], h_GTM)
  return None


class Block(nn.Module):
  """The stages in order, around a caller's attention where there is one."""

  config: config_lib.ModelConfig
  kind: config_lib.Kind = "full"
  experts: bool = False

  def setup(self):
    mixer = kinds.of(self.config, self.kind)
    self.project, self.join = mixer.project(), mixer.join()
    setattr(self, mixer.stage, mixer.mix())
    if self.experts:
      self.expand = expert_layers.ExpertExpand(self.config)
      self.contract = expert_layers.ExpertContract(self.config)
    else:
      self.expand = layers.Expand(self.config)
      self.contract = layers.Contract(self.config)

  def __call__(self, x_GTM, positions_GT, attend):
    mixer = kinds.of(self.config, self.kind)
    projected = self.project(x_GTM)
    mixed, joined = projected[: mixer.takes], projected[mixer.takes :]
    module = getattr(self, mixer.stage)
    out = mixer.whole(module, mixed, positions_GT, attend)
    h_GTM = self.join(x_GTM, out, *joined)
    if self.experts:
      return expert_layers.readable(self.expand, self.contract, h_GTM), None
    return self.contract(h_GTM, *self.expand(h_GTM)), None

# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""One layer of any kind: its stages in order."""

import functools

import flax.linen as nn

from branch_replay import config as config_lib
from branch_replay.models import delta_layers
from branch_replay.models import expert_layers
from branch_replay.models import latent_layers
from branch_replay.models import layers


def ends(kind: str | config_lib.LayerKind):
  """The stages before and after the mixer of a kind of layer."""
  if isinstance(kind, config_lib.LayerKind):
    return kind.project, kind.join
  if kind == "delta":
    return delta_layers.DeltaProject, delta_layers.DeltaJoin
  if kind == "latent":
    return latent_layers.LatentProject, latent_layers.LatentJoin
  return layers.Project, layers.Join


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
  kind: str | config_lib.LayerKind = "full"
  experts: bool = False

  def setup(self):
    project, join = ends(self.kind)
    self.project, self.join = project(self.config), join(self.config)
    if isinstance(self.kind, config_lib.LayerKind):
      self.mix = self.kind.mix(self.config)
    elif self.kind == "delta":
      self.recur = delta_layers.DeltaMixer(self.config)
    elif self.kind == "latent":
      self.rotate = latent_layers.LatentRotate(self.config)
    else:
      self.rotate = layers.Rotate(self.config, self.kind)
    if self.experts:
      self.expand = expert_layers.ExpertExpand(self.config)
      self.contract = expert_layers.ExpertContract(self.config)
    else:
      self.expand = layers.Expand(self.config)
      self.contract = layers.Contract(self.config)

  def __call__(self, x_GTM, positions_GT, attend):
    if isinstance(self.kind, config_lib.LayerKind):
      projected, count = self.project(x_GTM), self.kind.mixer.MIXED
      out = self.mix(projected[:count], positions_GT, attend)
      h_GTM = self.join(x_GTM, out, *projected[count:])
    elif self.kind == "delta":
      channels, rates, gate = self.project(x_GTM)
      out = self.recur(channels, rates, x_GTM.shape[1])
      h_GTM = self.join(x_GTM, out, gate)
    else:
      window = self.config.window_of(self.kind)
      if window is not None:
        attend = functools.partial(attend, window=window)
      projected = self.project(x_GTM)
      mixed = 2 if self.kind == "latent" else 3
      q, k, v = self.rotate(*projected[:mixed], positions_GT)
      h_GTM = self.join(x_GTM, attend(q, k, v), *projected[mixed:])
    if self.experts:
      return expert_layers.readable(self.expand, self.contract, h_GTM), None
    return self.contract(h_GTM, *self.expand(h_GTM)), None

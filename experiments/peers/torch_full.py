# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""PyTorch, every sequence in full: one after another, or all as one batch."""

import numpy as np
import torch

from experiments.peers import problem as problem_lib
from experiments.peers import serve
from experiments.peers import torch_llama


def load(
    problem: problem_lib.Problem, *, name: str, threads: int, memory_bytes: int
) -> serve.Peer:
  """See `serve.Peer`."""
  del memory_bytes
  torch.set_num_threads(threads)
  llama = torch_llama.Llama(problem)
  prompt_P = torch.from_numpy(problem.prompt_P).long()
  tails_GT = torch.from_numpy(problem.tails_GT).long()
  coefficients_G = torch.from_numpy(problem.coefficients_G)
  tail = tails_GT.shape[1]
  at_once = {"torch_full": 1, "torch_full_batched": len(tails_GT)}[name]
  positions_1S = torch.arange(len(prompt_P) + tail - 1)[None]

  def run():
    for weight in llama.parameters():
      weight.grad = None
    loss, found = 0.0, []
    for rows in torch.arange(len(tails_GT)).split(at_once):
      # The last token of a tail predicts nothing.
      tokens_GS = torch.cat(
          [prompt_P.expand(len(rows), -1), tails_GT[rows, :-1]], dim=1
      )
      hidden_GSM = llama.hidden(tokens_GS, positions_1S, torch_llama.attention)
      log_probs_GT = torch_llama.log_probs(
          hidden_GSM[:, -tail:], llama.head_VM, tails_GT[rows]
      )
      part = -(coefficients_G[rows] * log_probs_GT.sum(1)).sum()
      part.backward()
      loss += part.item()
      found.append(log_probs_GT.detach().numpy())
    return loss, np.concatenate(found), None

  return serve.Peer(
      lambda: run, lambda _: llama.gradient(), {"torch": torch.__version__},
      {"sequences_at_once": at_once},
  )

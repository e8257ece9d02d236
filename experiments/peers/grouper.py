# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Prefix Grouper (arXiv 2506.05433): prompt and answers as one sequence.

Used as its documentation shows: masks in, `concat_input`, `forward` around an
attention function, `split_output` with the prompt's last token before every
answer. The attention function is PyTorch's fused one. There is no padding here,
so of the padding mask that it is handed nothing is needed; answers attend to
all of the prompt and to themselves, causally from the bottom right.
"""

import importlib.metadata

from prefix_grouper import PrefixGrouper
import torch

from experiments.peers import problem as problem_lib
from experiments.peers import serve
from experiments.peers import torch_llama


def load(
    problem: problem_lib.Problem, *, name: str, threads: int, memory_bytes: int
) -> serve.Peer:
  """See `serve.Peer`."""
  del name, memory_bytes
  torch.set_num_threads(threads)
  llama = torch_llama.Llama(problem)
  prompt_1P = torch.from_numpy(problem.prompt_P).long()[None]
  tails_GT = torch.from_numpy(problem.tails_GT).long()
  coefficients_G = torch.from_numpy(problem.coefficients_G)
  prompt, (branches, tail) = prompt_1P.shape[1], tails_GT.shape
  prompt_mask_1P = torch.ones_like(prompt_1P, dtype=torch.bool)
  tail_mask_GT = torch.ones_like(tails_GT, dtype=torch.bool)
  # Query t of a tail sees keys 0 … P + t.
  visible_TS = torch.ones(tail, prompt + tail, dtype=torch.bool).tril(prompt)
  tail_positions = (prompt + torch.arange(tail)).repeat(branches)
  positions_1S = torch.cat([torch.arange(prompt), tail_positions])[None]

  def attention(q, k, v, attn_mask):
    del attn_mask
    mask = None if q.shape[2] == k.shape[2] else visible_TS
    return torch_llama.attention(q, k, v, mask=mask)

  def run():
    for weight in llama.parameters():
      weight.grad = None
    grouper = PrefixGrouper.from_ungrouped_masks(
        prefix_mask=prompt_mask_1P, suffix_mask=tail_mask_GT,
        group_sizes=branches, padding_mode="right",
    )
    tokens_1S = grouper.concat_input(
        prompt_1P, prompt_mask_1P, tails_GT, tail_mask_GT
    )
    hidden_1SM = llama.hidden(
        tokens_1S, positions_1S,
        lambda q, k, v: grouper.forward(attention, q, k, v),
    )
    # Hidden states are split, not logits: the head is then run on the tails
    # alone, as it is in the other systems.
    _, _, hidden_GTM, _ = grouper.split_output(
        hidden_1SM, include_prefix_last=1
    )
    log_probs_GT = torch_llama.log_probs(
        hidden_GTM[:, :-1], llama.head_VM, tails_GT
    )
    loss = -(coefficients_G * log_probs_GT.sum(1)).sum()
    loss.backward()
    return loss.item(), log_probs_GT.detach().numpy(), None

  return serve.Peer(
      lambda: run, lambda _: llama.gradient(),
      {
          "torch": torch.__version__,
          "prefix-grouper": importlib.metadata.version("prefix-grouper"),
      },
  )

# Copyright 2026 The branch_replay authors.
# SPDX-License-Identifier: Apache-2.0
"""Chat messages to text through a model's own template."""

from collections.abc import Mapping
from collections.abc import Sequence

import jinja2
from jinja2 import sandbox

from branch_replay.weights import pretrained as pretrained_lib


def render_chat(
    pretrained: pretrained_lib.Pretrained,
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool = True,
) -> str:
  """The text that the model was tuned on for these messages.

  Encode it with `add_special_tokens=False`: a template writes its own first
  token, and a tokenizer that adds one would make it two. Templates come from
  model files, so they run in jinja's sandbox.

  Args:
    pretrained: with a chat template.
    messages: {"role": ..., "content": ...} in order.
    add_generation_prompt: end with the header of the assistant's answer.

  Returns:
    Text with special tokens spelt out.

  Raises:
    ValueError: there is no template, or the template refuses the messages.
  """
  if pretrained.chat_template is None:
    raise ValueError("The model's files hold no chat template.")
  environment = sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=["jinja2.ext.loopcontrols"],
  )
  environment.globals["raise_exception"] = _refuse
  try:
    return environment.from_string(pretrained.chat_template).render(
        messages=list(messages),
        add_generation_prompt=add_generation_prompt,
        bos_token=_spelling(pretrained, pretrained.bos_id),
        eos_token=_spelling(pretrained, next(iter(pretrained.stop_ids), None)),
    )
  except jinja2.TemplateError as error:
    raise ValueError(
        f"The chat template refused {len(messages)} messages: {error}"
    ) from error


def _refuse(message):
  raise jinja2.TemplateError(message)


def _spelling(pretrained, id_):
  if id_ is None or pretrained.tokenizer is None:
    return ""
  return pretrained.tokenizer.id_to_token(id_)

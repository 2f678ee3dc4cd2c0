# SPDX-License-Identifier: Apache-2.0
"""Conversations as text, by the chat template of a checkpoint."""

from collections.abc import Sequence
import datetime
import json
from typing import Any, NoReturn

import jinja2
from jinja2 import sandbox

from attnres_jax.data import text_format as text_format_lib
from attnres_jax.inference.serving import api


class Template:
  """Renders conversations; templates of others run in Jinja's sandbox."""

  def __init__(self, text_format: text_format_lib.TextFormat):
    """For the template of a network, which may have none."""
    self._names = text_format.names
    self._template: jinja2.Template | None = None
    self._reason = "the checkpoint has no chat template"
    if text_format.chat_template is None:
      return
    environment = sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=["jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Any] = dict(
      raise_exception=_fail,
      strftime_now=lambda form: datetime.datetime.now().strftime(form),
    )
    environment.globals.update(functions)
    try:
      self._template = environment.from_string(text_format.chat_template)
    except jinja2.TemplateError as error:
      self._reason = f"its chat template cannot be read: {error}"

  def render(self, messages: Sequence[dict[str, str]]) -> str:
    """The text of a conversation, up to the start of the next answer.

    Raises:
      ApiError: there is no template, or it refuses the conversation.
    """
    if self._template is None:
      raise api.ApiError(
        400,
        f"messages: this network does not chat, since {self._reason};"
        " /v1/completions continues any text",
        param="messages",
        code="no_chat_template",
      )
    try:
      return self._template.render(
        messages=messages, add_generation_prompt=True, **self._names
      )
    # A template may fail in any way on what it does not expect.
    except Exception as error:
      raise api.ApiError(
        400, f"messages: refused by the chat template: {error}",
        param="messages",
      ) from error  # fmt: skip


def _to_json(value: Any, **options: Any) -> str:
  return json.dumps(value, ensure_ascii=False, **options)


def _fail(message: str) -> NoReturn:
  raise jinja2.TemplateError(message)

# SPDX-License-Identifier: Apache-2.0
"""All fields of a config as text: type, default and meaning."""

from collections.abc import Iterator
import dataclasses
import inspect
import re
import textwrap
from typing import Any

from attnres_jax.config import errors
from attnres_jax.config import fields
from attnres_jax.config import run

_WIDTH = 80


def to_text(part: str = "", config: run.RunConfig = run.RunConfig()) -> str:
  """The fields below `part`, such as "model.residual", or this one field.

  Raises:
    ConfigError: the config has no such part.
  """
  entries = dict(_entries(config, ""))
  lines = [
    text
    for name, text in entries.items()
    if not part or name == part or name.startswith(part + ".")
  ]
  if not lines:
    parts = {".".join(name.split(".")[:i]) for name in entries for i in (1, 2)}
    errors.check_in("--help_config", part, sorted(parts))
  return "\n".join(lines)


def meanings(cls: type) -> dict[str, str]:
  """Field -> what the docstring of its dataclass says of it, in one line."""
  entries = []
  for base in reversed(cls.__mro__):
    doc = inspect.cleandoc(base.__doc__ or "")
    text = textwrap.dedent(doc.partition("Attributes:\n")[2])
    entries += re.findall(r"^(\w+): (.*?)(?=^\w|\Z)", text, re.S | re.M)
  return {name: " ".join(meaning.split()) for name, meaning in entries}


def _entries(
  config: Any, prefix: str, of_part: dict[str, fields.Accepted] | None = None
) -> Iterator[tuple[str, str]]:
  kinds = fields.kinds(type(config))
  meaning = meanings(type(config))
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    kind, name = kinds[field.name], prefix + field.name
    if dataclasses.is_dataclass(kind):
      yield from _entries(value, name + ".", fields.conditions(field))
      continue
    text = meaning.get(field.name, "")
    for other, accepted in ((of_part or {}) | fields.conditions(field)).items():
      text += f" Acts only with {other}={accepted.words}."
    yield name, _entry(name, kind, value, text)


def _entry(name: str, kind: Any, value: Any, meaning: str) -> str:
  head = f"--config.{name}={value!r}  ({fields.words(kind, bounds=True)})"
  body = textwrap.fill(
    meaning, _WIDTH, initial_indent="    ", subsequent_indent="    "
  )
  return f"{head}\n{body}"

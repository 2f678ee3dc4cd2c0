# SPDX-License-Identifier: Apache-2.0
"""Fields by dotted names, such as "optim.peak_lr", and what a name may mean."""

from collections.abc import Iterator
import dataclasses
import difflib
import importlib
import re
from typing import Any

from attnres_jax.config import describe
from attnres_jax.config import dicts
from attnres_jax.config import fields as fields_lib
from attnres_jax.config.errors import fail
from attnres_jax.config.residual import ResidualConfig
from attnres_jax.config.run import RunConfig

# Schemes, and the classes of their options.
REGISTRY = "attnres_jax.models.residuals"
# How alike names have to be, of 1.
_ALIKE = 0.7


def kind_of(name: str, value: Any) -> Any:
  """The type of the field of a dotted name."""
  kind, parts = RunConfig, name.split(".")
  for depth, part in enumerate(parts, start=1):
    if not dataclasses.is_dataclass(kind):
      fail(name, value, "the name of a field")
    kinds = fields_lib.kinds(fields_lib.with_field(kind, part))
    if part not in kinds and kind is ResidualConfig:  # Of another scheme.
      importlib.import_module(REGISTRY)
      kinds = fields_lib.kinds(fields_lib.with_field(kind, part))
    if part not in kinds:
      names = {
        name for c in fields_lib.family(kind) for name in fields_lib.kinds(c)
      }
      listed = ", ".join(sorted(names))
      fail(".".join(parts[:depth]), part, f"one of {listed}{hint(part)}")
    kind = kinds[part]
  return kind


def undone(name: str) -> Iterator[tuple[str, Any]]:
  """Fields in whose place one is that was set, and their defaults."""
  parent, _, leaf = name.rpartition(".")
  cls = kind_of(parent, None) if parent else RunConfig
  for group in cls.alternatives if leaf in sum(cls.alternatives, ()) else ():
    for field in dataclasses.fields(cls) if leaf not in group else ():
      if field.name in group:
        yield f"{parent}.{field.name}", field.default


def hint(word: str) -> str:
  """A question after an unknown name of a field or flag; may be empty."""
  meant = _meant(word.rpartition(".")[2])
  return f" (did you mean config.{meant}?)" if meant else ""


def _meant(word: str) -> str:
  """The field that an unknown name most likely means, or nothing."""
  names = {
    name: name.split(".")[-1]
    for name in dicts.flatten(dicts.to_dict(RunConfig()))
  }
  words = word.replace("_", " ")

  def likeness(name: str) -> float:
    leaf = names[name]
    if leaf == word:
      return 3
    if word in leaf.split("_"):
      return 2
    if re.match(rf"{re.escape(words)}\b", _meaning(name)):
      return 1.5
    return difflib.SequenceMatcher(None, leaf, word).ratio()

  best = max(names, key=likeness)
  return best if likeness(best) > _ALIKE else ""


def _meaning(name: str) -> str:
  """What the docstring says of a field."""
  parent, _, leaf = name.rpartition(".")
  cls = kind_of(parent, None) if parent else RunConfig
  cls = fields_lib.with_field(cls, leaf)
  return describe.meanings(cls).get(leaf, "")

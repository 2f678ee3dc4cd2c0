# SPDX-License-Identifier: Apache-2.0
"""Fills parts of READMEs from committed results."""

from collections.abc import Callable, Mapping, Sequence
import pathlib
import re
from typing import Any, NamedTuple

from attnres_jax.common import csv_rows
from attnres_jax.sweep.pages import page

Rows = Sequence[Mapping[str, Any]]


class Place(NamedTuple):
  """A part of a document that is filled from committed rows.

  Attributes:
    make: (rows) -> Markdown.
    name: name of the place, see `fill`.
    rows: file of rows in the folder of the experiment, without .csv; empty for
      a part that needs none.
    document: file to fill, relative to the folder of the experiment.
  """

  make: Callable[[Rows], str]
  name: str = "results"
  rows: str = "results"
  document: str = "README.md"


class Published(NamedTuple):
  """Tables and figures of an experiment's rows (`experiments.publish`).

  Attributes:
    folder: of the experiment.
    places: in its README or in other documents.
    figures: name of an SVG file: (rows of each file) -> figure.
    figure_rows: these files.
    adopted: rows that stand for those of a file, by its name.
  """

  folder: pathlib.Path
  places: Sequence[Place]
  figures: Mapping[str, Callable[..., Any]] = {}
  figure_rows: Sequence[str] = ("results",)
  adopted: Mapping[str, Rows] = {}

  def read(self, name: str = "results") -> Rows:
    """Committed rows, or adopted ones; empty if there is no such file yet."""
    if name in self.adopted:
      return self.adopted[name]
    path = self.folder / f"{name}.csv"
    return csv_rows.read(path) if path.exists() else []

  def filled(self) -> dict[pathlib.Path, str]:
    """The text of every document, filled from the committed rows.

    Raises:
      ValueError: a document lacks a place.
    """
    texts: dict[pathlib.Path, str] = {}
    for place in self.places:
      path = self.folder / place.document
      text = texts.get(path) or path.read_text(encoding="utf-8")
      rows = self.read(place.rows)
      fills = rows or not place.rows
      texts[path] = fill(text, place.name, place.make(rows)) if fills else text
    return texts


def fill(text: str, place: str, content: str) -> str:
  """`text` with `content` between its two comments.

  Args:
    text: with `<!-- place: the command that fills it -->` and, further down,
      `<!-- /place -->`.
    place: one word.
    content: the text between the two.

  Raises:
    ValueError: there is no such place.
  """
  comments = re.compile(
    rf"(<!-- {place}: [^>]* -->\n)(.*?)(<!-- /{place} -->)", re.DOTALL
  )
  if not comments.search(text):
    raise ValueError(f"no `<!-- {place}: ... -->` to fill in this text")
  return comments.sub(lambda m: f"{m[1]}\n{content.strip()}\n\n{m[3]}", text)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A Markdown table."""
  return page.Table(header, rows).markdown()


def origin(rows: Rows) -> str:
  """Where rows come from: all machines, versions and commits, a sentence."""

  def each(column: str) -> str:
    cells = (str(row.get(column) or "") for row in rows)
    return ", ".join(filter(None, dict.fromkeys(cells)))

  named = (
    ("hardware", ""), ("python", "Python "), ("jax", "jax "),
    ("libtpu", "libtpu "), ("torch", "PyTorch "), ("commit", "commit "),
  )  # fmt: skip
  parts = [f"{word}{each(column)}" for column, word in named if each(column)]
  return "; ".join(parts) + "."


def with_origin(text: str, rows: Rows) -> str:
  """A table, and where its rows come from; without rows, a sentence."""
  if not rows:
    return "No rows yet."
  return f"{text}\n\n{origin(rows)}"

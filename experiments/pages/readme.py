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
    return csv_rows.read(self.folder / f"{name}.csv", missing_ok=True)

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


def text(*parts: str | page.Table | None) -> str:
  """Paragraphs and tables in Markdown; without tables that have no rows."""
  return "\n\n".join(
    part.markdown() if isinstance(part, page.Table) else part
    for part in parts
    if part and (not isinstance(part, page.Table) or part.rows)
  )


def origin(rows: Rows, runs: bool = False) -> str:
  """Where rows come from: all machines, versions and commits, a sentence.

  Args:
    rows: committed ones.
    runs: whether they are runs of a sweep, whose seeds, hours and text come
      first.
  """

  def each(column: str) -> str:
    cells = (str(row.get(column) or "") for row in rows)
    return ", ".join(filter(None, dict.fromkeys(cells)))

  named = (
    ("hardware", ""), ("python", "Python "), ("jax", "jax "),
    ("libtpu", "libtpu "), ("torch", "PyTorch "), ("commit", "commit "),
  )  # fmt: skip
  parts = [f"{word}{each(column)}" for column, word in named if each(column)]
  if runs:
    seeds = sorted({int(row["seed"]) for row in rows})
    hours = sum(float(row["seconds"]) for row in rows) / 3600
    parts[:0] = [
      f"{len(rows)} runs, seed{'s' * (len(seeds) > 1)}"
      f" {', '.join(map(str, seeds))}, {hours:.1f} hours in all",
      f"text {', '.join(sorted({row['data'] for row in rows}))}",
    ]
  return "; ".join(parts) + "."

# SPDX-License-Identifier: Apache-2.0
"""What an experiment publishes: parts of documents, figures and its page.

`PUBLISHED` in its report.py declares them. `experiments.publish` fills them in
from committed rows, and a test keeps documents and rows consistent.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import importlib
import importlib.util
import io
import pathlib
import re
from typing import Any, NamedTuple

import matplotlib

from attnres_jax import config as config_lib
from attnres_jax.common import csv_rows
from attnres_jax.common import environment
from attnres_jax.common import files
from attnres_jax.sweep.pages import losses
from attnres_jax.sweep.pages import page
from attnres_jax.sweep.pages import sweep_page

Rows = Sequence[Mapping[str, Any]]


class Part(NamedTuple):
  """A figure, or a part of a document.

  Attributes:
    make: (rows) -> Markdown, or a figure.
    name: of the place in the document, see `fill`.
    rows: file of rows in the folder of the experiment, without .csv; empty for
      a part that needs none.
    document: relative to the folder of the experiment; *.svg for a figure.
  """

  make: Callable[[Rows], Any]
  name: str = "results"
  rows: str = "results"
  document: str = "README.md"


def results(rows: Rows) -> str:
  """The losses of any sweep and their origin."""
  return text(losses.table(rows), origin(rows, runs=True))


@dataclasses.dataclass(frozen=True)
class Published:
  """What an experiment publishes.

  Attributes:
    file: a module in its folder.
    parts: of documents, and figures.
    render: renders the page of a sweep, its report.
  """

  file: str
  parts: Sequence[Part] = (Part(results),)
  render: sweep_page.Render = sweep_page.render

  @property
  def folder(self) -> pathlib.Path:
    """The folder of the experiment."""
    return pathlib.Path(self.file).absolute().parent

  def read(self, name: str = "results") -> Rows:
    """Committed rows; empty if there is no such file yet."""
    return csv_rows.read(self.folder / f"{name}.csv", missing_ok=True)

  def filled(
    self, adopted: Mapping[str, Rows] | None = None
  ) -> dict[pathlib.Path, str | bytes]:
    """Documents and figures, made from the rows.

    Adopted rows, by the name of a file, replace its rows.

    Raises:
      ValueError: a document lacks a place.
    """
    contents: dict[pathlib.Path, Any] = {}
    for part in self.parts:
      rows = (adopted or {}).get(part.rows) or self.read(part.rows)
      path = self.folder / part.document
      is_figure = path.suffix == ".svg"
      if not is_figure and path not in contents:
        contents[path] = path.read_text(encoding="utf-8")
      if rows or not part.rows:
        made = part.make(rows)
        contents[path] = (
          _svg(made, path.stem)
          if is_figure
          else fill(contents[path], part.name, made)
        )
    return contents

  def write(self, adopted: Mapping[str, Rows] | None = None) -> None:
    """Writes what is `filled`, once all of it is made, and adopted rows."""
    contents = self.filled(adopted)
    for name, rows in (adopted or {}).items():
      csv_rows.write(self.folder / f"{name}.csv", rows)
    for path, content in contents.items():
      files.write(path, content)

  def missing(
    self, groups: Iterable[Any], key: Sequence[str], out: str = ""
  ) -> list[Any]:
    """Groups of cells of `key` of which a file of `measure` has no row."""
    path = out or self.folder / "results.csv"
    files.check_output("--out", path, key)
    rows = csv_rows.read(path, missing_ok=True)
    done = {tuple(row[name] for name in key) for row in rows}
    return [group for group in groups if tuple(map(str, group)) not in done]

  def measure(
    self, rows: Iterable[Mapping[str, Any]], key: Sequence[str], out: str = ""
  ) -> None:
    """Puts rows into a file, each as soon as it is made, and publishes them.

    Each replaces the row with the same cells of `key`. Rows of another file
    than results.csv are not published.
    """
    results = self.folder / "results.csv"
    path = pathlib.Path(out or results).absolute()
    files.check_output("--out", path, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    facts, cells = environment.facts(), dict.fromkeys(key, "")
    for row in rows:
      csv_rows.put(path, {**cells, **row, **facts, **row}, key)
    if path == results:
      self.write()


def load(experiment: str) -> Published:
  """What report.py of an experiment publishes; without one, its losses.

  Raises:
    ConfigError: there is no such experiment.
  """
  if experiment.isidentifier():
    if _file(experiment, "report"):
      return importlib.import_module(
        f"experiments.{experiment}.report"
      ).PUBLISHED
    if path := _file(experiment, "run"):
      return Published(path)
  raise config_lib.ConfigError(
    f"experiment: got {experiment!r}, expected a folder of experiments/ that"
    " has report.py or run.py"
  )


def _file(experiment: str, name: str) -> str | None:
  """A module's file; None without one."""
  try:
    spec = importlib.util.find_spec(f"experiments.{experiment}.{name}")
  except ModuleNotFoundError:
    return None  # There is no such folder.
  return spec.origin if spec else None


def fill(document: str, place: str, content: str) -> str:
  """The document with `content` between the two comments of a place.

  They are `<!-- place: the command that fills it -->`, the place in one word,
  and, further down, `<!-- /place -->`.

  Raises:
    ValueError: there is no such place.
  """
  comments = re.compile(
    rf"(<!-- {place}: [^>]* -->\n)(.*?)(<!-- /{place} -->)", re.DOTALL
  )
  if not comments.search(document):
    raise ValueError(f"no `<!-- {place}: ... -->` to fill in this text")
  return comments.sub(
    lambda m: f"{m[1]}\n{content.strip()}\n\n{m[3]}", document
  )


def text(*parts: str | page.Table | None) -> str:
  """Paragraphs and tables in Markdown; without tables that have no rows."""
  return "\n\n".join(
    part.markdown() if isinstance(part, page.Table) else part
    for part in parts
    if part and (not isinstance(part, page.Table) or part.rows)
  )


def origin(rows: Rows, runs: bool = False) -> str:
  """Where rows come from: machines, versions and commits, a sentence.

  If they are runs of a sweep, their seeds, hours and text come first.
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


def _svg(figure: Any, salt: str) -> bytes:
  """A figure as a file; the same rows give the same bytes."""
  style = {"svg.hashsalt": salt, "svg.fonttype": "none"}
  with matplotlib.rc_context(style), io.BytesIO() as drawn:
    figure.savefig(
      drawn, format="svg", facecolor="white", metadata={"Date": None}
    )
    return drawn.getvalue()

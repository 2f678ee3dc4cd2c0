# SPDX-License-Identifier: Apache-2.0
"""Reports as self-contained HTML files with a common style.

Text becomes HTML in one place, `html_of`, which escapes everything that is not
`Html` already. Only `fill` fills templates, so that nothing written by a run, a
config file or a network can reach a page as markup.
"""

from collections.abc import Mapping, Sequence
import html
import pathlib
import re
import string
from typing import Any, NamedTuple

from attnres_jax.analysis import figures
from attnres_jax.models import residuals
from attnres_jax.scaling import pairs
from experiments.pages import readme

_SHELL = pathlib.Path(__file__).with_name("shell.html")


class Html(str):
  """Text that is HTML already."""


class Cell(NamedTuple):
  """A cell of a table; a README shows only its first two parts.

  Attributes:
    text: the main text; `**` around a part makes it bold.
    aside: an addition such as a difference or an interval; small on a page.
    small: more lines of small print, on a page only.
  """

  text: Any
  aside: str = ""
  small: Sequence[str] = ()


class Table(NamedTuple):
  """A table for pages and READMEs.

  Attributes:
    header: of the columns; labels of schemes get a patch of their colour.
    rows: cells, or their text; the first one is the name of the row.
  """

  header: Sequence[str]
  rows: Sequence[Sequence[Cell | str]]

  def markdown(self) -> str:
    """As Markdown, for a README."""
    cells = [[_cell(cell) for cell in row] for row in self.rows]
    return readme.table(
      self.header,
      [
        [f"{cell.text} {cell.aside}" if cell.aside else str(cell.text)
         for cell in row]
        for row in cells
      ],
    )  # fmt: skip

  def html(self) -> Html:
    """As HTML, for a page."""
    head = join(fill("<th>$name</th>", name=label(x)) for x in self.header)
    lines = []
    for first, *rest in self.rows:
      cells = join(fill("<td>$x</td>", x=_cell_html(cell)) for cell in rest)
      lines.append(
        fill(
          "<tr><th scope=row>$first</th>$cells</tr>\n",
          first=_cell_html(first),
          cells=cells,
        )
      )
    return fill(
      "<div class=scroll><table>\n<thead><tr>$head</tr></thead>\n"
      "<tbody>\n$lines</tbody></table></div>",
      head=head,
      lines=join(lines),
    )


def html_of(value: Any) -> Html:
  """HTML unchanged, everything else as escaped text."""
  return value if isinstance(value, Html) else Html(html.escape(str(value)))


def fill(template: str, **parts: Any) -> Html:
  """Fills a template: each `$name` is replaced by `html_of` its part."""
  texts = {name: html_of(part) for name, part in parts.items()}
  return Html(string.Template(template).substitute(texts))


def join(parts: Any) -> Html:
  """Joins several parts."""
  return Html("".join(map(html_of, parts)))


def bold(text: Any) -> Html:
  """Text, in which the parts between two `**` are bold."""
  return Html(re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", html_of(text)))


def render(
  title: str,
  body: pathlib.Path,
  parts: Mapping[str, Any],
  *,
  refresh_seconds: int = 0,
) -> str:
  """A page.

  Args:
    title: of the window.
    body: HTML with a `$name` for every part.
    parts: text or HTML by name.
    refresh_seconds: after which a browser reloads the file; 0 for never.
  """
  head = Html("")
  if refresh_seconds:
    head = fill(
      '<meta http-equiv="refresh" content="$seconds">\n',
      seconds=refresh_seconds,
    )
  text = fill(body.read_text(encoding="utf-8"), **parts)
  shell = _SHELL.read_text(encoding="utf-8")
  return fill(shell, head=head, title=title, body=text)


def facts(listed: Mapping[str, Any]) -> Html:
  """Entries of a definition list."""
  return join(
    fill("<dt>$name</dt><dd>$value</dd>\n", name=name, value=value)
    for name, value in listed.items()
  )


def label(text: str) -> Html:
  """Text, after a patch of colour if it is the label of a scheme."""
  for scheme in residuals.RESIDUALS:
    if text == figures.name_of(scheme):
      colour = figures.style_of(scheme).get("color", "currentColor")
      return fill(
        '<i class="swatch" style="background:$colour"></i>$text',
        colour=colour,
        text=text,
      )
  return bold(text)


def signed(value: float, digits: int = 4) -> str:
  """A difference, with a proper minus sign."""
  text = f"{value:+.{digits}f}"
  return "0" if float(text) == 0 else text.replace("-", "\N{MINUS SIGN}")


def difference(found: pairs.Difference) -> str:
  """The mean of pairs and its interval, `mean ± margin`.

  Without an interval (too few pairs, or a failed arm), the mean alone.
  """
  text = signed(found.mean)
  if found.margin is not None:
    text += f" \N{PLUS-MINUS SIGN} {found.margin:.4f}"
  return text


def _cell(cell: Cell | str) -> Cell:
  return cell if isinstance(cell, Cell) else Cell(cell)


def _cell_html(cell: Cell | str) -> Html:
  text, aside, small = _cell(cell)
  lines = [aside] * bool(aside) + list(small)
  return join(
    [label(str(text))]
    + [fill("<small>$line</small>", line=bold(line)) for line in lines]
  )

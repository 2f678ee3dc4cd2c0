# SPDX-License-Identifier: Apache-2.0
"""Reports as self-contained HTML files with a common style.

jinja2 fills every template and escapes everything that is not `Html` already,
so that nothing written by a run, a config file or a network can reach a page as
markup.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import functools
import itertools
import operator
import pathlib
import re
from typing import Any, NamedTuple

import jinja2
import markupsafe

from attnres_jax.analysis import figures
from attnres_jax.models import residuals
from attnres_jax.scaling import pairs

_SHELL = pathlib.Path(__file__).with_name("shell.html")
RANGE = "({} to {})"
# Text that is HTML already.
Html = markupsafe.Markup

_TABLE = """<div class=scroll><table>
<thead><tr>{% for name in header %}<th>{{ name | label }}</th>{% endfor %}</tr>\
</thead>
<tbody>
{% for row in rows %}<tr>{% for cell in row -%}
{{ "<th scope=row>" | safe if loop.first else "<td>" | safe }}\
{{ cell.text | label }}\
{% for line in cell.lines %}<small>{{ line | bold }}</small>{% endfor %}\
{{ "</th>" | safe if loop.first else "</td>" | safe }}\
{%- endfor %}</tr>
{% endfor %}</tbody></table></div>"""


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

  @property
  def lines(self) -> list[str]:
    """Its small print."""
    return [self.aside] * bool(self.aside) + list(self.small)

  def __str__(self) -> str:
    """Its text for a README."""
    return f"{self.text} {self.aside}" if self.aside else str(self.text)


class Table(NamedTuple):
  """A table for pages and READMEs.

  Attributes:
    header: of the columns; labels of schemes get a patch of their colour.
    rows: cells, or their text; the first one is the name of the row.
  """

  header: Sequence[str | int]
  rows: Sequence[Sequence[Cell | str | int]]

  @classmethod
  def of(
    cls, rows: Iterable[Any], columns: Mapping[str, str | Callable[[Any], Any]]
  ) -> "Table":
    """A line per row, without columns in which nothing stands.

    By their headings, columns have what makes a cell of a row, or the name of
    one of its cells.
    """
    makes = {
      name: operator.itemgetter(make) if isinstance(make, str) else make
      for name, make in columns.items()
    }
    lines = [[make(row) for make in makes.values()] for row in rows]
    used = [
      any(str(line[i]) for line in lines) or not lines
      for i in range(len(columns))
    ]
    return cls(
      list(itertools.compress(columns, used)),
      [list(itertools.compress(line, used)) for line in lines],
    )

  @classmethod
  def across(
    cls,
    header: Sequence[str],
    cells: Iterable[Sequence[Any]],
    columns: Mapping[Any, str] | None = None,
  ) -> "Table":
    """A line per place and a column per name; empty without a cell.

    Cells are (*place, name of the column, text). The header is of the columns
    that name a place, and the others have headings by name.
    """
    lines: dict[tuple[Any, ...], dict[Any, Any]] = {}
    for *place, name, text in cells:
      lines.setdefault(tuple(place), {})[name] = text
    columns = columns or {
      name: name for line in lines.values() for name in line
    }
    return cls(
      [*header, *columns.values()],
      [
        [*place, *(line.get(name, "") for name in columns)]
        for place, line in lines.items()
      ],
    )

  def markdown(self) -> str:
    """The table in Markdown, for a README."""
    lines = [[str(_cell(cell)) for cell in row] for row in self.rows]
    lines = [[*map(str, self.header)], ["---"] * len(self.header), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

  def html(self) -> Html:
    """The table in HTML, for a page."""
    rows = [list(map(_cell, row)) for row in self.rows]
    return fill(_TABLE, header=self.header, rows=rows)


def fill(template: str, **parts: Any) -> Html:
  """Fills a template of jinja2, escaping all parts that are not `Html`."""
  return Html(_jinja().from_string(template).render(**parts))


def bold(text: Any) -> Html:
  """Text, in which the parts between two `**` are bold."""
  return Html(
    re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", str(markupsafe.escape(text)))
  )


def render(
  title: str,
  body: pathlib.Path,
  parts: Mapping[str, Any],
  *,
  refresh_seconds: int = 0,
) -> str:
  """A page from a template with a variable for every part, text or HTML.

  A browser reloads the file after so many seconds; 0 for never.
  """
  text = fill(body.read_text(encoding="utf-8"), **parts)
  shell = _SHELL.read_text(encoding="utf-8")
  return fill(shell, title=title, body=text, refresh_seconds=refresh_seconds)


def label(text: str) -> Html:
  """Text, after a patch of colour if it is the label of a scheme."""
  for scheme in residuals.RESIDUALS:
    if text == figures.name_of(scheme):
      colour = figures.style_of(scheme).get("color", "currentColor")
      return fill(
        '<i class="swatch" style="background:{{ colour }}"></i>{{ text }}',
        colour=colour,
        text=text,
      )
  return bold(text)


def signed(value: float, digits: int = 4) -> str:
  """A difference, with a proper minus sign."""
  text = f"{value:+.{digits}f}"
  return "0" if float(text) == 0 else text.replace("-", "\N{MINUS SIGN}")


def difference(apart: pairs.Difference, digits: int = 4) -> str:
  """The mean of pairs and its interval, `mean ± margin`.

  Without an interval (too few pairs, or a failed arm), the mean alone.
  """
  text = signed(apart.mean, digits)
  if apart.margin is not None:
    text += f" \N{PLUS-MINUS SIGN} {apart.margin:.{digits}f}"
  return text


def interval(
  value: float,
  low: float | None,
  high: float | None,
  digits: int = 2,
  ends: str = "[{}, {}]",  # or RANGE
) -> Cell:
  """A value and the ends of its interval, or of a range; None for none."""
  text, *numbers = (
    f"{x:.{digits}f}" for x in (value, low, high) if x is not None
  )
  return Cell(text, ends.format(*numbers) if numbers else "")


def _cell(cell: Cell | str | int) -> Cell:
  return cell if isinstance(cell, Cell) else Cell(cell)


@functools.cache
def _jinja() -> jinja2.Environment:
  jinja = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
  jinja.filters |= {"label": lambda text: label(str(text)), "bold": bold}
  return jinja

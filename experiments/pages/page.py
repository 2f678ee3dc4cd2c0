# SPDX-License-Identifier: Apache-2.0
"""Reports as one HTML file that needs nothing else, in one look."""

from collections.abc import Mapping, Sequence
import html
import pathlib
import string
from typing import Any

from attnres_jax.analysis import plots

_SHELL = pathlib.Path(__file__).with_name("shell.html")


def render(
  title: str,
  body: pathlib.Path,
  parts: Mapping[str, str],
  *,
  refresh_seconds: int = 0,
) -> str:
  """A page.

  Args:
    title: of the window.
    body: HTML with a `$name` for every part.
    parts: HTML by name.
    refresh_seconds: after which a browser reads the file again; 0 for never.
  """
  head = ""
  if refresh_seconds:
    head = f'<meta http-equiv="refresh" content="{refresh_seconds}">\n'
  text = string.Template(body.read_text(encoding="utf-8")).substitute(parts)
  shell = string.Template(_SHELL.read_text(encoding="utf-8"))
  return shell.substitute(head=head, title=html.escape(title), body=text)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A table; header and cells are HTML, the first cell names its row."""
  lines = ["<div class=scroll><table>", "<thead><tr>"]
  lines += [f"<th>{cell}</th>" for cell in header]
  lines.append("</tr></thead><tbody>")
  for first, *rest in rows:
    cells = "".join(f"<td>{cell}</td>" for cell in rest)
    lines.append(f"<tr><th scope=row>{first}</th>{cells}</tr>")
  lines.append("</tbody></table></div>")
  return "\n".join(lines)


def facts(listed: Mapping[str, Any]) -> str:
  """Entries of a definition list."""
  return "\n".join(
    f"<dt>{name}</dt><dd>{html.escape(str(value))}</dd>"
    for name, value in listed.items()
  )


def scheme(name: str) -> str:
  """What a scheme is called, behind a patch of its colour."""
  color = plots.style_of(name).get("color", "currentColor")
  return (
    f'<i class="swatch" style="background:{color}"></i>'
    f"{html.escape(plots.name_of(name))}"
  )


def signed(value: float, digits: int = 4) -> str:
  """A difference, with a proper minus sign."""
  text = f"{value:+.{digits}f}"
  return "0" if float(text) == 0 else text.replace("-", "\N{MINUS SIGN}")

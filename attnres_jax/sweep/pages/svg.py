# SPDX-License-Identifier: Apache-2.0
"""Figures as SVG that follow the colours of their page."""

import io
import re

import matplotlib
from matplotlib import figure as figure_lib

from attnres_jax.sweep.pages import page

# A placeholder for the text colour of the page.
_INK = "#010203"

_RC = {
  "axes.edgecolor": _INK,
  "axes.labelcolor": _INK,
  "axes.labelsize": 10,
  "axes.titlecolor": _INK,
  "axes.titlelocation": "left",
  "axes.titlesize": 10.5,
  "axes.titleweight": "bold",
  "font.family": "sans-serif",
  "font.size": 10,
  "grid.color": _INK,
  "legend.labelcolor": _INK,
  "svg.fonttype": "none",
  "text.color": _INK,
  "xtick.color": _INK,
  "ytick.color": _INK,
}


def style():
  """A context in which figures must be created for `to_svg`."""
  return matplotlib.rc_context(_RC)


def to_svg(figure: figure_lib.Figure, salt: str) -> page.Html:
  """An <svg> element of a figure that was made within `style()`.

  The salt makes the ids of several figures on one page distinct.
  """
  with matplotlib.rc_context(_RC | {"svg.hashsalt": salt}):
    buffer = io.StringIO()
    figure.savefig(
      buffer, format="svg", transparent=True, metadata={"Date": None}
    )
  svg = buffer.getvalue()
  svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
  svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
  # Names of groups repeat between figures, and nothing refers to them.
  used = set(re.findall(r"""(?:url\(|href=")#([^)"]+)""", svg))
  svg = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", svg)
  # Sized by the page: the viewBox keeps the proportions.
  svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
  svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
  # matplotlib escapes the text of a figure.
  return page.Html(svg)

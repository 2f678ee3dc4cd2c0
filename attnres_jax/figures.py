# SPDX-License-Identifier: Apache-2.0
"""What all figures share: how a scheme looks, one grid, one legend.

Looks belong to the scheme (`models.residuals.base.Style`); nothing here knows
one by name. Needs no matplotlib until something is drawn.
"""

from typing import Any

from attnres_jax.models import residuals


def look_of(scheme: str) -> residuals.Style:
  """Of a registered scheme; a plain one of the same name for any other."""
  known = residuals.RESIDUALS.get(scheme)
  look = known.style if known else residuals.Style()
  return look._replace(label=look.label or scheme)


def name_of(scheme: str) -> str:
  """How a scheme is called in tables and figures."""
  return look_of(scheme).label


def style_of(scheme: str) -> dict[str, Any]:
  """Keyword arguments of every line that stands for a scheme."""
  look = look_of(scheme)
  return {"color": look.colour, "linestyle": look.line, "linewidth": 1.8}


def legend(figure: Any, axes: Any) -> None:
  """One legend for the whole figure, above it."""
  handles, labels = axes.get_legend_handles_labels()
  figure.legend(
    handles, labels, loc="outside upper left", ncols=len(labels), frameon=False
  )


def style(axes: Any) -> None:
  """A light grid and no box."""
  axes.grid(True, which="major", linewidth=0.6, alpha=0.25)
  axes.set_axisbelow(True)
  for side in ("top", "right"):
    axes.spines[side].set_visible(False)

# SPDX-License-Identifier: Apache-2.0
"""Shared by all figures: the style of a scheme, the grid, the legend.

Styles belong to the schemes (`models.residuals.styles`); this module knows
no scheme by name. It imports matplotlib only when something is drawn.
"""

from typing import Any

from attnres_jax.models import residuals


def look_of(scheme: str) -> residuals.Style:
  """The style of a registered scheme; a plain style for any other name."""
  scheme_class = residuals.RESIDUALS.get(scheme)
  look = scheme_class.style if scheme_class else residuals.Style()
  return look._replace(label=look.label or scheme)


def name_of(scheme: str) -> str:
  """The label of a scheme in tables and figures."""
  return look_of(scheme).label


def style_of(scheme: str) -> dict[str, Any]:
  """Keyword arguments for every line that represents a scheme."""
  look = look_of(scheme)
  return {"color": look.colour, "linestyle": look.line, "linewidth": 1.8}


def legend(figure: Any, axes: Any, columns: int = 0) -> None:
  """One legend for the whole figure, above it, with each label once.

  In one row, unless `columns` says how many labels fit.
  """
  handles, labels = axes.get_legend_handles_labels()
  first: dict[str, Any] = {}
  for label, handle in zip(labels, handles, strict=True):
    first.setdefault(label, handle)
  figure.legend(
    first.values(), first.keys(), loc="outside upper left",
    ncols=columns or len(first),
    frameon=False,
  )  # fmt: skip


def style(axes: Any) -> None:
  """A light grid and no box."""
  axes.grid(True, which="major", linewidth=0.6, alpha=0.25)
  axes.set_axisbelow(True)
  for side in ("top", "right"):
    axes.spines[side].set_visible(False)


def logarithmic(axes: Any) -> None:
  """Losses over what they cost, both logarithmic, with ticks in plain digits.

  Losses span a few percent, too little for the ticks of a logarithmic axis.
  """
  from matplotlib import ticker

  axes.set_xscale("log")
  axes.set_yscale("log")
  axes.yaxis.set_major_locator(ticker.MaxNLocator(6))
  for axis in (axes.xaxis, axes.yaxis):
    axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axis.set_minor_formatter(ticker.NullFormatter())

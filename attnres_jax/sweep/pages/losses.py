# SPDX-License-Identifier: Apache-2.0
"""Losses of a sweep, by setting, scheme and seed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import re
from typing import Any

import pandas as pd

from attnres_jax.analysis import figures
from attnres_jax.scaling import fit as fit_lib
from attnres_jax.scaling import grid
from attnres_jax.scaling import pairs
from attnres_jax.sweep.pages import page

BASELINE = "prenorm"
# Columns that compare runs of one setting, and the first column after the
# overrides.
_WITHIN = ("run", *grid.WITHIN_SETTING)
_FIRST_RESULT = "active_params"
_ARM = ["setting", "residual"]
# Values in a file of rows; booleans need their name too.
_NUMBER = re.compile(r"[-+.\d]+(e[-+]?\d+)?|True|False")

Row = Mapping[str, Any]
# A DataFrame: to a type checker, its names could be of any type.
Frame = Any


def setting(row: Row, without: Iterable[str] = ()) -> str:
  """The overrides in a row, except scheme and seeds, in a few words."""
  words = []
  for name, value in row.items():
    if name == _FIRST_RESULT:
      break
    if value == "" or name in (*_WITHIN, *without):
      continue
    is_word = isinstance(value, str) and not _NUMBER.fullmatch(value)
    words.append(value if is_word else f"{name.rpartition('.')[2]} {value}")
  return ", ".join(words)


def frame(rows: Iterable[Row], without: Iterable[str] = ()) -> Frame:
  """Rows with their `setting` and their loss as a number.

  Raises:
    ConfigError: a loss is no finite number above 0.
  """
  rows = list(rows)
  return pd.DataFrame(rows, columns=None if rows else ["residual"]).assign(
    setting=[setting(row, without) for row in rows],
    loss=[fit_lib.loss_of(row) for row in rows],
  )


def table(
  rows: Sequence[Row], name: str = "setting", at: str = ""
) -> page.Table:
  """A line per setting, a column per scheme.

  A cell has the mean over seeds and the mean difference from the baseline with
  the same seed, with its interval (`scaling.pairs`); in small print, the
  setting's tokens and rate, and every seed. N counts parameters outside
  embedding and head, of the scheme that has the fewest.

  With a column `at`, each scheme is at its own best value of it, which its cell
  has in place of tokens, rate and N.
  """
  runs = frame(rows_at_their_best(rows, at) if at else rows)
  schemes = runs["residual"].unique()
  lines = []
  for label, group in runs.groupby("setting", sort=False):
    cells: list[Any] = [label or "all"]
    if not at:
      first = group.iloc[0]
      small = (
        f"{float(first['tokens']) / 1e6:.2f}M tokens",
        f"rate {float(first['peak_lr']):g}",
      )
      smallest = group["active_params"].astype(int).min()
      cells = [page.Cell(label or "all", small=small), f"{smallest:,}"]
    lines.append(cells + [_cell(group, scheme, at) for scheme in schemes])
  header = [name] if at else [name, "N"]
  return page.Table([*header, *map(figures.name_of, schemes)], lines)


def means(runs: Frame, arm: str | list[str], column: str) -> Frame:
  """Mean losses of a `frame`: a line per arm, values of a column across."""
  numbers = runs.astype({column: float})
  arms = numbers.pivot_table("loss", arm, column, sort=False)
  return arms[sorted(arms)]


def lowest_marked(
  rows: Sequence[Row], arm: str, column: str, name: Callable[[str], str]
) -> page.Table:
  """A line per arm, which `name` names, a column per value; lowest in bold."""
  arms = means(frame(rows), arm, column)
  lines = [
    [name(label), *bold(row, row.idxmin())] for label, row in arms.iterrows()
  ]
  return page.Table([arm, *(f"{v:g}" for v in arms)], lines)


def best_marked(
  rows: Sequence[Row], column: str, name: str = "setting"
) -> page.Table:
  """A line per setting and scheme, a column per value; the best in bold.

  Losses are means over seeds.
  """
  arms = means(_by_value(rows, column), [*_ARM, "best"], column)
  lines = [
    [label or "all", figures.name_of(scheme), *bold(row, best)]
    for (label, scheme, best), row in arms.iterrows()
  ]
  return page.Table([name, "residual", *(f"{v:g}" for v in arms)], lines)


def rows_at_their_best(rows: Sequence[Row], column: str) -> list[Row]:
  """Rows of each setting and scheme at its own best value of `column`.

  Without the overridden field, which would tell sizes of pairs apart.
  """
  runs = _by_value(rows, column)
  return [
    {name: row[name] for name in row if not name.endswith(f".{column}")}
    for row, is_best in zip(rows, runs[column] == runs["best"])
    if is_best
  ]


def bold(losses: Frame, best: Any) -> list[str]:
  """Losses as text, one of them bold; empty where there is none."""
  texts = losses.map("{:.4f}".format, na_action="ignore").fillna("")
  texts[best] = f"**{texts[best]}**"
  return texts.tolist()


def _by_value(rows: Sequence[Row], column: str) -> Frame:
  """Runs whose settings are without a column, and its `best` value of each arm.

  It has the lowest mean, among the values with the most seeds.
  """
  names = {name for row in rows for name in row}
  without = {column, *(n for n in names if n.endswith(f".{column}"))}
  runs = frame(rows, without).astype({column: float})
  arms = runs.groupby([*_ARM, column])["loss"].agg(["count", "mean"])
  arms = arms.sort_values(["count", "mean"], ascending=[False, True])
  best = arms.reset_index(column).groupby(_ARM)[column].first()
  return runs.join(best.rename("best"), on=_ARM)


def _cell(group: Frame, scheme: str, at: str = "") -> page.Cell | str:
  """A mean, the value of column `at`, and the difference from the baseline."""
  arms = pairs.losses(group.to_dict("records"), "residual")
  if scheme not in arms:
    return ""
  arm = group[group["residual"] == scheme]
  text = f"{arm['loss'].mean():.4f}" + (
    f" at {float(arm[at].iloc[0]):g}" if at else ""
  )
  apart = pairs.differences(arms, BASELINE)
  aside = f"({page.difference(apart[scheme])})" if scheme in apart else ""
  seeds = [f"{loss:.4f}" for loss in arm["loss"]]
  return page.Cell(text, aside, seeds if len(seeds) > 1 else [])

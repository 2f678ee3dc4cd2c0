# SPDX-License-Identifier: Apache-2.0
"""Losses of a sweep, by setting, scheme and seed."""

from collections.abc import Iterable, Mapping, Sequence
import re
import statistics
from typing import Any

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
# Values in a file of rows; booleans need their name too.
_NUMBER = re.compile(r"[-+.\d]+(e[-+]?\d+)?|True|False")

Row = Mapping[str, Any]


def setting(row: Row, without: Iterable[str] = ()) -> str:
  """The overrides of a run, except scheme and seeds, in a few words.

  Args:
    row: of results, or the overrides of a run.
    without: columns to leave out.
  """
  words = []
  for name, value in row.items():
    if name == _FIRST_RESULT:
      break
    if value == "" or name in (*_WITHIN, *without):
      continue
    is_word = isinstance(value, str) and not _NUMBER.fullmatch(value)
    words.append(value if is_word else f"{name.rpartition('.')[2]} {value}")
  return ", ".join(words)


def by_setting(
  rows: Iterable[Row], without: Iterable[str] = ()
) -> dict[str, list[Row]]:
  """Rows by `setting`, in the order of the sweep."""
  groups: dict[str, list[Row]] = {}
  for row in rows:
    groups.setdefault(setting(row, without), []).append(row)
  return groups


def table(rows: Sequence[Row], name: str = "setting") -> page.Table:
  """A line per setting, a column per scheme.

  A cell has the mean over seeds and the mean difference from the baseline with
  the same seed, with its interval (`scaling.pairs`); in small print, the
  setting's tokens and rate, and every seed. N counts parameters outside
  embedding and head, of the scheme that has the fewest.
  """
  schemes = list(dict.fromkeys(row["residual"] for row in rows))
  lines = []
  for label, group in by_setting(rows).items():
    first = group[0]
    small = (
      f"{float(first['tokens']) / 1e6:.2f}M tokens",
      f"rate {float(first['peak_lr']):g}",
    )
    lines.append(
      [page.Cell(label or "all", small=small)]
      + [f"{min(int(row['active_params']) for row in group):,}"]
      + [_cell(group, scheme) for scheme in schemes]
    )
  header = [name, "N"] + [figures.name_of(scheme) for scheme in schemes]
  return page.Table(header, lines)


def best_marked(
  rows: Sequence[Row], column: str, name: str = "setting"
) -> page.Table:
  """A line per setting and scheme, a column per value; the best in bold.

  Losses are means over seeds.
  """
  values = sorted({float(row[column]) for row in rows})
  lines = []
  for label, schemes in _by_value(rows, column).items():
    for scheme, by_value in schemes.items():
      texts = {value: f"{_mean(arm):.4f}" for value, arm in by_value.items()}
      best = _best(by_value)
      texts[best] = f"**{texts[best]}**"
      cells = [texts.get(value, "") for value in values]
      lines.append([label or "all", figures.name_of(scheme), *cells])
  return page.Table([name, "residual", *(f"{v:g}" for v in values)], lines)


def at_their_best(
  rows: Sequence[Row], column: str, name: str = "setting"
) -> page.Table:
  """A line per setting, a column per scheme, each at its own best value.

  A cell has the mean over seeds and the value, and the mean difference from the
  baseline with the same seed, with its interval.
  """
  cells = _by_value(rows, column)
  schemes = list(dict.fromkeys(s for row in cells.values() for s in row))
  lines = [
    [label or "all", *(_cell_at_best(row, scheme) for scheme in schemes)]
    for label, row in cells.items()
  ]
  return page.Table([name, *map(figures.name_of, schemes)], lines)


def rows_at_their_best(rows: Sequence[Row], column: str) -> list[Row]:
  """Rows of each setting and scheme at its own best value of `column`.

  Without the overridden field, which would tell sizes of pairs apart.
  """
  settings, without = _by_value(rows, column), _without(rows, column)
  return [
    {name: row[name] for name in row if name not in without - {column}}
    for label, group in by_setting(rows, without).items()
    for row in group
    if float(row[column]) == _best(settings[label][row["residual"]])
  ]


# Seed -> loss, by the value of a column, by scheme.
_Schemes = dict[str, dict[float, dict[Any, float]]]


def _by_value(rows: Sequence[Row], column: str) -> dict[str, _Schemes]:
  """Losses by setting; the column is not part of it."""
  settings: dict[str, _Schemes] = {}
  for label, group in by_setting(rows, _without(rows, column)).items():
    schemes = settings.setdefault(label, {})
    for row in group:
      values = schemes.setdefault(row["residual"], {})
      losses = values.setdefault(float(row[column]), {})
      losses[int(row["seed"])] = fit_lib.loss_of(row)
  return settings


def _without(rows: Sequence[Row], column: str) -> set[str]:
  """The column of results, and that of the overridden field."""
  return {column, *(key for row in rows for key in row if _is(key, column))}


def _best(by_value: Mapping[float, Mapping[Any, float]]) -> float:
  """The value with the lowest mean, among the values with the most seeds."""
  most = max(map(len, by_value.values()))
  complete = [value for value, arm in by_value.items() if len(arm) == most]
  return min(complete, key=lambda value: _mean(by_value[value]))


def _mean(losses: Mapping[Any, float]) -> float:
  return statistics.fmean(losses.values())


def _cell(rows: Sequence[Row], scheme: str) -> page.Cell | str:
  losses = pairs.losses(rows, "residual")
  if scheme not in losses:
    return ""
  values = losses[scheme].values()
  return page.Cell(
    f"{statistics.fmean(values):.4f}",
    _aside(losses, scheme),
    [f"{loss:.4f}" for loss in values] if len(values) > 1 else [],
  )


def _cell_at_best(schemes: _Schemes, scheme: str) -> str:
  """The cell of one setting and scheme at the scheme's best value."""
  if scheme not in schemes:
    return ""
  best = {name: by_value[_best(by_value)] for name, by_value in schemes.items()}
  text = f"{_mean(best[scheme]):.4f} at {_best(schemes[scheme]):g}"
  return f"{text} {_aside(best, scheme)}".rstrip()


def _aside(arms: Mapping[str, Mapping[Any, float]], scheme: str) -> str:
  """The difference from the baseline, in brackets; empty without pairs."""
  apart = pairs.differences(arms, BASELINE)
  return f"({page.difference(apart[scheme])})" if scheme in apart else ""


def _is(name: str, column: str) -> bool:
  """Whether an override belongs to the field that a column shows."""
  return name.rpartition(".")[2] == column

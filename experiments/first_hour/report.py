# SPDX-License-Identifier: Apache-2.0
"""The page of the first hour: one self-contained HTML file."""

from collections.abc import Iterable, Mapping, Sequence
import importlib.util
import pathlib
from typing import Any

from experiments.first_hour import checks
from experiments.first_hour import claims as claims_lib
from experiments.first_hour import machine
from experiments.first_hour import operators
from experiments.first_hour import peers
from experiments.first_hour import rows as rows_lib
from experiments.first_hour import steps
from experiments.first_hour import training
from experiments.pages import page

_BODY = pathlib.Path(__file__).with_name("report_page.html")
_MARKS = {
  claims_lib.HOLDS: "\N{CHECK MARK}",
  claims_lib.FAILS: "\N{BALLOT X}",
  claims_lib.OPEN: "\N{EN DASH}",
}
_NONE = page.Html("<p>Nothing yet.</p>")

Rows = Sequence[rows_lib.Row]


def render(
  rows: Rows,
  verdicts: Sequence[claims_lib.Verdict],
  facts: Mapping[str, str],
) -> str:
  """The page.

  Args:
    rows: so far.
    verdicts: of the claims, from these rows.
    facts: of `machine.facts`, and the form.
  """
  of = lambda part: [row for row in rows if row["part"] == part]
  parts = {
    "device": facts["hardware"],
    "summary": _summary(rows, verdicts, facts),
    "claims": _claims(verdicts),
    "machine": _machine(_ok(of(machine.PART))),
    "checks": _checks(of(checks.PART)),
    "steps": _measured(_ok(of(steps.PART)), "compiled"),
    "training": _measured(_ok(of(training.PART)), "predicted"),
    "figure": _figure(_ok(of(operators.PART))),
    "operators": _operators(_ok(of(operators.PART))),
    "peers": _peers(of(peers.PART)),
    "missing": _missing(rows),
    "facts": _facts(facts),
  }
  return page.render("The first hour on hardware", _BODY, parts)


def _summary(rows, verdicts, facts):
  numbers = claims_lib.counts(verdicts)
  counted = f"{len(_ok(rows))} numbers from commit {facts['commit']}."
  if facts["form"] == "short":
    return (
      "The short form on a CPU: it tries every part at a small size, and"
      f" decides no claim about accelerators. {counted}"
    )
  text = ", ".join(f"{number} {word}" for word, number in numbers.items())
  return f"Of {len(verdicts)} claims: {text}. {counted}"


def _claims(verdicts: Sequence[claims_lib.Verdict]) -> page.Html:
  header = ("claim", "stands in", "holds if", "numbers")
  lines = []
  for one in verdicts:
    column = claims_lib.threshold(one.claim)
    lines.append((
      page.Cell(
        f"{_MARKS[one.outcome]} {one.outcome}", small=(one.claim.text,)
      ),
      page.Cell(one.claim.document),
      page.Cell("", small=(column,) if column else ()),
      page.Cell("", small=(one.numbers,)),
    ))  # fmt: skip
  return page.Table(header, lines).html()


def _machine(rows: Rows) -> page.Html:
  header = ("", "measured", "published", "share")
  return _table(
    header,
    [
      (
        row["name"],
        _unit(row, "measured"),
        _unit(row, "limit"),
        row["to_limit"],
      )
      for row in rows
    ],
  )


def _checks(rows: Rows) -> page.Html:
  """A line per operator, a column per implementation and dtype."""
  columns = list(
    dict.fromkeys((row["arm"], row["case"]) for row in rows if row["arm"])
  )
  found = {(row["name"], row["arm"], row["case"]): row for row in _ok(rows)}
  lines = []
  for op in dict.fromkeys(name for name, _, _ in found):
    cells: list[page.Cell | str] = []
    for arm, dtype in columns:
      row = found.get((op, arm, dtype))
      if row is None:
        cells.append("")
        continue
      good = float(row["measured"]) <= float(row["limit"])
      mark = _MARKS[claims_lib.HOLDS if good else claims_lib.FAILS]
      error, tolerance = float(row["measured"]), float(row["limit"])
      which = row["reason"].rpartition(": ")[2]
      cells.append(
        page.Cell(
          f"{mark} {error:.1e}", small=(f"of {tolerance:.1e}: {which}",)
        )
      )
    lines.append((op, *cells))
  return _table(("", *(f"{arm}, {dtype}" for arm, dtype in columns)), lines)


def _measured(rows: Rows, word: str) -> page.Html:
  header = ("", "scheme", "measured", word, "ratio", "distance")
  return _table(
    header,
    [
      (
        page.Cell(row["name"], small=(row["case"],)),
        row["arm"],
        _spread(row),
        _unit(row, "estimate"),
        row["to_estimate"],
        _unit(row, "off_estimate"),
      )
      for row in rows
    ],
  )


def _operators(rows: Rows) -> page.Html:
  header = (
    "", "measured, us", "limit, us", "times the limit", "above it, us",
    "estimate, us", "times the estimate",
  )  # fmt: skip
  return _table(
    header,
    [
      (
        page.Cell(row["name"], small=(f"{row['case']}, {row['arm']}",)),
        _spread(row, unit=False),
        row["limit"],
        row["to_limit"],
        row["above_limit"],
        row["estimate"],
        row["to_estimate"],
      )
      for row in rows
    ],
  )


def _peers(rows: Rows) -> page.Html:
  header = ("", "arm", "measured", "times a copy of its bytes", "")
  return _table(
    header,
    [
      (
        page.Cell(row["name"], small=(row["case"],)),
        row["arm"],
        _spread(row) if row["measured"] else row["status"],
        row["to_limit"],
        page.Cell("", small=(row["reason"],)),
      )
      for row in rows
    ],
  )


def _missing(rows: Rows) -> page.Html:
  lines = [
    (
      page.Cell(row["task"], small=(row["part"],)),
      row["status"],
      page.Cell("", small=(row["reason"],)),
    )
    for row in rows
    if row["status"] != rows_lib.OK and row["part"] != peers.PART
  ]
  return _table(("", "", "why"), lines)


def _figure(rows: Rows) -> page.Html:
  """Times over limits, by limit; nothing without matplotlib."""
  if not rows or importlib.util.find_spec("matplotlib") is None:
    return page.Html("")
  from matplotlib import figure as figure_lib

  from experiments.pages import svg as svg_lib

  with svg_lib.style():
    figure = figure_lib.Figure((7.5, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for op in dict.fromkeys(row["name"] for row in rows):
      own = [row for row in rows if row["name"] == op]
      limit = [float(row["limit"]) for row in own]
      line = axes.plot(
        limit, [float(row["to_limit"]) for row in own], "o", ms=5, label=op
      )
      known = [row for row in own if row["estimate"]]
      axes.plot(
        [float(row["limit"]) for row in known],
        [float(row["estimate"]) / float(row["limit"]) for row in known],
        "x",
        color=line[0].get_color(),
        ms=5,
      )
    axes.axhline(1, lw=0.8, color="0.5")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("limit, us")
    axes.set_title("Times the limit (o measured, x estimated)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False)
    drawn = svg_lib.to_svg(figure, "operators")
  return page.fill("<figure>$drawn</figure>", drawn=drawn)


def _facts(facts: Mapping[str, str]) -> page.Html:
  return page.facts(
    {
      "Hardware": facts["hardware"],
      "System": facts["system"],
      "Software": (
        f"Python {facts['python']}, jax {facts['jax']}, flax {facts['flax']}"
      ),
      "Commit": facts["commit"],
      "Date": facts["date"],
    }
  )


def _ok(rows: Iterable[rows_lib.Row]) -> list[rows_lib.Row]:
  return [row for row in rows if row["status"] == rows_lib.OK]


def _table(header: Sequence[str], lines: Sequence[Sequence[Any]]) -> page.Html:
  return page.Table(header, lines).html() if lines else _NONE


def _unit(row: rows_lib.Row, name: str) -> str:
  return f"{row[name]} {row['unit']}".strip() if row[name] else ""


def _spread(row: rows_lib.Row, unit: bool = True) -> page.Cell:
  text = _unit(row, "measured") if unit else row["measured"]
  if not row["low"]:
    return page.Cell(text)
  return page.Cell(text, small=(f"{row['low']} to {row['high']}",))

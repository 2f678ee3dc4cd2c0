# SPDX-License-Identifier: Apache-2.0
"""The tables of `decode_cost`, from its rows."""

from collections.abc import Mapping, Sequence

from attnres_jax.analysis import figures
from experiments.pages import readme as readme_lib

Row = Mapping[str, str]
_PLACE = ("step", "chip", "batch", "context")


def compiled(rows: Sequence[Row]) -> str:
  """Estimates of compiled programs, and their ratios to PreNorm."""
  base = {_key(row): row for row in rows if row["scheme"] == "prenorm"}
  lines = []
  for row in sorted(rows, key=_order):
    where = [row["step"], row["chip"], row["batch"], _tokens(row["context"])]
    scheme, prenorm = figures.name_of(row["scheme"]), base[_key(row)]
    if row["fits"] != "True":
      lines.append([*where, scheme, "does not fit", "", "", "", "", ""])
      continue
    lines.append(
      [
        *where, scheme, f"{float(row['MB']) / 1e3:.3f}",
        f"{float(row['least_MB']) / 1e3:.3f}", _ratio(row, prenorm, "MB", 4),
        f"{float(row['estimate_us']) / 1e3:.3f}",
        _ratio(row, prenorm, "estimate_us", 3), _share(row),
      ]
    )  # fmt: skip
  header = (
    "step", "chip", "rows", "tokens", "scheme", "GB", "least", "ratio",
    "estimate, ms", "ratio", "depth reads",
  )  # fmt: skip
  return f"{readme_lib.table(header, lines)}\n\n{_origin(rows)}."


def summary(rows: Sequence[Row]) -> str:
  """The range of ratios of each scheme, a line per chip and step."""
  base = {_key(row): row for row in rows if row["scheme"] == "prenorm"}
  lines = []
  fitting = [row for row in rows if row["fits"] == "True"]
  groups = dict.fromkeys(
    (row["step"], row["chip"], row["scheme"])
    for row in sorted(fitting, key=_order)
    if row["scheme"] != "prenorm"
  )
  for group in groups:
    own = [r for r in fitting if (r["step"], r["chip"], r["scheme"]) == group]
    step, chip, scheme = group
    lines.append(
      [
        step, chip, figures.name_of(scheme),
        *(
          _range([float(r[name]) / float(base[_key(r)][name]) for r in own])
          for name in ("MB", "estimate_us")
        ),
        f"{100 * max(map(_share_of, own)):.1f} %",
      ]
    )  # fmt: skip
  header = ("step", "chip", "scheme", "bytes", "estimate", "depth reads, most")
  return f"{readme_lib.table(header, lines)}\n\n{_origin(rows)}."


def measured(rows: Sequence[Row]) -> str:
  """Tokens per second on a CPU, and ratios of times within rounds."""
  lines = []
  for row in rows:
    ratio = f"{float(row['ratio']):.2f}"
    if row["ratio_min"] != row["ratio_max"]:
      ratio += f" ({float(row['ratio_min']):.2f} to"
      ratio += f" {float(row['ratio_max']):.2f})"
    lines.append(
      [
        row["step"], row["batch"], row["context"], label(row["form"]),
        f"{float(row['tokens_per_second']):,.0f}", ratio,
      ]
    )  # fmt: skip
  header = (
    "step", "rows", "tokens", "scheme", "tokens per second",
    "time, over the faster PreNorm",
  )  # fmt: skip
  origin = rows[0]
  facts = (
    f"{origin['hardware']}, Python {origin['python']}, jax {origin['jax']},"
    f" commit {origin['commit']}"
  )
  return f"{readme_lib.table(header, lines)}\n\n{facts}."


def prompts(rows: Sequence[Row]) -> str:
  """Memory of long prompts, and their collectives of activations."""
  header = (
    "network", "scheme", "devices", "tokens at once", "before them",
    "blocks, GB", "all temporaries, GB", "all-gather", "reduce-scatter",
    "all-reduce", "others",
  )  # fmt: skip
  numbers = ("all_gather", "reduce_scatter", "all_reduce", "others")
  lines = [
    [
      row["network"], figures.name_of(row["scheme"]), row["devices"],
      row["chunk"], row["cached"], row["blocks_GB"], row["temporary_GB"],
      *(row[name] for name in numbers),
    ]
    for row in rows
  ]  # fmt: skip
  return f"{readme_lib.table(header, lines)}\n\n{_origin(rows)}."


def label(form: str) -> str:
  """The label of a scheme and how its layers run."""
  name, _, how = form.partition(" ")
  return figures.name_of(name) + f", {how or 'scanned'}"


def _key(row: Row) -> tuple[str, ...]:
  return tuple(row[name] for name in _PLACE)


def _order(row: Row) -> tuple:
  schemes = ("prenorm", "block_attnres", "full_attnres")
  numbers = int(row["context"]), int(row["batch"])
  return row["step"], row["chip"], *numbers, schemes.index(row["scheme"])


def _tokens(count: str) -> str:
  return f"{int(count) // 1024}K"


def _ratio(row: Row, base: Row, name: str, digits: int) -> str:
  return f"{float(row[name]) / float(base[name]):.{digits}f}"


def _share_of(row: Row) -> float:
  return float(row["depth_us"]) / float(row["estimate_us"])


def _share(row: Row) -> str:
  return f"{100 * _share_of(row):.1f} %" if float(row["depth_us"]) else ""


def _range(values: Sequence[float]) -> str:
  low, high = min(values), max(values)
  return f"{low:.3f}" if low == high else f"{low:.3f} to {high:.3f}"


def _origin(rows: Sequence[Row]) -> str:
  commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
  row = rows[0]
  return (
    f"Compiled, not run; Python {row['python']}, jax {row['jax']}, commit"
    f" {commits}"
  )

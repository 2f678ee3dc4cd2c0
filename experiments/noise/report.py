# SPDX-License-Identifier: Apache-2.0
"""Where the noise of a loss comes from, from the rows of the sweep."""

from collections.abc import Mapping, Sequence
import math
import statistics
from typing import Any, NamedTuple

from matplotlib import figure as figure_lib
import numpy as np

from attnres_jax.analysis import figures
from experiments.pages import losses as losses_lib
from experiments.pages import page
from experiments.pages import sweep

BASELINE, OTHER = "prenorm", "block_attnres"
# The standard error that resolves 0.005 nats.
WANTED = 0.002
# Rows of the validation split that the plain recipe evaluates.
PLAIN_ROWS = 512
_LOSS, _LAST = "validation_loss", "last_weights_loss"

Row = Mapping[str, Any]


class Protocol(NamedTuple):
  """What runs share that differ only in scheme, seeds and rounding."""

  recipe: str
  rows: int
  rate: float

  @classmethod
  def of(cls, row: Row) -> "Protocol":
    return cls(row["recipe"], int(row["rows"]), float(row["rate"]))

  def __str__(self) -> str:
    return f"{self.recipe}, {self.rows} rows, rate {self.rate:g}"


class Key(NamedTuple):
  """What distinguishes runs of one protocol."""

  residual: str
  seed: int
  order: int
  epsilon: str


Losses = dict[Key, float]


def by_protocol(
  rows: Sequence[Row], loss: str = _LOSS
) -> dict[Protocol, Losses]:
  """Losses of each protocol; without rows that lack this loss."""
  found: dict[Protocol, Losses] = {}
  for row in rows:
    if row[loss]:
      key = Key(
        row["residual"], int(row["seed"]), int(row["data.seed"]),
        row.get("model.norm_eps", ""),
      )  # fmt: skip
      found.setdefault(Protocol.of(row), {})[key] = float(row[loss])
  return found


def paired(losses: Losses) -> list[float]:
  """Differences of Block AttnRes from PreNorm, for all seeds and orders."""
  return [
    losses[other] - loss
    for key, loss in sorted(losses.items())
    if _is_plain(key)
    for other in [key._replace(residual=OTHER)]
    if other in losses
  ]


def rounding(losses: Losses, residual: str = BASELINE) -> list[float]:
  """Differences of a scheme's runs with another epsilon, for all seeds."""
  return [
    loss - losses[key._replace(epsilon="")]
    for key, loss in sorted(losses.items())
    if key.epsilon and key.residual == residual
  ]


def rates(rows: Sequence[Row]) -> page.Table:
  """Losses of PreNorm for each batch and rate, means over seeds."""
  lines = []
  averaged, last = by_protocol(rows), by_protocol(rows, _LAST)
  for protocol in sorted(last):
    both = [
      [loss for key, loss in found[protocol].items() if _is_plain(key)]
      for found in (averaged, last)
    ]
    cells = [f"{statistics.fmean(found):.4f}" for found in both]
    lines.append(
      [str(protocol.rows), f"{protocol.rate:g}", *cells, str(len(both[0]))]
    )
  header = "rows", "rate", "averaged weights", "last weights", "runs"
  return page.Table(header, lines)


def protocols(rows: Sequence[Row]) -> page.Table:
  """The noise of every protocol that has pairs, and what it takes."""
  seconds: dict[Protocol, list[float]] = {}
  for row in rows:
    seconds.setdefault(Protocol.of(row), []).append(float(row["seconds"]))
  lines = []
  for name, loss in (("", _LOSS), (", last weights", _LAST)):
    for protocol, losses in by_protocol(rows, loss).items():
      apart = paired(losses)
      if len(apart) < 2:
        continue
      alone = [x for key, x in losses.items() if _is_plain(key)]
      spread = statistics.stdev(apart)
      lines.append(
        [
          f"{protocol}{name}",
          str(len(apart)),
          f"{statistics.fmean(alone):.4f}",
          f"{statistics.stdev(alone):.4f}",
          _rms(rounding(losses)),
          _rms(rounding(losses, OTHER)),
          page.signed(statistics.fmean(apart)),
          f"{spread:.4f}",
          page.signed(statistics.median(apart)),
          str(math.ceil((spread / WANTED) ** 2)),
          f"{min(seconds[protocol]) / 60:.1f}",
        ]
      )
  header = (
    "protocol", "pairs", "PreNorm", "standard deviation", "PreNorm, rounding",
    "Block, rounding", "Block − PreNorm", "its standard deviation", "median",
    f"pairs for {WANTED:g}", "minutes, fastest",
  )  # fmt: skip
  return page.Table(header, lines)


def sources(rows: Sequence[Row]) -> page.Table:
  """Standard deviations by source, where seeds and orders are crossed."""
  lines = []
  for protocol, losses in by_protocol(rows).items():
    alone = _squares({k: x for k, x in losses.items() if _is_plain(k)})
    both = {
      key: other - losses[key]
      for key in losses
      if _is_plain(key)
      and (other := losses.get(key._replace(residual=OTHER))) is not None
    }
    crossed = _squares(both)
    if len(alone) and len(crossed):
      rounded = [x / math.sqrt(2) for x in rounding(losses)]
      lines += [
        [f"{protocol}: PreNorm", *_components(alone), _rms(rounded)],
        [f"{protocol}: Block − PreNorm", *_components(crossed), ""],
      ]
  header = (
    "standard deviation of", "initial weights", "order of the data",
    "the rest", "of this, rounding",
  )  # fmt: skip
  return page.Table(header, lines)


def results(rows: Sequence[Row]) -> str:
  """For the README."""
  parts = [rates(rows), protocols(rows), sources(rows)]
  texts = [part.markdown() for part in parts if part.rows]
  return "\n\n".join([*texts, sweep.origin(rows)])


def evaluation(rows: Sequence[Row]) -> str:
  """For the README: what part of a difference is the choice of the text."""
  lines = []
  for row in rows:
    count, spread = int(row["rows"]), float(row["spread_of_rows"])
    errors = [spread / math.sqrt(n) for n in (PLAIN_ROWS, count)]
    lines.append(
      [row["seed"], page.signed(float(row["difference"]))]
      + [f"{error:.4f}" for error in errors]
    )
  first = rows[0]
  header = (
    "seed", "Block − PreNorm", f"error with {PLAIN_ROWS} rows",
    f"error with all {first['rows']} rows",
  )  # fmt: skip
  origin = (
    f"{first['hardware']}; Python {first['python']}, jax {first['jax']},"
    f" commit {first['commit']}."
  )
  return f"{page.Table(header, lines).markdown()}\n\n{origin}"


def lengths(rows: Sequence[Row]) -> str:
  """For the README: the same noise in longer runs of larger networks."""
  lines = []
  for size, own in losses_lib.by_setting(rows).items():
    cells = []
    for scheme in (OTHER, "full_attnres"):
      apart = losses_lib.differences(own, scheme)
      spread = statistics.stdev(apart)
      cells += [f"{spread:.4f}", str(math.ceil((spread / WANTED) ** 2))]
    seconds = [
      float(row["seconds"]) for row in own if row["residual"] == BASELINE
    ]
    lines.append(
      [
        size,
        f"{int(own[0]['active_params']):,}",
        f"{float(own[0]['tokens']) / 1e6:.2f}M",
        *cells,
        f"{statistics.median(seconds) / 60:.1f}",
      ]
    )
  header = (
    "size", "N", "bytes", "Block − PreNorm", f"pairs for {WANTED:g}",
    "Full − PreNorm", f"pairs for {WANTED:g}", "minutes a run",
  )  # fmt: skip
  return page.Table(header, lines).markdown()


def figure(rows: Sequence[Row]) -> figure_lib.Figure:
  """Every difference of two runs that share seed and data, by protocol."""
  found = {
    protocol: losses
    for protocol, losses in by_protocol(rows).items()
    if paired(losses)
  }
  shape = figure_lib.Figure(
    figsize=(7.4, 0.8 + 0.75 * len(found)), layout="constrained"
  )
  axes = shape.subplots()
  for height, losses in enumerate(found.values()):
    for values, shift, scheme, label in (
      (rounding(losses), 0.17, BASELINE, "PreNorm, other rounding"),
      (paired(losses), -0.17, OTHER, figures.name_of(OTHER)),
    ):
      look = figures.look_of(scheme)
      at = np.full(len(values), height + shift)
      axes.plot(
        values, at, look.marker, color=look.colour, alpha=0.6, markersize=6,
        label=label if height == 0 else None,
      )  # fmt: skip
      if len(values) > 1:
        error = statistics.stdev(values) / math.sqrt(len(values))
        axes.errorbar(
          statistics.fmean(values), height + shift, xerr=error, fmt="|",
          color=look.colour, markersize=14, capsize=4,
        )  # fmt: skip
  axes.axvline(0.0, color="grey", linewidth=0.8)
  axes.set_yticks(range(len(found)), [str(protocol) for protocol in found])
  axes.set_ylim(max(1, len(found)) - 0.5, -0.5)
  axes.set_xlabel("difference from PreNorm, nats per byte")
  figures.style(axes)
  figures.legend(shape, axes)
  return shape


def _is_plain(key: Key) -> bool:
  return key.residual == BASELINE and not key.epsilon


def _squares(losses: Losses) -> np.ndarray:
  """[squares, seed, order] of two seeds that have each other's orders, too."""
  cells = {(key.seed, key.order): loss for key, loss in losses.items()}
  pairs = [(i, j) for i, j in cells if i < j]
  return np.array(
    [
      [[cells[i, i], cells[i, j]], [cells[j, i], cells[j, j]]]
      for i, j in pairs
      if {(i, i), (j, i), (j, j)} <= cells.keys()
    ]
  )


def _components(squares: np.ndarray) -> list[str]:
  """Deviations due to seed, order and the rest, by analysis of variance."""
  signs = np.array([1.0, -1.0])
  seed, order, rest = (
    np.mean((np.einsum("nij,i,j->n", squares, a, b) / 2) ** 2)
    for a, b in (
      (signs, np.ones(2)), (np.ones(2), signs), (signs, signs),
    )
  )  # fmt: skip
  parts = [max(0.0, (seed - rest) / 2), max(0.0, (order - rest) / 2), rest]
  return [f"{math.sqrt(part):.4f}" for part in parts]


def _rms(values: Sequence[float]) -> str:
  """Root mean square of differences whose expectation is zero."""
  return f"{np.sqrt(np.mean(np.square(values))):.4f}" if values else ""

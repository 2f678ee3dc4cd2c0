# SPDX-License-Identifier: Apache-2.0
"""Where the noise of a loss comes from, from the rows of the sweep."""

from collections.abc import Mapping, Sequence
import math
import statistics
from typing import Any, NamedTuple

import numpy as np

from attnres_jax.scaling import pairs as pairs_lib
from experiments.pages import page
from experiments.pages import sweep

BASELINE, OTHER = "prenorm", "block_attnres"
# The standard error that resolves 0.005 nats.
WANTED = 0.002
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


def independent(losses: Losses) -> pairs_lib.Difference:
  """The same of pairs that share neither weights nor order with another one.

  Seeds and orders are crossed: of the four pairs of two seeds, two are.
  """
  own, other = (
    {
      key.seed: loss
      for key, loss in losses.items()
      if key.seed == key.order and not key.epsilon and key.residual == residual
    }
    for residual in (OTHER, BASELINE)
  )
  return pairs_lib.difference(own, other)


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
          page.difference(independent(losses)),
          f"{spread:.4f}",
          page.signed(statistics.median(apart)),
          str(math.ceil((spread / WANTED) ** 2)),
          f"{min(seconds[protocol]) / 60:.1f}",
        ]
      )
  header = (
    "protocol", "pairs", "PreNorm", "standard deviation", "PreNorm, rounding",
    "Block, rounding", "Block − PreNorm", "of independent pairs",
    "its standard deviation", "median",
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

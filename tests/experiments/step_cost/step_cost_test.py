# SPDX-License-Identifier: Apache-2.0
"""Ratios are to the faster form of PreNorm, and the texts of the READMEs."""

import pytest

from experiments import measure
from experiments.step_cost import report
from experiments.step_cost import run

FACTS = {"hardware": "a CPU", "python": "3.11", "jax": "0.10", "commit": "abc"}


def _times(scanned, unrolled, block):
  """Wall and processor seconds of three rounds of each scheme."""
  walls = {
    "prenorm": scanned,
    "prenorm unrolled": unrolled,
    "block_attnres": block,
    "full_attnres": [2 * wall for wall in block],
  }
  return {
    scheme: {
      kind: [measure.Seconds(wall, 2 * wall) for wall in own]
      for kind in report.MEASURES
    }
    for scheme, own in walls.items()
  }


@pytest.mark.parametrize(
  "scanned,unrolled,baseline,ratio",
  [
    ([4.0, 4.0, 9.0], [3.0, 2.0, 3.0], "prenorm unrolled", 2.0),
    ([2.0, 2.0, 2.0], [3.0, 3.0, 1.0], "prenorm", 3.0),
  ],
)
def test_baseline_is_the_faster_form(scanned, unrolled, baseline, ratio):
  times = _times(scanned, unrolled, [6.0, 4.0, 12.0])
  for row in run.ratios(times, "block_attnres"):
    assert (row["baseline"], row["ratio"]) == (baseline, ratio)
    assert row["ratio_min"] == 2.0 and row["ratio_max"] > 3.0
    assert row["cpu_ratio"] == ratio and row["seconds"] == 6.0
  other = {"prenorm": "prenorm unrolled"}.get(baseline, "prenorm")
  for row in run.ratios(times, other):
    assert row["baseline"] == baseline and row["ratio"] > 1


def _rows():
  times = _times([4.0, 4.0], [3.0, 3.0], [3.3, 3.9])
  rows = [
    {"size": "large", "scheme": scheme} | row | FACTS
    for scheme in times
    for row in run.ratios(times, scheme)
  ]
  return [{name: str(value) for name, value in row.items()} for row in rows]


def test_texts_of_the_readmes():
  table = report.table(_rows())
  assert "| large | PreNorm, unrolled | 1 (3.00 s) |" in table
  assert "| large | PreNorm, scanned | 1.3 |" in table
  assert "| large | Block AttnRes | 1.20 (1.10 to 1.30) |" in table
  sentence = report.sentence(_rows())
  assert "Block AttnRes takes 1.20 (1.10 to 1.30) times" in sentence
  assert "AttnRes takes 2.40 (2.20 to 2.60) times" in sentence
  assert "in its faster form." in sentence

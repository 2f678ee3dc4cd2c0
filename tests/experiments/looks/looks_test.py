# SPDX-License-Identifier: Apache-2.0
"""Looks into trained networks: which runs, and numbers of planted report."""

import numpy as np
import pytest

from attnres_jax.common import csv_rows
from attnres_jax.scaling import grid
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import state as state_lib
from experiments.looks import report
from experiments.looks import run
from tests import tiny_network


def test_finished_runs(tmp_path):
  """Runs of these variants that are done, at their own rate and budget."""
  runs = grid.load("experiments/ablations/config.py:seeds=2,runlocal=true")
  runs = folder_lib.prepare(tmp_path, runs, "ablations")
  for planned in runs:
    if "block-seed1" not in planned.name:
      state_lib.write(tmp_path / planned.name, state_lib.State(state_lib.DONE))
  finished = list(run.finished(tmp_path, ["full", "prenorm", "block"]))
  assert [(variant, seed) for variant, seed, _ in finished] == [
    ("full", 0), ("full", 1), ("prenorm", 0), ("prenorm", 1), ("block", 0)
  ]  # fmt: skip
  for variant, seed, path in finished:
    assert path.name.startswith(f"{variant}-seed{seed}-")


@pytest.fixture(scope="module", name="network")
def network_fixture():
  """Untrained, but with queries that choose."""
  model = tiny_network.model("full_attnres", num_layers=3)
  query = model.residual.queries.query
  rng = np.random.default_rng(0)
  query[...] = rng.standard_normal(query.shape).astype(np.float32)
  tokens_BT = rng.integers(0, 16, (20, 9), dtype=np.int32)
  return run.Network("full", 0, model, tokens_BT)


@pytest.mark.more
def test_looks_become_a_readme(network, tmp_path):
  rows = [
    row | {"hardware": "x", "jax": "0", "commit": "c"}
    for variant in ("prenorm", "full")
    for row in run.rows_of(network._replace(variant=variant))
  ]
  csv_rows.write(tmp_path / "results.csv", rows)
  rows = csv_rows.read(tmp_path / "results.csv")
  assert {row["variant"] for row in rows if row["series"] == "mlp"} == {"full"}
  for part in report.PUBLISHED.parts:
    made = part.make(rows)
    if part.document == "README.md":
      assert "nan" not in made and "commit c." in made
    else:
      assert made.axes


def test_numbers_of_matrices():
  size = 6
  even = np.tri(size)
  newest = np.eye(size)
  assert list(report.numbers(even)[2:]) == pytest.approx([1.0, 1.0])
  first, embedding, reach, overlap = report.numbers(newest)
  assert (first, embedding) == (1.0, 0.0)
  n = np.arange(3, size + 1)
  assert reach == pytest.approx(np.mean(2 / (n + 1)))
  assert overlap == pytest.approx(np.mean(1 / n))


def test_numbers_of_patterns():
  """Three reads: of two sources (left out), of three and of four."""
  rows = [[0.5, 0.5, None, None], [0.2, 0.2, 0.6, None], [0.1, 0.5, 0.2, 0.2]]
  newest, is_largest, embedding, evenness, skips = report.observed(
    rows, [0.1, 0.5, np.log(4)]
  )
  assert newest == pytest.approx((1.8 + 0.8) / 2)
  assert is_largest == 0.5
  assert embedding == pytest.approx((0.6 + 0.4) / 2)
  assert evenness == pytest.approx((0.5 / np.log(3) + 1) / 2)
  assert skips == 1.0  # Only the second of four is older.


def test_removals_of_reads_with_a_choice():
  cost, weight = [[2.0, None], [0.1, 0.3]], [[1.0, None], [0.4, 0.6]]
  weight, cost = report.removed(cost, weight)
  assert (weight.tolist(), cost.tolist()) == ([0.4, 0.6], [0.1, 0.3])

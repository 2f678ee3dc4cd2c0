# SPDX-License-Identifier: Apache-2.0
"""Rows of costs: their baselines, and the command that makes them."""

import types

import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import csv_rows
from attnres_jax.common import plans
from experiments import measure
from experiments.cost import experts
from experiments.cost import networks
from experiments.cost import report
from experiments.cost import run
from tests.fuzz import laws

SCANNED, UNROLLED = "prenorm", "prenorm scan_layers=False"
FACTS = {"hardware": "a CPU", "python": "3.11", "jax": "0.10", "commit": "abc"}


def _times(scanned, unrolled, block):
  """Wall and processor seconds of three rounds of each arm."""
  walls = {
    SCANNED: scanned,
    UNROLLED: unrolled,
    "block_attnres": block,
    "full_attnres": [2 * wall for wall in block],
  }
  return {
    (program, arm): [measure.Seconds(wall, 2 * wall) for wall in seconds]
    for program in ("forward", "forward_backward")
    for arm, seconds in walls.items()
  }


@pytest.mark.parametrize(
  "scanned,unrolled,baseline,ratio",
  [
    ([4.0, 4.0, 9.0], [3.0, 2.0, 3.0], UNROLLED, 2.0),
    ([2.0, 2.0, 2.0], [3.0, 3.0, 1.0], SCANNED, 3.0),
  ],
)
def test_baseline_is_the_faster_form(scanned, unrolled, baseline, ratio):
  rows = list(measure.ratios(_times(scanned, unrolled, [6.0, 4.0, 12.0])))
  assert {row["baseline"] for row in rows} == {baseline}
  for row in (row for row in rows if row["arm"] == "block_attnres"):
    assert row["ratio"] == row["cpu_ratio"] == ratio and row["seconds"] == 6.0
    assert row["ratio_min"] == 2.0 and row["ratio_max"] > 3.0
  other = {SCANNED: UNROLLED}.get(baseline, SCANNED)
  assert all(row["ratio"] > 1 for row in rows if row["arm"] == other)


def test_a_row_replaces_that_of_the_same_sizes(tmp_path):
  path = tmp_path / "rows.csv"
  row = {"place": "here", "network": "large", "batch": 2, "tokens": 8}
  for change in ({}, {"arm": "b"}, {"arm": "b", "ratio": 7.0}, {"tokens": 9}):
    csv_rows.put(path, row | change, report.KEYS)
  rows = csv_rows.read(path)
  assert [row["ratio"] for row in rows] == ["", "7.0", ""]


def _compiled(arm, batch, gigabytes, milliseconds, **more):
  names = (*report.KEYS, "blocks_GB", "depth_ms", "peak_GiB")
  row = dict.fromkeys(names, "") | FACTS | dict(
    program="decode", place="v5e", network="served", arm=arm, tokens=1024,
    batch=batch, least_GB=1.0, GB=gigabytes, ms=milliseconds,
  ) | more  # fmt: skip
  return {name: str(value) for name, value in row.items()}


def test_rows_without_a_ratio():
  """A program that does not fit, and an arm without its baseline."""
  row = _compiled("full_attnres", 64, "", "", peak_GiB="does not fit")
  lone = _compiled("block_attnres", 2, 1.01, 9.9)
  text = report.compiled([row, lone], ("decode", "prefill"))
  assert "Full AttnRes |  | 1.0 |  | does not fit" in text
  assert "9.9" not in report.latency([row, lone])


def test_experts_over_what_they_need():
  """The minima of dev/LOG.md, "four ways to bring experts their tokens"."""
  network = networks.load("194m")
  plan = {"mesh.data": 2, "mesh.expert": 8, "optim.accumulate_steps": 3}
  columns = experts.columns(plans.apply(network.run, plan))
  assert columns["device_tokens"] == 32_768 and columns["batch"] == 64
  # 3.3 (34 D + 48 F) numbers of two bytes.
  least = 3.3 * (34 * 896 + 48 * 400) * 2 * 32_768 / 1e9
  assert float(columns["least_GB"]) == pytest.approx(least, rel=1e-4)
  assert least == pytest.approx(10.74, abs=0.01)


def test_experts_need_a_plan():
  devices = [types.SimpleNamespace(device_kind="TPU v5", slice_index=0)] * 3
  with pytest.raises(config_lib.ConfigError, match="--networks: got"):
    experts.planned(networks.load("194m"), devices)


@pytest.mark.more
def test_the_command_times_programs(tmp_path):
  out = tmp_path / "rows.csv"
  common = ["--networks=tiny", "--rounds=1", f"--out={out}"]
  arms = "--arms=prenorm;block_attnres heads=2"
  assert run.main(["step", *common, arms]) == 0
  assert run.main(["decode", *common, arms, "--batch=1", "--tokens=8"]) == 0
  assert run.main(["experts", "--tokens=16", f"--out={out}"]) == 0
  *rows, of_experts = csv_rows.read(out)
  assert of_experts["program"] == "experts" and of_experts["seconds"]
  programs = ("compile", "forward", "forward_backward", "decode", "recompute")
  assert sorted(row["program"] for row in rows) == sorted(2 * programs)
  assert all(float(row["seconds"]) > 0 for row in rows)
  assert {row["arm"] for row in rows} == {"prenorm", "block_attnres heads=2"}
  assert all(row["commit"] and row["hardware"] for row in rows)
  for bad, words in (
    (["step", "--networks=x"], "error: --networks: got 'x'"),
    (["decode", "--chips=v5e", "--bytes_only"], "--bytes_only: got True"),
    (["step", "--chips=v5e", "--cached=8"], "--cached: got 8"),
    (["step", "--arms=prenorm x=1", "--networks=tiny"], "no option x"),
    (["identity"], "what: got 'identity'"),
    (["step", "--bytes_only"], "--bytes_only: has no effect without --chips"),
    (["step", "--tokens=0"], "--tokens: got"),
    (["step", "--arms=block_attnres"], "--arms: got 'block_attnres'"),
    (["prefill", "--chips=v5e", "--batch=8"], "--batch: got 8"),
  ):
    status, _, err = laws.outcome(run.main, [*bad, f"--out={out}"])
    assert status == 2 and words in err


def test_vectors_of_table_1():
  rows = {(row["network"], row["arm"]): row for row in run.vectors()}
  assert len(rows) == 16
  printed = {
    arm: float(row["printed"])
    for (depth, arm), row in rows.items()
    if depth == "Table 1"
  }
  assert printed == dict(prenorm=3, mhc=34, full_attnres=24, block_attnres=5.5)
  block = rows["Table 1", "block_attnres"]
  assert block["writes"] == "3.0000"
  # (N + 1) / 2S sources of phase 1, the mixture, and the running sum.
  assert float(block["reads"]) == pytest.approx(9 / 32 + 3, abs=0.07)


def test_every_network_is_one():
  for name in networks.NETWORKS:
    assert networks.load(name).model.width
  arm = networks.with_arm(networks.load("tiny"), "mhc streams=2")
  assert arm.residual.streams == 2

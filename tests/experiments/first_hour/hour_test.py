# SPDX-License-Identifier: Apache-2.0
"""The budget, resuming, errors, and the short form in its smallest size."""

import functools
import os
import subprocess
import sys
import time

import jax.numpy as jnp
import pytest

from attnres_jax import config as config_lib
from attnres_jax import csv_rows
from experiments.first_hour import budget
from experiments.first_hour import checks
from experiments.first_hour import report
from experiments.first_hour import rows as rows_lib
from experiments.first_hour import run
from experiments.first_hour import timing
from tests import tiny_run

FACTS = {
  "hardware": "1 x TPU v5", "commit": "abc", "jax": "0.10.2", "form": "full",
  "platform": "tpu", "kind": "TPU v5", "system": "Linux", "python": "3.11",
  "flax": "0.12", "date": "2026-01-01",
}  # fmt: skip


class Here:
  """Runs tasks in this process, by a clock that they move."""

  def __init__(self):
    self.now, self.renewed = 0.0, 0

  def run(self, call, seconds):
    status, result = budget.in_process(call)
    if status != rows_lib.OK:
      raise budget.Failure(result, status)
    took = result.pop() if isinstance(result, list) else 0.0
    self.now += min(took, seconds)
    if took > seconds:
      raise budget.Failure(f"ended after {seconds:.0f} s", rows_lib.SKIPPED)
    return result

  def renew(self):
    self.renewed += 1

  def clock(self):
    return self.now


def task(name, seconds, takes=None, *, call=None, **options):
  """A task with one row, after which the clock has moved."""
  took = seconds if takes is None else takes
  call = call or (lambda: [rows_lib.make(name, measured=1.0), took])
  return budget.Task("steps", name, call, seconds, **options)


def go(tasks, path, seconds, facts=FACTS):
  here = Here()
  ledger = rows_lib.Ledger(path, facts)
  budget.run(
    tasks, ledger, here, seconds, clock=here.clock, tell=lambda line: None
  )
  rows = csv_rows.read(path)
  return here, {row["task"]: row for row in rows}


def test_what_does_not_fit_is_skipped_and_shorter_tasks_still_run(tmp_path):
  tasks = [task("a", 30), task("b", 50), task("c", 10)]
  path = tmp_path / "rows.csv"
  here, rows = go(tasks, path, 60)
  assert here.now == 40
  assert [rows[n]["status"] for n in "abc"] == ["ok", "skipped", "ok"]
  assert rows["b"]["reason"].startswith("takes about 50 s, and 30 s were left")
  # A rerun has the time again, and repeats nothing.
  here, rows = go(tasks, path, 60)
  assert here.now == 50
  assert [rows[n]["status"] for n in "abc"] == ["ok", "ok", "ok"]
  assert go(tasks, path, 60)[0].now == 0


def test_a_task_beyond_its_limit(tmp_path):
  late = task("late", 10, 1000, most_seconds=20)
  # Of a second one, the hour ends before its own limit.
  cut = task("cut", 10, 1000, most_seconds=90)
  here, rows = go([late, cut], tmp_path / "rows.csv", 60)
  assert here.now == 60
  assert (rows["late"]["status"], rows["cut"]["status"]) == (
    "failed",
    "skipped",
  )
  here, rows = go([late, cut], tmp_path / "rows.csv", 200)
  assert here.now == 90 and rows["cut"]["status"] == "failed"


def test_errors_are_rows_and_the_others_run(tmp_path):
  def fails():
    yield rows_lib.make("never kept", measured=1.0)
    raise MemoryError("RESOURCE_EXHAUSTED:\n  9 GiB")

  def lacks():
    raise NotImplementedError("kda has no pallas_gpu backend")

  tasks = [
    task("fails", 1, call=fails), task("lacks", 1, call=lacks),
    task("alone", 1, alone=True),
  ]  # fmt: skip
  path = tmp_path / "rows.csv"
  here, rows = go(tasks, path, 60)
  assert here.renewed == 1
  assert rows["fails"]["status"] == "failed"
  assert rows["fails"]["reason"] == "MemoryError: RESOURCE_EXHAUSTED: 9 GiB"
  assert rows["lacks"]["status"] == "not here"
  assert rows["alone"]["status"] == "ok"
  page = report.render(csv_rows.read(path), [], FACTS | {"form": "full"})
  assert "RESOURCE_EXHAUSTED: 9 GiB" in page


@pytest.mark.parametrize("name", rows_lib.SAME)
def test_rows_of_another_device_or_commit_are_refused(tmp_path, name):
  path = tmp_path / "rows.csv"
  go([task("a", 1)], path, 60)
  with pytest.raises(config_lib.ConfigError, match=f"{name} '.*--out"):
    rows_lib.Ledger(path, FACTS | {name: "other"})


def test_numbers_beside_limit_and_estimate():
  row = rows_lib.make("x", measured=3.0, limit=2.0, estimate=4.0, unit="us")
  assert (row["to_limit"], row["above_limit"]) == ("1.500", "1")
  assert (row["to_estimate"], row["off_estimate"]) == ("0.750", "-1")


def test_loops_repeat_a_function():
  found = timing.repeated(lambda x, y: {"sum": x + y, "x": x * 2})
  x, y = jnp.arange(3.0), jnp.ones((1,))
  assert list(found(3, x, y)["sum"]) == [1, 2, 3]
  assert list(found(0, x, y)["x"]) == [0, 0, 0]
  assert timing.least_bytes(lambda x, y: x + y, (x, y)) == 12 + 4 + 12


def test_a_process_that_ends_or_hangs_is_replaced():
  device = budget.Process(functools.partial(os.nice, 0))
  try:
    with pytest.raises(budget.Failure, match="exit status 3"):
      device.run(functools.partial(os._exit, 3), 300)
    assert device.run(os.getpid, 300) != os.getpid()
    with pytest.raises(budget.Failure, match="ended after 0 s") as caught:
      device.run(functools.partial(time.sleep, 60), 0.1)
    assert caught.value.status == rows_lib.SKIPPED
  finally:
    device.close()


def test_a_wrong_kernel_is_beyond_its_tolerance(monkeypatch):
  (row,) = checks.check("depth_merge", "xla", "bfloat16", short=True)
  assert 0 < float(row["to_limit"]) < 1
  problem = checks.OPS["depth_merge"]

  def wrong(dtype, short):
    run, arrays = problem.build(dtype, short)

    def almost(implementation, *arrays):
      results = dict(run(implementation, *arrays))
      if implementation == "xla":
        results["dlse"] = results["dlse"] * 1.001
      return results

    return almost, arrays

  monkeypatch.setitem(checks.OPS, "depth_merge", checks._Op(wrong))
  (row,) = checks.check("depth_merge", "xla", "bfloat16", short=True)
  assert float(row["to_limit"]) > 1 and row["reason"].endswith("dlse")


class OneProcess(Here):
  """Runs calls of the command here."""

  def run(self, call, seconds):
    status, result = budget.in_process(call)
    if status != rows_lib.OK:
      raise budget.Failure(result, status)
    return result


def test_the_short_form_decides_nothing(tmp_path, capsys, monkeypatch):
  """Rows, page and verdicts, with the cheapest operators."""
  few = {name: checks.OPS[name] for name in ("depth_merge", "depth_read")}
  monkeypatch.setattr(checks, "OPS", few)
  found = run.hour(OneProcess(), tmp_path, 600, (checks.PART,))
  assert all(one.outcome == "not decided" for one in found)
  rows = csv_rows.read(tmp_path / "rows.csv")
  assert {row["form"] for row in rows} == {"short"}
  assert len(rows) == 2 * len(few)
  assert all(float(row["to_limit"]) <= 1 for row in rows)
  page = (tmp_path / "page.html").read_text()
  assert "decides no claim about accelerators" in page
  assert "<script" not in page and "http" not in page.partition("<body>")[2]
  assert "not decided" in capsys.readouterr().out


@pytest.mark.slow
def test_the_whole_short_form(tmp_path):
  """Every part, in the processes of the command."""
  command = [sys.executable, "-m", "experiments.first_hour", "--platform=cpu"]
  environment = os.environ | tiny_run.environment()
  subprocess.run(
    [*command, f"--out={tmp_path}"],
    check=True,
    cwd=tiny_run.ROOT,
    env=environment,
  )
  rows = csv_rows.read(tmp_path / "rows.csv")
  assert {row["part"] for row in rows} == set(run.PARTS)
  bad = [row for row in rows if row["status"] in ("failed", "skipped")]
  # A busy machine may be too noisy for times of microseconds.
  assert all("short for the clock" in row["reason"] for row in bad)
  assert any(row["name"] == "trace" and row["measured"] for row in rows)


@pytest.mark.parametrize(
  "flag,words",
  (("--minutes=0", "--minutes: got 0.0"), ("--parts=ships", "--parts: got")),
)
def test_bad_arguments(flag, words, capsys, tmp_path):
  assert run.main([flag, f"--out={tmp_path}"]) == 2
  assert words in capsys.readouterr().err

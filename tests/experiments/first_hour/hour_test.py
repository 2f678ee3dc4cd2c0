# SPDX-License-Identifier: Apache-2.0
"""Resuming, errors, checks that can fail, and the command on a CPU."""

import os
import pathlib
import time

import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import csv_rows
from attnres_kernels import problems
from experiments.first_hour import __main__ as command
from experiments.first_hour import measure
from experiments.first_hour import peers
from experiments.first_hour import timing
from tests.fuzz import laws


def go(monkeypatch, folder, calls):
  """The rows by task, after a run of these tasks."""
  made = [measure.Task("rates", name, call) for name, call in calls.items()]
  monkeypatch.setattr(measure, "tasks", lambda *_: made)
  measure.run(folder, ["rates"], True, time.monotonic() + 1e6)
  return {row["task"]: row for row in csv_rows.read(folder / "rows.csv")}


def ok(value=1.0):
  return lambda: iter([measure.row("x", measured=value)])


def fails(error):
  def call():
    raise error

  return call


def test_errors_are_rows_and_later_tasks_run(monkeypatch, tmp_path):
  calls = {
    "a": ok(),
    "b": fails(RuntimeError("out of\n memory")),
    "c": fails(NotImplementedError("no kernel")),
    "d": ok(2.0),
  }
  rows = go(monkeypatch, tmp_path, calls)
  assert [row["status"] for row in rows.values()] == [
    measure.OK, measure.FAILED, measure.NOT_HERE, measure.OK,
  ]  # fmt: skip
  assert rows["b"]["reason"] == "RuntimeError: out of memory"
  # A rerun repeats nothing, and runs what is new.
  again = go(monkeypatch, tmp_path, calls | {"a": fails(Exception), "e": ok()})
  assert again.keys() == {*"abcde"} and again["a"] == rows["a"]


def test_the_task_at_which_a_process_died_has_failed(monkeypatch, tmp_path):
  def dies():
    rows = csv_rows.read(tmp_path / "rows.csv")
    assert rows[-1]["status"] == measure.BEGUN
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    go(monkeypatch, tmp_path, {"a": ok(), "b": dies, "c": ok()})
  # With and without a later task.
  rows = go(monkeypatch, tmp_path, {"a": ok(), "b": ok()})
  assert rows["b"]["status"] == measure.FAILED
  rows = go(monkeypatch, tmp_path, {"a": ok(), "b": ok(), "c": ok()})
  assert [rows[name]["status"] for name in "abc"] == [
    measure.OK, measure.FAILED, measure.OK,
  ]  # fmt: skip
  assert "ended" in rows["b"]["reason"]


def test_the_task_at_the_end_of_the_time_has_not_failed(monkeypatch, tmp_path):
  def dies():
    raise KeyboardInterrupt

  made = [measure.Task("rates", "a", ok()), measure.Task("rates", "b", dies)]
  monkeypatch.setattr(measure, "tasks", lambda *_: made)
  with pytest.raises(KeyboardInterrupt):
    measure.run(tmp_path, ["rates"], True, time.monotonic() + 100)
  rows = csv_rows.read(tmp_path / "rows.csv")
  assert [row["status"] for row in rows] == [measure.OK, measure.CUT]
  # No time at all: it is left, and has no row.
  rows, left = measure.run(tmp_path, ["rates"], True, 0.0)
  assert [row["task"] for row in rows] == ["a"] and left == 1
  assert csv_rows.read(tmp_path / "rows.csv") == rows
  assert "b" in go(monkeypatch, tmp_path, {"a": ok(), "b": ok()})


@pytest.mark.parametrize("name", measure.SAME)
def test_rows_of_another_device_or_commit_are_refused(
  monkeypatch, tmp_path, name
):
  go(monkeypatch, tmp_path, {"a": ok()})
  rows = csv_rows.read(tmp_path / "rows.csv")
  csv_rows.write(tmp_path / "rows.csv", [row | {name: "z"} for row in rows])
  with pytest.raises(config_lib.ConfigError, match=f"rows with {name} 'z'"):
    go(monkeypatch, tmp_path, {"b": ok()})


def test_loops_repeat_a_function():
  looped = timing.repeated(lambda x, y: {"sum": x + y, "x": x * 2})
  x, y = jnp.arange(3.0), jnp.ones((1,))
  assert list(looped(3, x, y)["sum"]) == [1, 2, 3]
  assert list(looped(0, x, y)["x"]) == [0, 0, 0]
  assert timing.least_bytes(lambda x, y: x + y, (x, y)) == 12 + 4 + 12


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["depth_attention", "depth_merge_norm"])
def test_checks_pass_and_can_fail(name, dtype, monkeypatch):
  operator = problems.OPERATORS[name]
  (row,) = measure.check(name, operator.short, dtype, "xla")
  assert row["status"] == measure.OK and 0 < float(row["measured"]) <= float(
    row["limit"]
  )

  def wrong(shape, dtype, draw):
    problem = operator.build(shape, dtype, draw)

    def almost(implementation, *arrays):
      *values, last = problem.function(implementation, *arrays)
      factor = 1.02 if implementation == "xla" else 1.0
      return *values, last * jnp.asarray(factor, last.dtype)

    return problem._replace(function=almost)

  monkeypatch.setitem(problems.OPERATORS, name, operator._replace(build=wrong))
  (row,) = measure.check(name, operator.short, dtype, "xla")
  assert row["status"] == measure.FAILED


@pytest.mark.more
def test_the_command(tmp_path, capsys, monkeypatch):
  monkeypatch.setenv("PYTHONPATH", f".{os.pathsep}kernels")
  monkeypatch.chdir(pathlib.Path(__file__).parents[3])
  flags = ["--platform=cpu", f"--out={tmp_path}", "--minutes=5"]
  assert command.main([*flags, "--parts=rates"]) == 0
  out = capsys.readouterr().out
  assert "2 rows, 0 failed" in out
  text = (tmp_path / "rows.csv").read_text()
  assert "bfloat16 products" in text and "TFLOP/s" in text


@pytest.mark.slow
def test_the_whole_short_form(tmp_path, monkeypatch):
  monkeypatch.setenv("PYTHONPATH", f".{os.pathsep}kernels")
  monkeypatch.chdir(pathlib.Path(__file__).parents[3])
  assert command.main(["--platform=cpu", f"--out={tmp_path}"]) == 0
  rows = csv_rows.read(tmp_path / "rows.csv")
  assert not [row for row in rows if row["status"] == measure.FAILED]
  names = {task.name for task in measure.tasks("cpu", True, tmp_path)}
  assert {row["task"] for row in rows} == names


@pytest.mark.parametrize(
  "flag,words",
  [
    ("--minutes=0", "--minutes: got 0"),
    ("--parts=checks,x", "--parts: got 'x'"),
  ],
)
def test_bad_arguments(flag, words, tmp_path):
  status, _, err = laws.outcome(
    command.main, [flag, f"--out={tmp_path / 'new'}"]
  )
  assert status == 2 and words in err
  assert not (tmp_path / "new").exists()


@pytest.mark.needs("torch")
def test_pytorch_agrees():
  operator = problems.OPERATORS["depth_attention"]
  problem = operator.build(operator.short, "float32", problems.draws(0))
  arguments = problems.arguments(problem)
  exact = problems.results(
    problem, "reference", *arguments[:-1], 0 * arguments[-1]
  )
  read = peers.PEERS["torch.compile"](operator.short.width)
  _, results = peers.program(read, problem.arrays, arguments[-2])
  out, *gradients = results()
  expected = [exact["result 0"], *(exact[f"d{n}"] for n in problem.names)]
  for got, right in zip((out, *gradients), expected, strict=True):
    np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-4)


def test_a_missing_peer_is_a_row(monkeypatch):
  def missing(width):
    raise ImportError("no such package")

  monkeypatch.setattr(peers, "PEERS", {"peer": missing})
  fixed = timing.Seconds(1.0, 1.0, 1.0)
  monkeypatch.setattr(timing, "of_calls", lambda *_: fixed)
  shape = problems.OPERATORS["depth_attention"].short
  _, row = measure.operators("depth_attention", "forward", shape, "xla", True)
  assert (row["arm"], row["status"]) == ("peer", measure.NOT_HERE)
  assert "no such package" in row["reason"]

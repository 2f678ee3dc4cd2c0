# SPDX-License-Identifier: Apache-2.0
"""Resuming, errors, checks that can fail, and the command on a CPU."""

import functools
import os
import pathlib

import jax
import jax.numpy as jnp
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import csv_rows
from attnres_kernels import problems
from attnres_kernels.stream_mix import shapes as stream_shapes
from experiments.first_hour import measure
from experiments.first_hour import run
from experiments.first_hour import timing


def go(monkeypatch, folder, calls):
  """The rows by task, after a run of these tasks."""
  made = [measure.Task("rates", name, call) for name, call in calls.items()]
  monkeypatch.setattr(measure, "tasks", lambda *_: made)
  measure.run(folder, ["rates"], True)
  return {row["task"]: row for row in csv_rows.read(folder / "rows.csv")}


def one(value=1.0):
  return lambda: iter([measure.row("x", measured=value)])


def fails(error):
  def call():
    raise error

  return call


def test_errors_are_rows_and_later_tasks_run(monkeypatch, tmp_path):
  calls = {
    "a": one(),
    "b": fails(RuntimeError("out of\n memory")),
    "c": fails(NotImplementedError("no kernel")),
    "d": one(2.0),
  }
  rows = go(monkeypatch, tmp_path, calls)
  assert [row["status"] for row in rows.values()] == [
    measure.OK, measure.FAILED, measure.NOT_HERE, measure.OK,
  ]  # fmt: skip
  assert rows["b"]["reason"] == "RuntimeError: out of memory"
  # A rerun repeats nothing, and runs what is new.
  again = go(monkeypatch, tmp_path, calls | {"a": fails(Exception), "e": one()})
  assert again.keys() == {*"abcde"} and again["a"] == rows["a"]


def test_the_task_at_which_a_process_died_has_failed(monkeypatch, tmp_path):
  def dies():
    rows = csv_rows.read(tmp_path / "rows.csv")
    assert rows[-1]["status"] == measure.BEGUN
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    go(monkeypatch, tmp_path, {"a": one(), "b": dies, "c": one()})
  # With and without a later task.
  rows = go(monkeypatch, tmp_path, {"a": one(), "b": one()})
  assert rows["b"]["status"] == measure.FAILED
  rows = go(monkeypatch, tmp_path, {"a": one(), "b": one(), "c": one()})
  assert [rows[name]["status"] for name in "abc"] == [
    measure.OK, measure.FAILED, measure.OK,
  ]  # fmt: skip
  assert "ended" in rows["b"]["reason"]


def test_the_task_at_the_end_of_the_time_has_not_failed(tmp_path, capsys):
  rows = [
    measure.row(task, status=status) | {"task": task}
    for task, status in (("a", measure.OK), ("b", measure.BEGUN))
  ]
  csv_rows.write(tmp_path / "rows.csv", rows)
  run._hour(tmp_path, run.make_parser().parse_args([]), end=0.0)
  assert "to continue\n1 rows, 0 failed" in capsys.readouterr().out
  assert [row["task"] for row in csv_rows.read(tmp_path / "rows.csv")] == ["a"]


@pytest.mark.parametrize("name", measure.SAME)
def test_rows_of_another_device_or_commit_are_refused(
  monkeypatch, tmp_path, name
):
  go(monkeypatch, tmp_path, {"a": one()})
  rows = csv_rows.read(tmp_path / "rows.csv")
  csv_rows.write(tmp_path / "rows.csv", [row | {name: "z"} for row in rows])
  with pytest.raises(config_lib.ConfigError, match=f"rows with {name} 'z'"):
    go(monkeypatch, tmp_path, {"b": one()})


def test_numbers_beside_limit_and_estimate():
  row = measure.row("x", measured=3.0, limit=2.0, estimate=4.0, unit="ms")
  assert (row["to_limit"], row["above_limit"]) == ("1.500", "1")
  assert (row["to_estimate"], row["off_estimate"]) == ("0.750", "-1")
  assert measure.row("x", measured=3.0, estimate=0.0)["estimate"] == ""


def test_loops_repeat_a_function():
  found = timing.repeated(lambda x, y: {"sum": x + y, "x": x * 2})
  x, y = jnp.arange(3.0), jnp.ones((1,))
  assert list(found(3, x, y)["sum"]) == [1, 2, 3]
  assert list(found(0, x, y)["x"]) == [0, 0, 0]
  assert timing.least_bytes(lambda x, y: x + y, (x, y)) == 12 + 4 + 12


def test_operators_are_timed_as_the_estimates_count_them(monkeypatch):
  """Gradients with their forward pass, and a sublayer's output in bfloat16."""
  timed = []

  def of_calls(function, arrays, rounds):
    timed.append((jax.eval_shape(function, *arrays), arrays))
    return timing.Seconds(1.0, 1.0, 1.0)

  monkeypatch.setattr(timing, "of_calls", of_calls)
  monkeypatch.setattr(timing, "bandwidth", lambda: (1.0, "published"))
  streams = stream_shapes.Shape("tiny", "float32", 8, 16, 2, 8)
  for name, way, shape in (
    ("rms_norm", "backward", problems.OPERATORS["rms_norm"].short),
    ("stream_mix", "forward", streams),
  ):
    list(measure.time_operator(name, way, shape, "xla", True))
  (results, _), (_, arrays) = timed
  # Without the value, a compiler would leave out the forward pass.
  assert results.keys() == {"result 0", "dx", "dgain"}
  assert [x.dtype for x in arrays[:3]] == ["float32", "float32", "bfloat16"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["depth_attention", "depth_merge_norm"])
def test_checks_pass_and_can_fail(name, dtype, monkeypatch):
  operator = problems.OPERATORS[name]
  (row,) = measure.check(name, operator.short, dtype, "xla")
  assert row["status"] == measure.OK and 0 < float(row["to_limit"]) <= 1

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
  assert run.main([*flags, "--parts=rates"]) == 0
  out = capsys.readouterr().out
  assert "rates of the device" in out and "0 failed" in out
  text = (tmp_path / "rows.csv").read_text()
  assert "bfloat16 products" in text and "TFLOP/s" in text


@pytest.mark.slow
def test_the_whole_short_form(tmp_path, monkeypatch):
  monkeypatch.setenv("PYTHONPATH", f".{os.pathsep}kernels")
  monkeypatch.chdir(pathlib.Path(__file__).parents[3])
  assert run.main(["--platform=cpu", f"--out={tmp_path}"]) == 0
  rows = csv_rows.read(tmp_path / "rows.csv")
  assert not [row for row in rows if row["status"] == measure.FAILED]
  known = {task.name for task in measure.tasks("cpu", True, tmp_path)}
  assert {row["task"] for row in rows} == known


@pytest.mark.parametrize(
  "flag,words",
  [
    ("--minutes=0", "--minutes: got 0"),
    ("--parts=rates,x", "--parts: got 'x'"),
  ],
)
def test_bad_arguments(flag, words, capsys, tmp_path):
  assert run.main([flag, f"--out={tmp_path / 'new'}"]) == 2
  assert words in capsys.readouterr().err
  assert not (tmp_path / "new").exists()


def test_cotangents_are_rounded_where_no_compiler_drops_it():
  """XLA for GPUs drops a cast to bfloat16 and back: other gradients."""
  problem = problems.Problem(lambda _, x: (x,), (jnp.ones(64),), ("x",))
  compute = functools.partial(problems.results, problem, "xla")
  assert "reduce_precision" in str(jax.make_jaxpr(compute)(*problem.arrays))
  gradient = compute(*problem.arrays)["dx"]
  rounded = gradient.astype(jnp.bfloat16).astype(jnp.float32)
  assert jnp.array_equal(gradient, rounded)

# SPDX-License-Identifier: Apache-2.0
"""Rows survive kills and resumes, and reach every sink."""

import io
import json
import random
import subprocess
import sys
import time

from etils import epath
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.train import metrics
from attnres_jax.train import sinks
from tests import tiny_run


def _config(**log):
  return config_lib.RunConfig(log=config_lib.LogConfig(**log))


def _steps(path, split="train"):
  return [row["step"] for row in metrics.read_rows(path, split)]


def test_rows_are_on_disk_before_close(tmp_path):
  writer = metrics.make_writer(tmp_path, _config())
  norms = np.array([1.0, np.inf])
  writer.write(1, "train", loss=np.float32(2.5), norms=norms, z=jnp.nan)
  line = (tmp_path / "metrics.jsonl").read_text()
  assert json.loads(line) == {
      "step": 1, "split": "train", "loss": 2.5, "norms": [1.0, None],
      "z": None,
  }  # fmt: skip
  writer.close()


@pytest.mark.parametrize(
  "line", ["{", "7", "[]", '{"step": 1}', '{"step": "1", "split": "train"}']
)
def test_a_damaged_line_is_named(tmp_path, line):
  path = tmp_path / "metrics.jsonl"
  path.write_text(
    '{"step": 1, "split": "train"}\n' + line + "\n"
    '{"step": 2, "split": "train"}\n'
  )
  with pytest.raises(metrics.MetricsError) as error:
    metrics.read_rows(tmp_path)
  assert "\n" not in str(error.value) and f"{path}:2: not a" in str(error.value)
  named = []
  rows = metrics.read_rows(tmp_path, on_damage=named.append)
  assert [row["step"] for row in rows] == [1, 2]
  assert len(named) == 1 and f"{path}:2: not a row" in named[0]


def _rows_at_random(rng):
  """Rows of a run that was killed and resumed a few times."""
  rows, step = [], 0
  for _ in range(rng.randint(1, 5)):
    rows.append({"step": step, "split": "event", "event": "resume"})
    for _ in range(rng.randint(1, 8)):
      step += 1
      rows.append({"step": step, "split": "train", "loss": rng.random()})
      if rng.random() < 0.3:
        rows.append({"step": step, "split": "validation", "loss": 1.0})
      if rng.random() < 0.3:
        rows.append({"step": step, "split": "event", "event": "checkpoint"})
  return rows


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("tail_bytes", [40, 1 << 20])
def test_the_end_of_the_file_is_enough(tmp_path, monkeypatch, seed, tail_bytes):
  """A resumption reads back from the end, and keeps what a filter keeps."""
  monkeypatch.setattr(metrics, "_TAIL_BYTES", tail_bytes)
  rng = random.Random(seed)
  rows = _rows_at_random(rng)
  text = "".join(json.dumps(row) + "\n" for row in rows)
  path = tmp_path / "metrics.jsonl"
  path.write_text(text + rng.choice(["", '{"step": 99, "spl', "garbage\n"]))
  step = rng.randint(0, rows[-1]["step"] + 1)
  past = [row for row in rows if row["step"] > step]
  not_events = [
    row["step"] for row in rows
    if row["split"] != "event" and row["step"] <= step
  ]  # fmt: skip
  tail = metrics.read_tail(tmp_path, step)
  assert tail.last_step == max(not_events, default=0)
  assert [row for row in past if row not in tail.rows] == []
  assert rows[len(rows) - len(tail.rows) :] == tail.rows
  sink = metrics.JsonlSink(epath.Path(path), keep_through=step)
  sink.write({"step": 100, "split": "train"})
  sink.close()
  left = [row for row in rows if row["split"] == "event" or row["step"] <= step]
  assert metrics.read_rows(tmp_path)[:-1] == left


def test_a_resumption_without_lost_rows_leaves_the_file(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1, "split": "train"}\n')
  before = path.stat().st_ino
  metrics.JsonlSink(epath.Path(path), keep_through=1).close()
  assert path.stat().st_ino == before


def test_lines_of_the_console():
  out = io.StringIO()
  console = sinks.Console(10, file=out, seconds=1e9)
  for step in range(1, 11):
    console.write({"step": step, "split": "train", "loss": 1.23456})
  console.write({"step": 10, "split": "validation", "loss": 2.0})
  console.write({"step": 10, "split": "depth", "rms": [1.0]})
  # Causes quote what damaged files hold.
  console.write({"step": 10, "split": "event", "event": "x", "c": "\x1b[2J"})
  assert out.getvalue().splitlines() == [
    "step 1/10 train: loss 1.235",
    "step 10/10 train: loss 1.235",
    "step 10/10 validation: loss 2",
    "step 10/10 x: c \ufffd[2J",
  ]


def test_lines_say_how_long_is_left():
  out = io.StringIO()
  console = sinks.Console(200, file=out)
  row = {"step": 20, "split": "train", "loss": 1.0, "step_seconds": 20.5}
  console.write(row)
  assert out.getvalue().rstrip().endswith("step_seconds 20.5, left 1:01:30")


def test_tensorboard_files(tmp_path):
  writer = metrics.make_writer(tmp_path, _config(tensorboard=True))
  writer.write(1, "train", loss=1.0, norms=[1.0, 2.0], note="text")
  writer.close()
  (file,) = (tmp_path / "tensorboard").iterdir()
  content = file.read_bytes()
  for tag in (b"train/loss", b"train/norms/00", b"train/norms/01"):
    assert tag in content
  assert b"note" not in content


@pytest.mark.needs("wandb")
@pytest.mark.filterwarnings("ignore")
def test_wandb_has_every_row_under_one_id(tmp_path, monkeypatch):
  """Steps are values: rows of a step before the newest one would be ignored."""
  import wandb

  logged = []
  monkeypatch.setattr(wandb.Run, "log", lambda _, row: logged.append(row))
  # The real package writes to a folder and needs no network.
  monkeypatch.setenv("WANDB_MODE", "offline")
  monkeypatch.setenv("WANDB_DIR", str(tmp_path / "wandb"))
  monkeypatch.setenv("WANDB_SILENT", "true")
  (tmp_path / "wandb").mkdir()
  config = _config(wandb_project="p")
  run = tmp_path / "run"
  run.mkdir()
  for step in (5, 10):
    writer = metrics.make_writer(run, config, resume_step=step - 5)
    writer.write(step, "train", loss=1.0 / step)
    # The event of an asynchronous save is of an earlier step.
    writer.event(step - 4, "checkpoint", blocked_seconds=0.5)
    writer.write(step + 1, "train", loss=2.0)
    writer.close()
    time.sleep(1.1)  # wandb's folders are named by the second.
  ids = {path.name.split("-")[-1] for path in tmp_path.rglob("*.wandb")}
  name = (run / "wandb_run_id.txt").read_text()
  assert ids == {f"{name}.wandb"}
  assert [row["training_step"] for row in logged] == [5, 1, 6, 10, 6, 11]
  assert [row.get("event/blocked_seconds") for row in logged][1::3] == [0.5] * 2
  assert [row.get("train/loss") for row in logged][::3] == [0.2, 0.1]


@pytest.mark.needs("wandb")
def test_a_logger_that_fails_is_one_line(tmp_path):
  # Without a terminal, a key and a network.
  program = """
import dataclasses, sys
from attnres_jax import config
from attnres_jax.train import metrics
c = config.build_run_config(config.default_config())
log = dataclasses.replace(c.log, wandb_project="p")
writer = metrics.make_writer(sys.argv[1], dataclasses.replace(c, log=log))
writer.write(1, "train", loss=1.0)
writer.close()
"""
  home = {"HOME": tmp_path, "WANDB_DIR": tmp_path, "NETRC": tmp_path / "none"}
  environment = tiny_run.environment() | {k: str(v) for k, v in home.items()}
  environment |= {"WANDB_BASE_URL": "http://127.0.0.1:9"}
  environment.pop("WANDB_API_KEY", None)
  process = subprocess.run(
    [sys.executable, "-c", program, str(tmp_path)], env=environment,
    stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    check=False,
  )  # fmt: skip
  assert process.returncode == 0, process.stderr
  lines = [x for x in process.stderr.splitlines() if x.startswith("warning:")]
  assert len(lines) == 1, process.stderr
  assert lines[0].startswith("warning: a logger fails")
  assert _steps(tmp_path) == [1]


def test_a_sink_that_fails_later_is_dropped(tmp_path, capsys):
  class Broken:
    def write(self, row):
      raise RuntimeError("on purpose")

  jsonl = metrics.JsonlSink(epath.Path(tmp_path / metrics.FILE), 0)
  writer = metrics.Writer([jsonl, Broken()])
  for step in (1, 2):
    writer.write(step, "train", loss=1.0)
  writer.close()
  assert _steps(tmp_path) == [1, 2]
  assert capsys.readouterr().err.count("warning: Broken fails") == 1
  jsonl.write = Broken().write
  with pytest.raises(RuntimeError, match="on purpose"):
    metrics.Writer([jsonl]).write(3, "train")


@pytest.mark.parametrize(
  "field, value, package",
  [("wandb_project", "p", "wandb"), ("tensorboard", True, "tensorboardX")],
)
def test_missing_package_is_named(monkeypatch, field, value, package):
  monkeypatch.setitem(sys.modules, package, None)
  with pytest.raises(config_lib.ConfigError) as error:
    sinks.check_available(config_lib.LogConfig(**{field: value}))
  assert f"config.log.{field}" in str(error.value)
  assert f"pip install {package}" in str(error.value)

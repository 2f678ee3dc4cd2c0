# SPDX-License-Identifier: Apache-2.0
"""Rows survive kills and resumes, and reach every sink."""

import dataclasses
import io
import json
import random
import sys
import types

from etils import epath
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import metrics


def _config(**log):
  return config_lib.RunConfig(log=config_lib.LogConfig(**log))


def _steps(path, split="train"):
  return [row["step"] for row in metrics.read_rows(path, split)]


def test_rows_are_on_disk_before_close(tmp_path):
  writer = metrics.make_writer(tmp_path, _config())
  writer.write(1, "train", loss=np.float32(2.5), norms=jnp.arange(3))
  line = (tmp_path / "metrics.jsonl").read_text()
  assert json.loads(line) == {
      "step": 1, "split": "train", "loss": 2.5, "norms": [0, 1, 2],
  }  # fmt: skip
  writer.close()


def test_not_finite_becomes_null(tmp_path):
  writer = metrics.make_writer(tmp_path, _config())
  writer.write(1, "train", loss=jnp.nan, norms=np.array([1.0, np.inf]))
  writer.close()
  (row,) = metrics.read_rows(tmp_path)
  assert row["loss"] is None and row["norms"] == [1.0, None]


def test_resume_drops_later_rows_and_keeps_events(tmp_path):
  writer = metrics.make_writer(tmp_path, _config())
  for step in range(1, 8):
    writer.write(step, "train", loss=1.0)
  writer.event(7, "stopped")
  writer.close()
  writer = metrics.make_writer(tmp_path, _config(), resume_step=4)
  writer.write(5, "train", loss=1.0)
  writer.close()
  assert _steps(tmp_path) == [1, 2, 3, 4, 5]
  assert _steps(tmp_path, "event") == [7]


def test_a_line_cut_short_is_dropped(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1, "split": "train"}\n{"step": 2, "spl')
  writer = metrics.make_writer(tmp_path, _config(), resume_step=2)
  writer.write(2, "train")
  writer.close()
  assert _steps(tmp_path) == [1, 2]


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
  kept = [row for row in rows if row["split"] == "event" or row["step"] <= step]
  assert metrics.read_rows(tmp_path)[:-1] == kept


def test_a_resumption_without_lost_rows_leaves_the_file(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1, "split": "train"}\n')
  before = path.stat().st_ino
  metrics.JsonlSink(epath.Path(path), keep_through=1).close()
  assert path.stat().st_ino == before


def test_object_store_file_is_written_at_flush(tmp_path):
  # An object store has no append; it is enough that the path looks like one.
  class Store(type(epath.Path(tmp_path))):
    def __str__(self):
      return "store://" + super().__str__()

  path = Store(tmp_path / "metrics.jsonl")
  path.write_text('{"step": 1, "split": "train"}\n')
  sink = metrics.JsonlSink(path, keep_through=1)
  sink.write({"step": 2, "split": "train"})
  assert _steps(tmp_path) == [1]
  sink.flush()
  assert _steps(tmp_path) == [1, 2]
  sink.write({"step": 3, "split": "train"})
  sink.close()
  assert _steps(tmp_path) == [1, 2, 3]


def test_other_processes_write_nothing(tmp_path):
  writer = metrics.make_writer(tmp_path, _config(), primary=False)
  writer.write(1, "train", loss=1.0)
  writer.close()
  assert not list(tmp_path.iterdir())


def test_plain_lines_without_a_terminal():
  out = io.StringIO()
  console = metrics.Console(10, 0, file=out, seconds=1e9)
  for step in range(1, 11):
    console.write({"step": step, "split": "train", "loss": 1.23456})
  console.write({"step": 10, "split": "validation", "loss": 2.0})
  console.write({"step": 10, "split": "depth", "rms": [1.0]})
  assert out.getvalue().splitlines() == [
    "step 1/10 train: loss 1.235",
    "step 10/10 train: loss 1.235",
    "step 10/10 validation: loss 2",
  ]


def test_progress_bar_on_a_terminal():
  class Terminal(io.StringIO):
    def isatty(self):
      return True

  out = Terminal()
  console = metrics.Console(4, 2, file=out)
  console.write({"step": 3, "split": "train", "loss": 1.5})
  console.write({"step": 4, "split": "train", "loss": 1.25})
  console.write({"step": 4, "split": "validation", "loss": 2.0})
  console.close()
  assert "4/4" in out.getvalue() and "loss 1.25" in out.getvalue()
  assert "step 4/4 validation: loss 2" in out.getvalue()


def test_tensorboard_files(tmp_path):
  writer = metrics.make_writer(tmp_path, _config(tensorboard=True))
  writer.write(1, "train", loss=1.0, norms=[1.0, 2.0], note="text")
  writer.close()
  (file,) = (tmp_path / "tensorboard").iterdir()
  content = file.read_bytes()
  for tag in (b"train/loss", b"train/norms/00", b"train/norms/01"):
    assert tag in content
  assert b"note" not in content


def _fake_wandb(log):
  def init(**kwargs):
    log.append(("init", kwargs["project"], kwargs["id"], kwargs["resume"]))
    return types.SimpleNamespace(
      log=lambda scalars, step: log.append((step, scalars)),
      finish=lambda: log.append("finish"),
    )

  util = types.SimpleNamespace(generate_id=lambda: f"id{len(log)}")
  return types.SimpleNamespace(init=init, util=util)


def test_wandb_run_continues_under_its_id(tmp_path, monkeypatch):
  log = []
  monkeypatch.setitem(sys.modules, "wandb", _fake_wandb(log))
  config = _config(wandb_project="p")
  for step in (1, 2):
    writer = metrics.make_writer(tmp_path, config, resume_step=step - 1)
    writer.write(step, "train", loss=1.0)
    writer.close()
  init = ("init", "p", "id0", "allow")
  assert log == [
      init, (1, {"train/loss": 1.0}), "finish",
      init, (2, {"train/loss": 1.0}), "finish",
  ]  # fmt: skip


@pytest.mark.parametrize(
  "field, package",
  [("wandb_project", "wandb"), ("tensorboard", "tensorboardX")],
)
def test_missing_package_is_named(monkeypatch, field, package):
  monkeypatch.setitem(sys.modules, package, None)
  config = config_lib.LogConfig()
  value = {"wandb_project": "p", "tensorboard": True}[field]
  config = dataclasses.replace(config, **{field: value})
  with pytest.raises(config_lib.ConfigError) as error:
    metrics.check_available(config)
  assert f"config.log.{field}" in str(error.value)
  assert f"pip install {package}" in str(error.value)

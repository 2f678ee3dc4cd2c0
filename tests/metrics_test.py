# SPDX-License-Identifier: Apache-2.0
"""Rows survive kills and resumes, and reach every sink."""

import dataclasses
import io
import json
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


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1, "spl\n{"step": 2, "split": "train"}\n')
  with pytest.raises(ValueError, match=r"metrics.jsonl:\d: "):
    metrics.make_writer(tmp_path, _config())


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

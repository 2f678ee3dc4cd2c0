# SPDX-License-Identifier: Apache-2.0
"""Rows survive kills and resumes, and are shown."""

import io
import json
import random

import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax.train import console as console_lib
from attnres_jax.train import metrics


def _steps(path, split="train"):
  return [row["step"] for row in metrics.read_rows(path, split)]


def test_rows_are_on_disk_before_close(tmp_path):
  writer = metrics.Writer(tmp_path)
  norms = np.array([1.0, np.inf])
  writer.write(1, "train", loss=np.float32(2.5), norms=norms, z=jnp.nan)
  line = (tmp_path / "metrics.jsonl").read_text()
  assert json.loads(line) == {
      "step": 1, "split": "train", "loss": 2.5, "norms": [1.0, None],
      "z": None,
  }  # fmt: skip
  writer.close()


def test_a_damaged_line_is_named(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text(
    '{"step": 1, "split": "train"}\n{\n{"step": 2, "split": "train"}\n'
  )
  message = f"^{path}:2: expected JSON.*; restore the file"
  with pytest.raises(metrics.MetricsError, match=message):
    metrics.read_rows(tmp_path)
  rows = metrics.read_rows(tmp_path, lenient=True)
  assert [row["step"] for row in rows] == [1, 2]


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
def test_a_resumption_keeps_events_and_earlier_rows(tmp_path, seed):
  rng = random.Random(seed)
  rows = _rows_at_random(rng)
  text = "".join(json.dumps(row) + "\n" for row in rows)
  path = tmp_path / "metrics.jsonl"
  path.write_text(text + rng.choice(["", '{"step": 99, "spl', "garbage\n"]))
  step = rng.randint(0, rows[-1]["step"] + 1)
  writer = metrics.Writer(tmp_path, step)
  writer.write(100, "train")
  writer.close()
  left = [row for row in rows if row["split"] == "event" or row["step"] <= step]
  assert metrics.read_rows(tmp_path)[:-1] == left


def test_a_resumption_without_lost_rows_leaves_the_file(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1, "split": "train"}\n')
  before = path.stat().st_ino
  metrics.Writer(tmp_path, 1).close()
  assert path.stat().st_ino == before


def test_lines_of_the_console():
  out = io.StringIO()
  console = console_lib.Console(10, file=out, seconds=1e9)
  for step in range(1, 11):
    console.write({"step": step, "split": "train", "loss": 1.23456})
  console.write({"step": 10, "split": "validation", "loss": 2.0})
  console.write({"step": 10, "split": "depth", "rms": [1.0]})
  # Causes quote what damaged files hold.
  console.write({"step": 10, "split": "event", "event": "x", "c": "\x1b[2J"})
  long = console_lib.Console(200, file=out)
  long.write({"step": 20, "split": "train", "step_seconds": 20.5})
  assert out.getvalue().splitlines() == [
    "step 1/10 train: loss 1.235",
    "step 10/10 train: loss 1.235",
    "step 10/10 validation: loss 2",
    "step 10/10 x: c \ufffd[2J",
    "step 20/200 train: step_seconds 20.5, left 1:01:30",
  ]

# SPDX-License-Identifier: Apache-2.0
"""Any damage to the files of a run, finished or interrupted.

What the damage did not touch has to be there afterwards, byte for byte, and a
run that is resumed to its end has to end in the weights of an undisturbed one.
"""

import dataclasses
import json
import pathlib
import shutil

from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from attnres_jax.common import command_line
from attnres_jax.train import checkpoint
from tests import tiny_run
from tests.fuzz import laws

# When one read of a checkpoint fails, orbax closes the event loop of the rest.
# Only pytest reports that.
pytestmark = pytest.mark.filterwarnings(
  "ignore::pytest.PytestUnraisableExceptionWarning"
)

FIELDS = {
    "model.residual.name": "prenorm", "model.residual.num_blocks": 0,
    "mesh.data": 1, "train.steps": 6, "train.eval_every": 3,
    "train.depth_every": 0, "checkpoint.every_steps": 2,
    "checkpoint.asynchronous": False, "optim.schedule": "constant",
}  # fmt: skip
KINDS = ("delete", "empty", "cut", "flip", "swap", "append")

damages = st.lists(
  st.tuples(
    st.sampled_from(KINDS),
    st.integers(0, 2**16),
    st.integers(0, 2**16),
    st.floats(0, 1, exclude_max=True),
  ),
  min_size=1,
  max_size=3,
)


@dataclasses.dataclass
class Runs:
  """Folders to be copied, and what the copies are compared with."""

  fields: dict
  finished: pathlib.Path
  interrupted: pathlib.Path
  weights: list


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  root = tmp_path_factory.mktemp("runs")
  with tiny_run.traced_once():
    fields = FIELDS | tiny_run.corpus(root)
    tiny_run.train_here(root / "finished", fields)
    shutil.copytree(root / "finished", root / "interrupted")
    tiny_run.rewind(root / "interrupted", 4)
    yield Runs(
      fields,
      root / "finished",
      root / "interrupted",
      _weights(root / "finished"),
    )


def _weights(workdir):
  _, model = checkpoint.load_model(workdir)
  return [np.asarray(leaf) for leaf in jax.tree.leaves(model)]


def _copy(source, target):
  shutil.rmtree(target, ignore_errors=True)
  shutil.copytree(source, target)


def _damage(folder, events):
  """Applies damages; returns the names of the files that have changed."""
  before = tiny_run.contents(folder)
  names = list(before)
  for kind, which, other, where in events:
    path, partner = (folder / names[i % len(names)] for i in (which, other))
    data = path.read_bytes() if path.exists() else b""
    at = int(where * len(data))
    if kind == "swap":
      there = partner.read_bytes() if partner.exists() else b""
      partner.write_bytes(data)
      data = there
    elif kind == "flip" and data:
      data = data[:at] + bytes([data[at] ^ 1 << which % 8]) + data[at + 1 :]
    elif kind == "append":
      data += b'{"garbage": ' + bytes([which % 256])
    else:
      data = data[:at] if kind == "cut" else b""
    path.write_bytes(data)
    if kind == "delete":
      path.unlink()
  after = tiny_run.contents(folder)
  return {name for name in names if before[name] != after.get(name)}


def _steps(names):
  return {
    int(name.split("/")[1])
    for name in names
    if name.startswith("checkpoints/") and name.split("/")[1].isdecimal()
  }


def _check_kept(folder, before, touched, original):
  """Untouched checkpoints, and their rows, are what they were."""
  after = tiny_run.contents(folder)
  good = _steps(before) - _steps(touched)
  for name, data in before.items():
    if _steps([name]) & good:
      assert after.get(name) == data, f"{name} was good and has changed"
  rows = set(original["metrics.jsonl"].splitlines())
  lines = set(after.get("metrics.jsonl", b"").splitlines())
  for line in before.get("metrics.jsonl", b"").splitlines():
    if line in rows and json.loads(line)["step"] <= max(good, default=0):
      assert line in lines, f"the row {line} was good and is gone"


@pytest.fixture
def damaged(cases, tmp_path):
  """Damages copies of a folder, acts on each, and checks what is left."""

  def damaged(source, act):
    folder, original = tmp_path / "run", tiny_run.contents(source)

    def check(events):
      _copy(source, folder)
      touched = _damage(folder, events)
      before = tiny_run.contents(folder)
      act(folder, touched)
      _check_kept(folder, before, touched, original)

    laws.explore(cases, check, damages)
    assert tiny_run.contents(source) == original

  return damaged


@pytest.mark.more
@laws.shares(5, 500)
def test_resume(runs, damaged):
  def act(folder, touched):
    train = lambda: tiny_run.train_here(folder, runs.fields) and None
    status, _, _ = laws.outcome(command_line.run, train)
    if not status:
      for got, expected in zip(_weights(folder), runs.weights, strict=True):
        np.testing.assert_array_equal(got, expected)

  damaged(runs.interrupted, act)


@pytest.mark.more
@laws.shares(15, 500)
def test_verify(runs, damaged):
  """Names every checkpoint with a damaged file, if its checksums are there."""

  def act(folder, touched):
    before = tiny_run.contents(folder)
    status, out, _ = laws.outcome(
      checkpoint.main, ["verify", f"--workdir={folder}"], per_run=True
    )
    assert tiny_run.contents(folder) == before, "verifying changed the run"
    for name in touched:
      for step in _steps([name]) & set(checkpoint.all_steps(folder)):
        sums = f"checkpoints/{step}/checksums.json"
        # Orbax writes these two itself, one of them after the checksums.
        of_orbax = name.endswith(("_METADATA", "commit_success.txt"))
        if sums not in touched and not of_orbax:
          assert f"step {step}: damaged" in out and status == 1, name

  damaged(runs.finished, act)

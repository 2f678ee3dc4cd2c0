# SPDX-License-Identifier: Apache-2.0
"""Whatever a folder holds, no command replaces a file of somebody else."""

import json
import shutil

import hypothesis
from hypothesis import strategies as st
import pytest

from attnres_jax import config as config_lib
from attnres_jax.train import checkpoint
from tests import tiny_run

FIELDS = {
    "mesh.data": 1, "train.steps": 1, "optim.schedule": "constant",
    "optim.warmup_steps": 0,
    "train.depth_every": 0,
    "train.eval_every": 0, "train.eval_batches": 1,
    "checkpoint.asynchronous": False,
}  # fmt: skip
NAMES = ("config.json", "data.json", "summary.json", "metrics.jsonl", "lock")
FOREIGN = (
  b'{"model_type": "llama", "hidden_size": 8}', b'{"model": {}}', b"{}",
  b'{"step": 1}\n{"step": 2}\n', b"[1, 2]", b"3", b"null", b"words\n",
  b"\x00\xff\x80", b"[" * 1100, b" ",
)  # fmt: skip
OTHERS = (
  "notes.txt", "train.py", "model.safetensors", "config.json.bak",
  "old/notes", "checkpoints/epoch=3.ckpt", "checkpoints/latest",
  "checkpoints_set_aside/1.0.txt", "corpus/a.txt",
)  # fmt: skip

ours = {
  "config.json": b'{"model": {}, "train": {}, "optim": {}}',
  "data.json": b'{"train": {}, "validation": {}}',
  "summary.json": b'{"status": "stopped", "step": 1}',
  "metrics.jsonl": b'{"step": 0, "split": "event", "event": "start"}\n',
  "lock": b'{"host": "a", "pid": 1',
}
folders = st.tuples(
  st.dictionaries(st.sampled_from(OTHERS), st.sampled_from(FOREIGN)),
  st.dictionaries(
    st.sampled_from(NAMES),
    st.sampled_from(FOREIGN) | st.none() | st.just(b"") | st.binary(),
    max_size=3,
  ),
)


def _write(folder, *contents):
  """Files with contents; None is what we would have written."""
  for name, content in ((n, c) for files in contents for n, c in files.items()):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(ours[name] if content is None else content)


def _is_readable(name, content):
  first = content.split(b"\n")[0]
  try:
    json.loads(first if name.endswith(".jsonl") else content)
  except (ValueError, RecursionError):
    return False
  return name != "lock"


def _check(root, others, named):
  """Trains in a folder, and compares it with its earlier content."""
  folder = root / "run"
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir()
  _write(folder, others, named)
  before = tiny_run.contents(folder)
  foreign = {name for name, content in named.items() if content}
  is_ours = any(c is None and name != "lock" for name, c in named.items())
  try:
    tiny_run.train_here(folder, FIELDS | tiny_run.corpus(root))
  except config_lib.ConfigError as error:
    assert any(f"{name}, which is there" in str(error) for name in foreign)
    assert str(error).isprintable() and str(folder) in str(error)
    assert tiny_run.contents(folder) == before
    return
  after = tiny_run.contents(folder)
  assert after["summary.json"] and checkpoint.all_steps(folder) == [1]
  # A damaged file of a run of ours may be rebuilt, and only that.
  assert not foreign or is_ours
  for name, content in before.items():
    if name in foreign:
      assert not _is_readable(name, content) and name != "lock"
    elif name not in named:
      assert after[name] == content, name


@pytest.mark.more
def test_a_run_replaces_no_file_of_others(tmp_path):
  settings = hypothesis.settings(
    max_examples=30, deadline=None, derandomize=True, database=None,
    phases=[hypothesis.Phase.generate],
  )  # fmt: skip
  with tiny_run.traced_once():
    run = lambda drawn: _check(tmp_path, *drawn)
    settings(hypothesis.given(folders)(run))()
    for name in NAMES:
      for content in FOREIGN:
        _check(tmp_path, {}, {name: content})

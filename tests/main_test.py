# SPDX-License-Identifier: Apache-2.0
"""The command line: a one-line error for every mistake."""

import os
import sys

import jax
import pytest

from attnres_jax import main
from attnres_jax.train import loop
from tests import tiny_run

SPEC = f"{tiny_run.ROOT}/configs/lm.py"


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
  """Runs main with these arguments; returns (exit status, stderr lines)."""

  def no_training(*args, **kwargs):
    raise AssertionError("went on to train")

  monkeypatch.setattr(loop, "train_and_evaluate", no_training)

  def run(*args, config=f"{SPEC}:size=micro", workdir=str(tmp_path / "run")):
    argv = ([f"--config={config}"] if config else []) + list(args)
    argv += [f"--workdir={workdir}"] if workdir else []
    try:
      status = main.main(argv)
    except SystemExit as error:
      status = error.code
    return status, capsys.readouterr().err.splitlines()

  return run


BAD_FLAGS = {
  "unknown field": (
    ["--config.optim.peak_lrr=1"],
    "config.optim.peak_lrr: got 'peak_lrr', expected one of",
    "did you mean config.optim.peak_lr?",
  ),
  "field of a value": (["--config.seed.x=1"], "config.seed.x", "seed"),
  "float": (
    ["--config.optim.peak_lr=fast"],
    "config.optim.peak_lr: got 'fast', expected a value of type float",
  ),
  "separate value": (
    ["--config.train.steps", "many"],
    "config.train.steps: got 'many', expected a value of type int",
  ),
  "bool": (
    ["--config.model.tie_embeddings=maybe"],
    "config.model.tie_embeddings: got 'maybe', expected a value of type bool",
  ),
  "no int": (["--noconfig.seed"], "config.seed", "type int"),
  "section": (["--config.model=big"], "config.model: got 'big'", "width"),
  "unknown flag": (["--workdirr=x"], "unrecognized arguments: --workdirr=x"),
  "flag type": (["--num_processes=two"], "num_processes", "two"),
  "argument": (["extra"], "unrecognized arguments: extra"),
  "half a cluster": (
    ["--distributed", "--num_processes=2"],
    "expected all three",
  ),
}


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_flags(command, case):
  args, *expected = BAD_FLAGS[case]
  status, err = command(*args)
  assert status == 2 and len(err) == 1, err
  assert err[0].startswith("error: ")
  for text in expected:
    assert text in err[0]


@pytest.mark.parametrize(
  "source, expected",
  [
    ("def get_config(arg=None):\n  return 1 +\n", "SyntaxError"),
    ("import nothing_of_this_name\n", "ModuleNotFoundError"),
    ("def get_config(arg=None):\n  return {}['x']\n", "bad.py:2: KeyError"),
    ("x = 1\n", "get_config"),
  ],
)
def test_broken_config_file(command, tmp_path, source, expected):
  (tmp_path / "bad.py").write_text(source)
  status, err = command(config=str(tmp_path / "bad.py"))
  assert status == 2 and len(err) == 1, err
  assert expected in err[0]


def test_bad_workdir(command, tmp_path):
  assert command(workdir=None)[1] == [
    "error: --workdir: missing, expected a folder"
  ]
  (tmp_path / "file").write_text("")
  for workdir, accepted in {
    tmp_path / "file": "a folder",
    tmp_path / "file" / "run": "a folder",
    "/dev/null": "a folder",
    tmp_path / ("x" * 300): "names of 255 bytes at most",
    "az://bucket/run": "a local path or gs:// or s3://",
    "s3://bucket/run[1]": "a name without *, ? and [",
  }.items():
    status, err = command(workdir=str(workdir))
    assert status == 2 and len(err) == 1, err
    assert err[0].startswith(
      f"error: --workdir: got {str(workdir)!r}, expected"
    )
    assert f"expected {accepted}" in err[0]


def test_a_pod_needs_no_addresses(command, monkeypatch):
  """With `--distributed` alone, JAX gets the addresses from the pod."""
  seen = []
  monkeypatch.setattr(
    jax.distributed, "initialize", lambda **given: seen.append(given)
  )
  with pytest.raises(AssertionError, match="went on to train"):
    command("--distributed")
  names = ("coordinator_address", "num_processes", "process_id")
  assert seen == [dict.fromkeys(names)]


@pytest.mark.parametrize(
  ("error", "status"),
  [
    (OSError("the store fails"), 1),
    (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: the store fails"), 2),
  ],
)
def test_a_process_that_fails_alone_leaves_the_others(
  command, error, status, monkeypatch
):
  """A normal exit would wait five minutes for them."""

  def fail(*args, **options):
    raise error

  monkeypatch.setattr(loop, "train_and_evaluate", fail)
  monkeypatch.setattr(jax.distributed, "initialize", lambda **given: None)
  monkeypatch.setattr(os, "_exit", sys.exit)
  actual, err = command("--distributed")
  assert actual == status
  assert (
    err[-1].startswith("error: process 0 ends") and "store fails" in err[-1]
  )


def test_overrides_arrive(command, monkeypatch, capsys):
  seen = []

  def train_and_evaluate(config, workdir, **options):
    changed = options["resume_with_changed_config"]
    seen.append((config, changed))
    return {"status": "stopped", "step": 3}

  run = command
  monkeypatch.setattr(loop, "train_and_evaluate", train_and_evaluate)
  status, err = run(
    "--config.optim.peak_lr=0.5", "--config.train.steps", "7",
    "--config.model.tie_embeddings", "--noconfig.checkpoint.asynchronous",
    "--config.data.path=a=b", "--config.optim.weight_decay=1",
    "--resume_with_changed_config",
  )  # fmt: skip
  assert status == 4 and not err
  ((config, changed),) = seen
  assert config.optim.peak_lr == 0.5 and config.train.steps == 7
  assert config.model.tie_embeddings and not config.checkpoint.asynchronous
  assert config.data.path == "a=b" and config.optim.weight_decay == 1.0
  assert changed

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

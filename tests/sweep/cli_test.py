# SPDX-License-Identifier: Apache-2.0
"""The command of a sweep: its errors, and its use of the compiler."""

import importlib
import sys

import pytest

from attnres_jax import sweep
from attnres_jax.common import csv_rows
from attnres_jax.scaling import grid
from attnres_jax.sweep import cli
from attnres_jax.sweep.launchers import ray
from tests.fuzz import laws
from tests.sweep import tiny_sweep


@pytest.fixture
def source(tmp_path):
  return tiny_sweep.write(tmp_path / "tiny.py", seeds=(0, 1, 2))


@pytest.fixture
def main(tmp_path, source):
  def call(*arguments):
    arguments += (f"--config={source}", f"--workdir={tmp_path / 'sweep'}")
    return cli.main(tiny_sweep.EXPERIMENT, arguments)

  return call


def test_dry_run_leaves_nothing(main, tmp_path, capsys):
  assert main("--dry_run", "--only=seed[01]") == 0
  cost, *lines = capsys.readouterr().out.splitlines()
  assert cost.startswith("# cost of 2 runs: ")
  assert len(lines) == 2 and "--run=seed0-" in lines[0]
  assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
  "arguments,error",
  [
    (["--launcher=slurp"], "--launcher: got 'slurp'"),
    (["--set=image"], "--set: got 'image', expected name=value"),
    (["--set=image=x"], "--set: got 'image', expected one of max_restarts"),
    (["--only=seed7"], "--only: got 'seed7'"),
    (["--only=("], "--only: got '('"),
    (["status"], "expected the folder of a sweep"),
    (["collect"], "expected the folder of a sweep"),
  ],
)
def test_bad_arguments_get_one_line(main, arguments, error):
  status, _, err = laws.outcome(main, *arguments)
  assert status == 2 and error in err


# Settings without which a launcher refuses any launch.
NEEDED = {
  "jobset": ["image=x", "slice=v6e-8"],
  "skypilot": ["slice=v6e-8"],
  "tpu_vm": ["slice=v6e-8", "zone=z"],
}


def _refusals():
  """A launcher, settings that it refuses, and how its error begins."""
  for name in sweep.LAUNCHERS:
    module = importlib.import_module(f"attnres_jax.sweep.launchers.{name}")
    needed = NEEDED.get(name, [])
    yield name, [*needed, "nothing=1"], "--set: got 'nothing', expected one of"
    for flag in needed:
      left = [other for other in needed if other != flag]
      yield name, left, f"--set {flag.partition('=')[0]}: missing, expected"
    for setting, about in module.SETTINGS.items():
      if about.kind is not str:
        words = "true or false" if about.kind is bool else "a whole number"
        words = f"--set {setting}: got 'x', expected {words}"
        yield name, [*needed, f"{setting}=x"], words
    if hasattr(module, "READERS"):
      yield name, needed, "--workdir: got 'new', expected a bucket such as"
  yield "slurm", ["time=soon"], "--set time: got 'soon', expected minutes"
  words = "--set accelerator: got 'v9:2x2', expected a TPU slice"
  yield "ray", ["accelerator=v9:2x2"], words
  for flags in (
    ["gpus=8"], ["slices=2"], ["workers=4", "accelerator=v6e:4x4"]
  ):  # fmt: skip
    name, _, value = flags[0].partition("=")
    words = f"--set {name}: got '{value}', expected no such setting with"
    yield "ray", flags, words


@pytest.mark.parametrize("launcher,settings,words", list(_refusals()))
def test_a_refused_launch_writes_nothing(
  launcher, settings, words, source, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(ray, "require", lambda: None)
  before = sorted(tmp_path.rglob("*"))
  flags = [f"--set={value}" for value in settings]
  flags += [f"--launcher={launcher}", f"--config={source}", "--workdir=new"]
  assert cli.main(tiny_sweep.EXPERIMENT, flags) == 2
  text = capsys.readouterr().err
  assert text.startswith(f"error: {words}") and text.count("\n") == 1
  assert sorted(tmp_path.rglob("*")) == before


def test_a_launch_without_its_package_writes_nothing(
  main, tmp_path, monkeypatch, capsys
):
  monkeypatch.setitem(sys.modules, "ray", None)
  before = sorted(tmp_path.rglob("*"))
  assert main("--launcher=ray") == 2
  text = capsys.readouterr().err
  assert "attnres-jax[ray]" in text and text.count("\n") == 1
  assert sorted(tmp_path.rglob("*")) == before


def test_a_launch_of_other_runs_into_a_folder_changes_nothing(
  main, source, tmp_path, capsys
):
  """Whose runs differ, or that has a file of somebody else in a run."""
  tiny_sweep.prepare(tmp_path / "sweep", source)
  tiny_sweep.write(tmp_path / "tiny.py", seeds=(0, 1, 2, 3))
  new = grid.load(source)[-1].name
  (tmp_path / "sweep" / new).mkdir()
  (tmp_path / "sweep" / new / "run.json").write_text('{"theirs": 1}')
  before = {p: p.is_file() and p.read_text() for p in tmp_path.rglob("*")}
  assert main("--set=max_restarts=0") == 2
  assert "files of others" in capsys.readouterr().err
  after = {p: p.is_file() and p.read_text() for p in tmp_path.rglob("*")}
  assert after == before


def test_a_dry_run_checks_a_local_folder(main, tmp_path, capsys):
  (tmp_path / "sweep").write_text("")
  assert main("--dry_run") == 2
  assert capsys.readouterr().err.startswith("error: --workdir: got ")


def test_rows_are_collected_before_and_after_a_run_is_done(
  main, source, tmp_path
):
  run, *_ = tiny_sweep.prepare(tmp_path / "sweep", source)
  assert main("collect") == 0
  tiny_sweep.leave(tmp_path / "sweep", run)
  assert main("collect") == 0
  (row,) = csv_rows.read(tmp_path / "sweep" / cli.ROWS)
  assert row["run"] == run.name


def test_a_file_without_a_sweep(tmp_path, capsys):
  file = tmp_path / "lm.py"
  file.write_text("def get_config(arg=None): ...\n")
  arguments = [f"--config={file}", f"--workdir={tmp_path}"]
  assert cli.main(tiny_sweep.EXPERIMENT, arguments) == 2
  assert "defines no sweep(add)" in capsys.readouterr().err

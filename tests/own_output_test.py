# SPDX-License-Identifier: Apache-2.0
"""A command writes a file where it is told, unless somebody else's is there."""

import functools
import shutil
from unittest import mock

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from attnres_jax.common import command_line
from attnres_jax.scaling import grid
from attnres_jax.sweep import cli
from attnres_jax.sweep import launchers
from attnres_jax.sweep import state as state_lib
from experiments.cost import report
from experiments.cost import run as cost_run
from tests.fuzz import laws
from tests.sweep import tiny_sweep

RUNS = [grid.Run("queue", {}, {})]
FOREIGN = (
  "a,b\n1,2\n", '{"a": 1}', "[]", "run: my own\n", "#!/bin/sh\n", "\0",
  "kind: LocalQueue\n", "step,run\n",
)  # fmt: skip
foreign = st.sampled_from(FOREIGN) | st.text(min_size=1)


@pytest.fixture(autouse=True)
def bucket(monkeypatch):
  """The states of a bucket's runs, which nobody asks for over a network."""
  read = state_lib.read
  is_there = lambda workdir: not str(workdir).startswith("gs://")
  monkeypatch.setattr(
    state_lib, "read", lambda w: read(w) if is_there(w) else state_lib.State()
  )


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
  return tiny_sweep.finished(tmp_path_factory.mktemp("sweep"))[0]


def _launch(name, path, sweep):
  of_launcher = {
    "slurm": {"script": str(path)},
    "skypilot": {"slice": "v6e-16", "task": str(path)},
    "jobset": {
      "image": "a", "slice": "v5p:2x2x2", "manifests": str(path.parent)
    },
  }  # fmt: skip
  options = launchers.Options(settings=of_launcher[name])
  return launchers.launch(name, RUNS, "gs://b/s", options)


def _collect(path, sweep):
  argv = ["collect", f"--workdir={sweep}", f"--out={path}"]
  return cli.main(tiny_sweep.EXPERIMENT, argv)


def _cost(path, sweep):
  row = dict.fromkeys(report.KEYS, "a")
  with mock.patch.object(cost_run, "vectors", lambda: [row]):
    return cost_run.main(["vectors", f"--out={path}"])


# Command -> a name of a file that it writes.
OUTPUTS: dict = {
  functools.partial(_launch, "slurm"): "sweep.sbatch",
  functools.partial(_launch, "skypilot"): "task.yaml",
  functools.partial(_launch, "jobset"): "queue.yaml",
  _collect: "rows.csv",
  _cost: "costs.csv",
}


def _outcome(command, *args):
  status, _, err = laws.outcome(command_line.run, command, *args)
  return status, err


@pytest.mark.parametrize("command", OUTPUTS)
def test_a_file_of_others_stays(command, tmp_path, sweep):
  folder = tmp_path / "made" / "by need"
  path = folder / OUTPUTS[command]
  assert _outcome(command, path, sweep)[0] == 0
  # Its own file is replaced.
  path.write_text(path.read_text() + "\n")
  text = path.read_text()
  assert _outcome(command, path, sweep)[0] == 0 and path.read_text() != text

  @settings(max_examples=15, deadline=None, derandomize=True, database=None)
  @given(foreign)
  def law(content):
    shutil.rmtree(folder)
    folder.mkdir()
    path.write_bytes(content.encode(errors="surrogatepass"))
    before = path.read_bytes()
    status, err = _outcome(command, path, sweep)
    assert status == 2 and f"{path.name}, which is there" in err
    assert [f.name for f in folder.iterdir()] == [path.name]
    assert path.read_bytes() == before

  law()


@pytest.mark.parametrize(
  "name", ["sweep.json", "run.json", "plans.csv", "report.html"]
)
def test_a_sweep_replaces_no_file_of_others(name, tmp_path):
  source = tiny_sweep.write(tmp_path / "tiny.py")
  run = grid.load(source)[0].name
  folder = tmp_path / "sweep"
  path = folder / (f"{run}/{name}" if name == "run.json" else name)
  path.parent.mkdir(parents=True)
  path.write_text('{"a": 1}\n')
  flags = [f"--config={source}", f"--workdir={folder}"]
  status, err = _outcome(cli.main, tiny_sweep.EXPERIMENT, flags)
  assert status == 2 and f"{name}, which is there" in err, err
  assert path.read_text() == '{"a": 1}\n'

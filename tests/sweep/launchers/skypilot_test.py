# SPDX-License-Identifier: Apache-2.0
"""The task of SkyPilot, as its own classes read it."""

import importlib
import re

import pytest
import yaml

from attnres_jax import config as config_lib
from attnres_jax.common import exits
from attnres_jax.scaling import grid
from attnres_jax.sweep import launchers

FOLDER = "gs://no-such-bucket/sweep"


def launch(capsys, max_parallel=2, **settings):
  runs = [grid.Run(name, {}, {}) for name in "abc"]
  settings = {"slice": "v6e-16"} | settings
  options = launchers.Options(max_parallel, True, settings)
  assert launchers.launch("skypilot", runs, FOLDER, options) == 0
  return capsys.readouterr().out


def test_a_job_per_slice_and_at_most_max_parallel(capsys):
  for parallel, jobs in ((2, 2), (9, 3)):
    text = launch(capsys, max_parallel=parallel)
    starts = re.findall("^# (.*)$", text, re.M)
    assert len(starts) == jobs
    assert starts[0].startswith(
      "sky jobs launch --yes --async --name attnres-0"
    )
    assert len(text.splitlines()) < 30


def test_workers_take_the_runs_of_the_launch(capsys):
  options = launchers.Options(1, True, {"slice": "v6e-16"}, only="^a")
  assert (
    launchers.launch("skypilot", [grid.Run("a", {}, {})], FOLDER, options) == 0
  )
  assert "--only=^a" in capsys.readouterr().out


@pytest.mark.parametrize(
  "name,gpus,nodes", [("h100-8", "H100:8", None), ("h200-4x8", "H200:8", 4)]
)
def test_gpus(capsys, name, gpus, nodes):
  text = launch(capsys, slice=name, region="us-east-1").partition("# ")[0]
  task = yaml.safe_load(text)
  assert task["resources"]["accelerators"] == gpus
  assert task["resources"]["infra"] == "*/us-east-1"
  assert "accelerator_args" not in task["resources"]
  assert task.get("num_nodes") == nodes
  assert "attnres-jax[cuda,gcs]" in task["setup"]
  several = '--process_id="$SKYPILOT_NODE_RANK"' in task["run"]
  assert several == ("--distributed" in task["run"]) == (nodes is not None)


@pytest.mark.parametrize(
  "settings,words",
  [
    ({"slice": "h100-3"}, "slice: got 'h100-3', expected 1, 2, 4 or 8"),
    ({"slice": "h100-8", "runtime": "v2"}, "no such setting with h100-8"),
    ({"slice": "x-8"}, "got 'x', expected one of .*h100"),
  ],
)
def test_wrong_slices(capsys, settings, words):
  with pytest.raises(config_lib.ConfigError, match=words):
    launch(capsys, **settings)


@pytest.mark.needs("skypilot")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
  "settings",
  [
    {},
    {"slice": "v5e-8", "spot": "false", "region": "us-central1"},
    {"slice": "v5p-128", "max_restarts": "0", "runtime": "v2-alpha-tpuv5"},
    {"slice": "h100-2x8", "region": "us-east-1"},
  ],
)
def test_the_task_is_what_skypilot_reads(capsys, tmp_path, settings):
  file = tmp_path / "task.yaml"
  # The dry run prints the file that a launch writes.
  file.write_text(launch(capsys, **settings).partition("# ")[0])
  sky = importlib.import_module("sky")
  task = sky.Task.from_yaml(str(file))
  (resources,) = task.resources
  assert resources.use_spot == (settings.get("spot") != "false")
  (name,) = resources.accelerators
  tpu = not settings.get("slice", "v").startswith("h")
  assert name.startswith("tpu-v" if tpu else "H100")
  assert resources.accelerators[name] == (1 if tpu else 8)
  recovery = resources.job_recovery
  assert recovery["max_restarts_on_errors"] == int(
    settings.get("max_restarts", 3)
  )
  codes = recovery["recover_on_exit_codes"]
  assert codes == [exits.Exit.STOPPED]
  assert not {exits.Exit.NEVER, exits.Exit.DIVERGED} & set(codes)
  assert "attnres_jax.sweep.worker" in task.run and FOLDER in task.run
  assert f"attnres-jax[{'tpu' if tpu else 'cuda'},gcs]" in task.setup
  # It keeps every field.
  assert task.to_yaml_config()["run"] == yaml.safe_load(file.read_text())["run"]

# SPDX-License-Identifier: Apache-2.0
"""Every command of docs/pods.md exists, with the flags used there."""

import importlib
import importlib.util
import re
import shlex
import tomllib

import pytest
import yaml

from attnres_jax import data
from attnres_jax.aot import plan
from attnres_jax.data import prepare
from attnres_jax.scaling import grid
from attnres_jax.sweep import cli
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import launchers
from attnres_jax.sweep import worker
from attnres_jax.sweep.launchers import jobset
from attnres_jax.sweep.launchers import ray
from attnres_jax.sweep.launchers import slurm
from experiments.first_hour import run as first_hour
from experiments.scaling_law import run
from tests import tiny_run

TEXT = (tiny_run.ROOT / "docs" / "pods.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.S | re.M)
CHECKS = {"ray": ray.parse, "jobset": jobset.parse}


def commands():
  """(module, arguments) of every `python -m`, including those in quotes."""
  found = []
  for kind, block in BLOCKS:
    if kind not in ("", "bash"):
      continue
    for line in block.replace("\\\n", " ").splitlines():
      words = shlex.split(line) if "python -m" in line else []
      # A command for another machine is one word of the local command.
      words = next((shlex.split(w) for w in words if "python -m" in w), words)
      if "-m" in words:
        start = words.index("-m") + 1
        found.append((words[start], words[start + 1 :]))
  return found


def test_there_are_commands():
  modules = {module for module, _ in commands()}
  assert modules == {
    "attnres_jax.aot",
    "attnres_jax.aot.plan",
    "attnres_jax.main",
    "attnres_jax.data.prepare",
    "attnres_jax.sweep.worker",
    "experiments.first_hour",
    "experiments.scaling_law.run",
  }


@pytest.mark.parametrize("module,arguments", commands())
def test_commands_take_their_arguments(module, arguments):
  assert importlib.util.find_spec(module) is not None
  for argument in arguments:
    if argument.startswith("--config="):
      file = argument.removeprefix("--config=").partition(":")[0]
      assert (tiny_run.ROOT / file).is_file()
  if module == "experiments.scaling_law.run":
    options = cli.make_parser(run.EXPERIMENT).parse_args(arguments)
    given = launchers.Options(
      options.max_parallel, settings=cli._settings(options.set)
    )
    launchers.load(options.launcher, given)
    if options.action == "run":
      source = options.config
      runs = grid.load(source.spec, source.fields)
      # No sweep of the page trains on the text of laptops.
      for one in runs:
        data.check(folder_lib.run_config(one), offline=True)
      own_text = {one.config["data"]["source"] for one in runs}
      assert own_text == {"tokens" if "paper" in source.spec else "stdlib"}
    CHECKS.get(options.launcher, lambda _: None)(given)
  elif module == "attnres_jax.sweep.worker":
    worker._parse_options(
      [re.sub("=[A-Z:]+$", "=1", argument) for argument in arguments]
    )
  elif module == "experiments.first_hour":
    first_hour.make_parser().parse_args(arguments)
  elif module == "attnres_jax.data.prepare":
    prepare._parser().parse_args(arguments)
  else:
    program = "attnres_jax.aot.__main__"
    program = program if module.endswith("aot") else module
    parser = importlib.import_module(program).make_parser()
    options = parser.parse_args(arguments)
    if module == "attnres_jax.aot.plan":
      # A plan is for a run whose text fits it.
      for config in plan.asked(options):
        data.check(config, offline=True)


def test_extras_exist():
  project = tomllib.loads((tiny_run.ROOT / "pyproject.toml").read_text())
  extras = re.findall(r"attnres-jax\[([\w,]+)\]", TEXT)
  extras += re.findall(r'install .*"\.\[([\w,]+)\]"', TEXT)
  assert len(extras) > 3
  for names in extras:
    known = project["project"]["optional-dependencies"]
    assert set(names.split(",")) <= known.keys()


def test_the_script_of_slurm_is_the_one_that_is_written():
  (shown,) = [block for kind, block in BLOCKS if kind == "bash"]
  settings = {
    "nodes": "2", "gpus": "8", "time": "24:00:00",
    "setup": ". /shared/venv/bin/activate",
  }  # fmt: skip
  options = launchers.Options(max_parallel=4, settings=settings)
  written = slurm.script(["NAME"], "/shared/scaling", options)
  for line in shown.replace("\\\n", "").splitlines():
    line = re.sub(" +", " ", line)
    task = '--run="${runs[$SLURM_ARRAY_TASK_ID]}"'
    assert line.replace("--run=NAME", task) in written


def test_the_cluster_of_ray_is_whole():
  (text,) = [block for kind, block in BLOCKS if kind == "yaml"]
  cluster = yaml.safe_load(text)
  kinds = cluster["available_node_types"]
  assert cluster["head_node_type"] in kinds
  assert cluster["max_workers"] == kinds["slice"]["max_workers"]
  assert kinds["slice"]["node_config"]["acceleratorType"] == "v6e-16"
  if importlib.util.find_spec("ray") is None:
    return
  util = importlib.import_module("ray.autoscaler._private.util")
  util.validate_config(util.prepare_config(cluster))
  if importlib.util.find_spec("google_auth_httplib2") is None:
    return
  gcp = importlib.import_module("ray.autoscaler._private.gcp.config")
  kind = gcp.get_node_type(kinds["slice"]["node_config"])
  assert kind == gcp.GCPNodeType.TPU

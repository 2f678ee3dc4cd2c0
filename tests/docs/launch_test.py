# SPDX-License-Identifier: Apache-2.0
"""Commands of docs/launch.md and docs/plan.md, executed as far as they go here.

By default, launches are dry runs without a network; pages_test parses the other
commands. Slow tests execute them, in a bucket.
"""

import importlib
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml

from attnres_jax import data
from attnres_jax.plan import search
from attnres_jax.scaling import grid
from attnres_jax.sweep import actions
from attnres_jax.sweep import cli
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import launchers
from attnres_jax.sweep.launchers import tpu_vm
from experiments.scaling_law import run
from tests import tiny_run
from tests.docs import pages

PAGES = "docs/launch.md", "docs/plan.md"
TEXT = "\n".join(pages.PAGES[page] for page in PAGES)
COMMANDS = pages.commands(*PAGES)
CLUSTER = tiny_run.ROOT / "configs" / "ray_cluster.yaml"
# What the commands of the pages may start, beside Python.
PROGRAMS = {"gcloud", "kubectl", "pip", "python", "ray", "sbatch", "sky"}
LAUNCH = "experiments.scaling_law.run"
# The commands that train on a text, now or later.
NETWORKS = LAUNCH, "attnres_jax.plan.search"


def launches():
  return [
    arguments for module, arguments in COMMANDS
    if module == LAUNCH and any("--launcher" in word for word in arguments)
  ]  # fmt: skip


def test_all_commands_are_known():
  programs = {shlex.split(line)[0] for line in pages.lines(*PAGES)}
  assert programs == PROGRAMS


@pytest.mark.parametrize("arguments", launches(), ids=lambda words: words[-1])
def test_launches_are_dry_runs_without_a_network(
  arguments, monkeypatch, capsys, tmp_path
):
  monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
  (tmp_path / "configs").symlink_to(tiny_run.ROOT / "configs")
  monkeypatch.chdir(tmp_path)
  assert cli.main(run.EXPERIMENT, [*arguments, "--dry_run"]) == 0
  out = capsys.readouterr().out
  assert "attnres_jax.sweep.worker" in out
  # Nothing is written.
  assert [path.name for path in tmp_path.iterdir()] == ["configs"]


def test_the_five_commands_are_those_that_are_printed():
  (arguments,) = [words for words in launches() if "--launcher=tpu_vm" in words]
  options = cli.make_parser(run.EXPERIMENT).parse_args(arguments)
  given = launchers.Options(settings=actions._settings(options.set))
  settings = launchers.read(tpu_vm, given)
  planned = tpu_vm.plan([], options.workdir, settings)
  printed = [text.split("\n", 2)[2] for text in planned.commands]
  assert len(printed) == 5
  assert "\n".join(printed) in TEXT


@pytest.mark.slow
@pytest.mark.needs("libtpu")
@pytest.mark.parametrize(
  "module,arguments",
  [c for c in COMMANDS if re.search(r"\.(plan|search)$", c[0])],
  ids=lambda part: part if isinstance(part, str) else part[-1],
)
def test_commands_run_to_their_end(module, arguments, tmp_path):
  """Runs commands that need only this machine; compilers take minutes."""
  # A copy, as plans are added to a file there.
  shutil.copytree(tiny_run.ROOT / "configs", tmp_path / "configs")
  process = subprocess.run(
    [sys.executable, "-m", module, *arguments], cwd=tmp_path,
    env=tiny_run.environment(), capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert process.returncode == 0, process.stderr[-5000:]


@pytest.mark.parametrize(
  "module,arguments",
  [c for c in COMMANDS if c[1] not in launches() and c[0] in NETWORKS],
)
def test_texts_fit_networks(module, arguments):
  """Which `pages_test` does not ask: it parses every command."""
  if module == LAUNCH:
    options = cli.make_parser(run.EXPERIMENT).parse_args(arguments)
    if options.action == "run":
      source = options.config
      for planned in grid.load(source.spec, source.fields):
        data.check(folder_lib.run_config(planned), offline=True)
  else:
    for config in search.requested(search.make_parser().parse_args(arguments)):
      data.check(config, offline=True)


def test_extras_exist():
  project = tomllib.loads((tiny_run.ROOT / "pyproject.toml").read_text())
  extras = re.findall(r"attnres-jax\[([\w,]+)\]", TEXT)
  image = (tiny_run.ROOT / "Dockerfile").read_text()
  of_clones = re.findall(r'install .*"\.\[([\w,]+)\]"', TEXT + image)
  # Launches import what draws their report.
  assert len(of_clones) == 2 and all("plots" in line for line in of_clones)
  extras += of_clones
  assert len(extras) > 3
  for names in extras:
    offered = project["project"]["optional-dependencies"]
    assert set(names.split(",")) <= offered.keys()


def test_the_cluster_of_ray_is_whole():
  cluster = yaml.safe_load(CLUSTER.read_text())
  kinds = cluster["available_node_types"]
  assert cluster["head_node_type"] in kinds
  assert cluster["max_workers"] == kinds["slice"]["max_workers"]
  assert kinds["slice"]["node_config"]["acceleratorType"] == "v6e-16"
  # Ray runs these in the container, and the head as this account.
  image = (tiny_run.ROOT / "Dockerfile").read_text()
  assert re.search("^RUN .* rsync tmux", image, re.M)
  assert "artifactregistry.reader" in TEXT and "ray-autoscaler-sa-v1@" in TEXT
  if importlib.util.find_spec("ray") is None:
    return
  util = importlib.import_module("ray.autoscaler._private.util")
  util.validate_config(util.prepare_config(cluster))
  if importlib.util.find_spec("google_auth_httplib2") is None:
    return
  gcp = importlib.import_module("ray.autoscaler._private.gcp.config")
  kind = gcp.get_node_type(kinds["slice"]["node_config"])
  assert kind == gcp.GCPNodeType.TPU


def test_the_scales_of_pods_have_no_text_of_their_own(capsys):
  """They refuse the text of laptops before anything is compiled."""
  for scale in ("paper", "pod"):
    flags = [f"--config=configs/scaling.py:scale={scale},planned", "--dry_run"]
    flags += ["--workdir=gs://BUCKET/x", "--launcher=slurm"]
    assert cli.main(run.EXPERIMENT, flags) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "vocab_size" in err
    assert "attnres_jax.data.prepare" in err

# SPDX-License-Identifier: Apache-2.0
"""One TPU VM without a cluster: prints the commands that a person runs.

  ... --launcher=tpu_vm --set slice=v6e-8 --set zone=us-east5-b

Five commands: ask for a slice as a queued resource, install on all of its
hosts, start a worker on all hosts, watch, delete. The worker trains the open
runs of the sweep one after another, so several slices share one sweep: give
each its `name`. This launcher starts nothing, watches nothing, and needs
neither gcloud nor a network, except to prepare the folder of the sweep.
"""

from collections.abc import Mapping, Sequence
import re
import shlex
import types

from etils import epath

from attnres_jax.common import exits
from attnres_jax.scaling import grid
from attnres_jax.sweep import launchers
from attnres_jax.sweep import worker
from attnres_jax.sweep.launchers import settings as settings_lib
from attnres_jax.sweep.launchers import slices

Setting = settings_lib.Setting
SETTINGS: Mapping[str, Setting] = {
  "slice": Setting("TPU slice, such as v6e-8 or v5p-128", required=True),
  "zone": Setting("zone of Google Cloud, such as us-east5-b", required=True),
  "project": Setting("project (default: that of gcloud)"),
  "name": Setting("name of the slice", "attnres"),
  "reserved": Setting("true for reserved capacity, not spot", False, bool),
  "runtime": Setting("software version of the VM (default: by generation)"),
  "install": Setting(
    "shell command that installs this package in the folder attnres of a host"
    " (default: with uv, from its repository)",
  ),
}
PYTHON = "attnres/bin/python"
LOG = "attnres.log"


READERS = "TPU VMs"


def plan(
  runs: Sequence[grid.Run], folder: str, settings: types.SimpleNamespace
) -> launchers.Launch:
  """What each command does, and the command."""
  del runs
  name, tpu = settings.name, slices.parse("slice", settings.slice)
  where = [f"--zone={settings.zone}"]
  where += [f"--project={settings.project}"] if settings.project else []
  gcloud = ["gcloud", "compute", "tpus"]
  create = [
    *gcloud, "queued-resources", "create", name, f"--node-id={name}",
    f"--accelerator-type={tpu.cloud_type}",
    f"--runtime-version={settings.runtime or tpu.runtime}",
    "--reserved" if settings.reserved else "--spot", *where,
  ]  # fmt: skip
  ssh = shlex.join([*gcloud, "tpu-vm", "ssh", name, "--worker=all", *where])
  watch = [
    "python", "-m", "experiments.scaling_law.run", "status",
    f"--workdir={folder}", "--watch=30",
  ]  # fmt: skip
  delete = [
    *gcloud, "queued-resources", "delete", name, "--force", "--quiet", *where,
  ]  # fmt: skip
  commands = {
    "Ask for the slice; `list` shows when it is ACTIVE.": shlex.join(create),
    "Install on all hosts.": (
      f"{ssh} --command={_quoted(settings.install or install(folder))}"
    ),
    "Start a worker on all hosts; it outlives the connection.": (
      f"{ssh} --command={_quoted(script(folder, tpu, settings.options.only))}"
    ),
    "Watch, from anywhere.": shlex.join(watch),
    "Delete the slice; it costs money until then.": shlex.join(delete),
  }
  return launchers.Launch(
    commands=[f"\n# {title}\n{text}" for title, text in commands.items()]
  )


def install(folder: epath.PathLike, extra: str = "tpu") -> str:
  """A shell command that installs this package, for the store of a folder."""
  store = "s3" if str(folder).startswith("s3://") else "gcs"
  # The VMs' own Python is 3.10, and on newer ones pip refuses to change it.
  return (
    "PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --user uv &&"
    " python3 -m uv venv --clear --python 3.12 attnres &&"
    " python3 -m uv pip install --python attnres/bin/python"
    f" 'attnres-jax[{extra},{store}] @"
    " git+https://github.com/attnres-jax/attnres-jax'"
  )


def script(folder: epath.PathLike, tpu: slices.Slice, only: str) -> str:
  """A shell command for each host: workers until there is nothing to do.

  Statuses 1 and 4 start a worker again, the others do not.
  """
  again = exits.Exit.AGAIN, exits.Exit.STOPPED
  over = [str(int(status)) for status in exits.Exit if status not in again]
  # A shell says 126 or 127 of a command that it cannot run.
  over = "|".join([*over, "126", "127"])
  start = worker_on(folder, tpu.hosts, only)
  loop = f"while :; do {start}; case $? in {over}) break;; esac; sleep 10; done"
  return f"nohup sh -c {shlex.quote(loop)} >{LOG} 2>&1 </dev/null &"


def worker_on(folder: epath.PathLike, hosts: int, only: str) -> str:
  """The command of each host, for all runs of a sweep that match `only`."""
  flags = ["--distributed"] if hosts > 1 else []
  flags += [launchers.PATIENCE] + ([f"--only={only}"] if only else [])
  return shlex.join(worker.command(folder, "", *flags, python=PYTHON))


def _quoted(text: str) -> str:
  """In double quotes, as most commands have single ones in them."""
  return '"' + re.sub(r'([\\"$`])', r"\\\1", text) + '"'

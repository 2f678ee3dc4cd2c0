# SPDX-License-Identifier: Apache-2.0
"""Managed jobs of SkyPilot: one slice each, found, recreated and deleted.

  ... --launcher=skypilot --set slice=v6e-8 --max_parallel=2

This launcher writes one task; `sky jobs launch` starts a managed job per slice,
at most `--max_parallel` of them. A slice may also be GPUs, such as h100-8 or
h100-8x8. SkyPilot asks for spot capacity wherever your clouds have it, starts
the worker on all hosts of the slice, replaces a slice that is preempted, and
deletes it when the worker ends. The workers share the runs of the sweep. A
worker that meets an error is restarted `max_restarts` times; its exit status
says when that is useless.
"""

from collections.abc import Mapping, Sequence
import shlex
import types
from typing import Any

import yaml

from attnres_jax.common import exits
from attnres_jax.common import gpus
from attnres_jax.scaling import grid
from attnres_jax.sweep import launchers
from attnres_jax.sweep.launchers import settings as settings_lib
from attnres_jax.sweep.launchers import slices
from attnres_jax.sweep.launchers import tpu_vm

Setting = settings_lib.Setting
SETTINGS: Mapping[str, Setting] = {
  "slice": Setting(
    "TPU slice or GPUs, such as v6e-8, v5p-128 or h100-8", required=True
  ),
  "spot": Setting("false for capacity on demand", True, bool),
  "region": Setting("region (default: wherever there is capacity)"),
  "name": Setting("name of the jobs, with a number behind", "attnres"),
  "runtime": Setting("software version of a TPU VM (default: by generation)"),
  "install": tpu_vm.SETTINGS["install"],
  "max_restarts": Setting("restarts per job after errors", 3, int, least=0),
  "task": Setting("file to write", "sweep.sky.yaml"),
}

# How the processes of several nodes find each other; JAX knows TPUs itself.
_CLUSTER = (
  ' --coordinator_address="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):8476"'
  ' --num_processes="$SKYPILOT_NUM_NODES" --process_id="$SKYPILOT_NODE_RANK"'
)


READERS = "slices"


def plan(
  runs: Sequence[grid.Run], folder: str, settings: types.SimpleNamespace
) -> launchers.Launch:
  """The task of one slice, and the commands that start its jobs."""
  resources: dict[str, Any] = {
    "use_spot": settings.spot,
    "job_recovery": {
      "strategy": "EAGER_NEXT_REGION",
      "max_restarts_on_errors": settings.max_restarts,
      # Statuses that another attempt may not end with, without a limit.
      "recover_on_exit_codes": [int(exits.Exit.STOPPED)],
    },
  }
  manifest: dict[str, Any] = {"name": settings.name, "resources": resources}
  topology = gpus.parse(settings.slice, "--set slice")
  if topology is None:
    tpu = slices.parse("slice", settings.slice)
    hosts, extra, cluster = tpu.hosts, "tpu", ""
    resources["infra"] = f"gcp/{settings.region}" if settings.region else "gcp"
    resources["accelerators"] = f"tpu-{tpu.cloud_type}:1"
    runtime = settings.runtime or tpu.runtime
    resources["accelerator_args"] = {"runtime_version": runtime}
  else:
    if settings.runtime:
      settings_lib.fail(
        "runtime", settings.runtime, f"no such setting with {settings.slice}"
      )
    kind, hosts, each = topology
    extra, cluster = "cuda", _CLUSTER * (hosts > 1)
    resources["accelerators"] = f"{kind.upper()}:{each}"
    if settings.region:
      resources["infra"] = f"*/{settings.region}"
    if hosts > 1:
      manifest["num_nodes"] = hosts
  manifest["setup"] = settings.install or tpu_vm.install(folder, extra)
  worker = tpu_vm.worker_on(folder, hosts, settings.options.only)
  manifest["run"] = worker + cluster
  jobs = min(settings.options.max_parallel, len(runs))
  start = "sky jobs launch --yes --async --name".split()
  commands = [
    shlex.join([*start, f"{settings.name}-{job}", settings.task])
    for job in range(jobs)
  ]
  text = yaml.safe_dump(manifest, sort_keys=False)
  return launchers.Launch({settings.task: text}, commands, "task")

# SPDX-License-Identifier: Apache-2.0
"""A sweep on a Ray cluster: every run is a gang of workers on its own slices.

  pip install 'attnres-jax[ray]'
  ... --launcher=ray --set accelerator=v6e:4x4 --max_parallel=4

Works on any machine of the cluster. Each run is a `JaxTrainer` of Ray Train: it
reserves whole slices, starts one worker per host at the same time, connects
them (`jax.distributed`, and over several slices Megascale), and calls
`work.run` in all of them. When a worker fails, dies or loses its node, Ray
restarts the whole gang, and the run resumes from its last checkpoint. A run
that diverged or was refused is not restarted. Runs wait until their slices are
free.

Ctrl-C ends all runs at once; the next launch resumes from their checkpoints.
"""

from collections.abc import Mapping, Sequence
import concurrent.futures
import importlib
import os
import shlex
import types
from typing import Any

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax.common import exits
from attnres_jax.scaling import grid
from attnres_jax.sweep import launchers
from attnres_jax.sweep import state as state_lib
from attnres_jax.sweep import work
from attnres_jax.sweep import worker
from attnres_jax.sweep.launchers import settings as settings_lib
from attnres_jax.sweep.launchers import slices

Setting = settings_lib.Setting
SETTINGS = {
  "accelerator": Setting("cpu, gpu, or a TPU slice such as v6e:4x4", "cpu"),
  "slices": Setting(
    "number per run, connected by the data center network", 1, int
  ),
  "workers": Setting("processes per run on cpu, nodes per run on gpu", 1, int),
  "gpus": Setting("number of GPUs per node; a run uses all of them", 1, int),
  "address": Setting(
    "address of the cluster (default: this one), or local for a new one"
  ),
  "max_restarts": Setting(
    "restarts per run; a node that is preempted counts", 50, int, least=0
  ),
}


class RunError(RuntimeError):
  """A worker ended without finishing its run; Ray may try again."""


def plan(
  runs: Sequence[grid.Run], folder: str, settings: types.SimpleNamespace
) -> launchers.Launch:
  """The workers of each run, and what they do."""
  gang = _gang(parse(settings))
  commands = [shlex.join(worker.command(folder, run.name)) for run in runs]
  return launchers.Launch(commands=[f"{gang} {text}" for text in commands])


def start(
  runs: Sequence[grid.Run], folder: str, settings: types.SimpleNamespace
) -> int:
  """Trains all runs that are not done; 0 once all of them are."""
  settings, options = parse(settings), settings.options
  todo = launchers.todo(runs, folder, options)
  ray = _import("ray")
  # Keep the working directory, so that relative paths of the configuration
  # work.
  os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
  connected = ray.is_initialized()
  if not connected:
    new = settings.address == "local"
    ray.init(settings.address, **(dict(include_dashboard=False) if new else {}))
  pool = concurrent.futures.ThreadPoolExecutor(options.max_parallel)
  try:
    started = [pool.submit(_train, run.name, folder, settings) for run in todo]
    for future in concurrent.futures.as_completed(started):
      future.result()
  finally:
    # Runs that are left when this thread is interrupted end with Ray.
    pool.shutdown(wait=False, cancel_futures=True)
    if not connected:
      ray.shutdown()
  done = [state_lib.read(epath.Path(folder) / run.name) for run in todo]
  return 0 if all(state.status == state_lib.DONE for state in done) else 1


def require() -> None:
  """Refuses a launch without Ray."""
  for name in ("ray", "ray.train", "ray.train.v2.jax"):
    _import(name)


def parse(settings: types.SimpleNamespace) -> types.SimpleNamespace:
  """The settings of a launch, with `tpu`, the slice or None."""
  given, values = settings.options.settings, settings
  values.tpu = None
  if values.accelerator not in ("cpu", "gpu"):
    values.tpu = slices.parse(
      "accelerator", values.accelerator, "ray_accelerator"
    )
  for name, used in (
    ("slices", values.tpu is not None),
    ("workers", values.tpu is None),
    ("gpus", values.accelerator == "gpu"),
  ):
    if name in given and not used:
      accepted = f"no such setting with {values.accelerator}"
      settings_lib.fail(name, given[name], accepted)
  return values


def _train(name: str, folder: str, settings: types.SimpleNamespace) -> None:
  """Trains one run, including restarts."""
  ray_train, ray_jax = _import("ray.train"), _import("ray.train.v2.jax")
  cpu = settings.accelerator == "cpu"
  trainer = ray_jax.JaxTrainer(
    _work,
    train_loop_config={"folder": folder, "name": name},
    # Without the first flag, Ray would not connect workers on cpu.
    jax_config=ray_jax.JaxConfig(
      use_tpu=settings.accelerator != "gpu",
      use_gpu=settings.accelerator == "gpu",
    ),
    scaling_config=ray_train.ScalingConfig(**_scaling(settings)),
    run_config=ray_train.RunConfig(
      name=name,
      storage_path=f"{folder}/ray",
      failure_config=ray_train.FailureConfig(
        max_failures=settings.max_restarts
      ),
      worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"} if cpu else {}},
    ),
  )
  try:
    end = state_lib.OF_EXIT[exits.Exit(trainer.fit().return_value)]
  except Exception as error:  # Affects one run; the others continue.
    state = state_lib.read(epath.Path(folder) / name)
    last = str(error).strip().rpartition("\n")[2]
    end = f"failed: {state.error or last or type(error).__name__}"
  print(f"{name}: {end}", flush=True)


def _work(config: Mapping[str, str]) -> int:
  """The work of each worker of a gang, which Ray has connected."""
  place = config["folder"], config["name"]
  try:
    result = work.run(*place, launchers.PATIENCE_SECONDS)
  except config_lib.ConfigError as error:
    print(f"error: {error}")
    return exits.Exit.NEVER
  if result in (exits.Exit.AGAIN, exits.Exit.STOPPED):
    raise RunError(f"{config['name']}: {state_lib.OF_EXIT[result]}")
  return result


def _gang(settings: types.SimpleNamespace) -> str:
  """The workers of a run in words, for a dry run, which needs no Ray."""
  if settings.tpu is not None:
    hosts = settings.slices * settings.tpu.hosts
    return f"{hosts} x {settings.accelerator}:"
  each = f"{settings.gpus} " if settings.accelerator == "gpu" else ""
  return f"{settings.workers} x {each}{settings.accelerator}:"


def _scaling(settings: types.SimpleNamespace) -> dict[str, Any]:
  """Arguments of Ray's `ScalingConfig`: how many workers, and on what."""
  if settings.tpu is not None:
    kind, shape = settings.tpu.ray_accelerator, settings.tpu.shape
    workers, resources = _import("ray.util.tpu").get_tpu_worker_resources(
      topology=shape, accelerator_type=kind, num_slices=settings.slices
    )
    return dict(
      use_tpu=True,
      accelerator_type=kind,
      topology=shape,
      num_workers=workers,
      resources_per_worker=resources,
    )
  if settings.accelerator == "gpu":
    # Ray numbers a worker's devices from zero, so it needs the node for itself.
    return dict(
      use_gpu=True,
      num_workers=settings.workers,
      resources_per_worker={"GPU": settings.gpus},
      placement_strategy="STRICT_SPREAD",
    )
  return dict(num_workers=settings.workers, resources_per_worker={"CPU": 1})


def _import(name: str) -> Any:
  """Imports a module of Ray."""
  try:
    return importlib.import_module(name)
  except ImportError as error:
    raise config_lib.ConfigError(
      f"--launcher=ray: {error}; pip install 'attnres-jax[ray]'"
    ) from error

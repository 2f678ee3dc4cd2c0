# SPDX-License-Identifier: Apache-2.0
"""Several budgets from one run: branches of a warm-up, stable, decay schedule.

Until its decay, a run whose rate decays only at the end (`wsd`) is identical to
any longer run of the same kind: same data, same rates, same parameters. So a
longer run, the trunk, keeps checkpoints along its stable phase, and a branch
starts from the checkpoint at which its own decay begins, rather than at step 0.

A branch without such a checkpoint trains all of its steps, with the same result
(bit for bit on CPU). That is also what happens in object stores, where
checkpoints are not copied.
"""

import shutil

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax import optimizer
from attnres_jax.common import files
from attnres_jax.scaling import grid
from attnres_jax.sweep import damage
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import state as state_lib
from attnres_jax.train import checkpoint
from attnres_jax.train import run_folder

_ENDED = (state_lib.DONE, state_lib.FAILED, state_lib.DAMAGED)


def is_ready(folder: epath.PathLike, run: grid.Run) -> bool:
  """Whether the run can start without waiting for its trunk."""
  folder = epath.Path(folder)
  if not run.branch_of or files.is_remote(folder):
    return True
  if checkpoint.all_steps(folder / run.name):
    return True
  if _checkpoint(folder, run) is not None:
    return True
  trunk = folder / run.branch_of
  return state_lib.read(trunk).status in _ENDED


def start(folder: epath.PathLike, run: grid.Run) -> int:
  """Copies the trunk's checkpoint to a run that has not begun.

  Returns:
    The step of the checkpoint; 0 without one, or if the run has begun.

  Raises:
    ConfigError: until its decay the run differs from its trunk.
  """
  folder = epath.Path(folder)
  workdir = folder / run.name
  if not run.branch_of or files.is_remote(folder):
    return 0
  try:
    check(folder_lib.read_run(folder, run.branch_of), run)
  except damage.DamagedError:
    return 0
  found = _checkpoint(folder, run)
  if found is None or checkpoint.all_steps(workdir):
    return 0
  trunk, target = folder / run.branch_of, workdir / checkpoint.CHECKPOINTS
  config = folder_lib.run_config(run)
  run_folder.refuse_foreign("--folder", workdir)
  files.write(workdir / "config.json", config_lib.to_json(config))
  shutil.copyfile(trunk / "data.json", workdir / "data.json")
  target.mkdir(exist_ok=True)
  # Under its name only when it is complete, like every checkpoint.
  temporary = workdir / "branch.tmp"
  shutil.rmtree(temporary, ignore_errors=True)
  shutil.copytree(found, temporary)
  temporary.rename(target / found.name)
  return int(found.name)


def check(trunk: grid.Run, run: grid.Run) -> None:
  """Whether a run is a branch of another.

  Raises:
    ConfigError: it is not; says why.
  """
  long, short = folder_lib.run_config(trunk), folder_lib.run_config(run)
  differing = config_lib.differences(
    config_lib.to_dict(long), config_lib.to_dict(short)
  )
  bad = [
    field
    for field in differing
    if field != "train.steps" and not run_folder.is_harmless(field)
  ]
  if bad or _parting(long) < _parting(short):
    raise config_lib.ConfigError(
      f"{run.name}: not a branch of {trunk.name}, "
      + (
        f"which differs in {', '.join(bad)}"
        if bad
        else "which decays at an earlier step"
      )
    )


def _checkpoint(folder: epath.Path, run: grid.Run) -> epath.Path | None:
  """The trunk's checkpoint from where the run's own decay starts."""
  step = _parting(folder_lib.run_config(run))
  trunk = folder / run.branch_of
  if step not in checkpoint.all_steps(trunk):
    return None
  return trunk / checkpoint.CHECKPOINTS / str(step)


def _parting(config: config_lib.RunConfig) -> int:
  """The step up to which nothing depends on the length of the run."""
  return int(optimizer.settled_steps(config.optim, config.train.steps))

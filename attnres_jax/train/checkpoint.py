# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: saved asynchronously, verified when they are read.

  python -m attnres_jax.train.checkpoint verify --workdir=runs/tiny

`orbax_io` writes and reads the arrays, and a JSON object with them: data
position, resolved configuration, and whatever the caller adds. A checkpoint
gets its final name only when it is complete, so a kill during a save leaves the
previous one.

This module adds `checksums` of all files, written before a checkpoint gets its
name and compared before it is read, and recovery: if the newest checkpoint
cannot be read or has changed, the previous one is used. Once an older one has
been read, the unreadable ones are moved to `checkpoints_set_aside/` together
with the cause. A broken checkpoint is never deleted, and if none can be read,
nothing is moved.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import gc
import json
import logging
import sys
import time
from typing import Any, TypeVar

from etils import epath
import jax

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax import train
from attnres_jax.common import command_line
from attnres_jax.common import files
from attnres_jax.common import processes
from attnres_jax.common import sharding
from attnres_jax.common import trees
from attnres_jax.train import checksums
from attnres_jax.train import orbax_io
from attnres_jax.train import train_state

CHECKPOINTS = train.CHECKPOINTS
SET_ASIDE = "checkpoints_set_aside"
Shapes = orbax_io.Shapes
all_steps = orbax_io.all_steps
# A store that fails for a moment must not cost a good checkpoint.
_REMOTE_PAUSES = 10.0, 60.0
_T = TypeVar("_T")


class CheckpointError(config_lib.RunError):
  """No checkpoint can be used, and continuing would silently lose work."""


@dataclasses.dataclass(frozen=True)
class Restored:
  """A checkpoint that was read.

  Attributes:
    step: steps completed when it was saved.
    state: the tree, with the shapes and shardings that were requested.
    info: the JSON object saved with it.
    unreadable: newer steps that could not be read, with the cause of each.
  """

  step: int
  state: Any
  info: dict[str, Any]
  unreadable: dict[int, str]


def restore_latest(
  workdir: epath.PathLike, abstract_state: Any
) -> Restored | None:
  """Reads the newest readable checkpoint; None if there are no checkpoints.

  Unreadable ones are moved to `checkpoints_set_aside/`. All processes of a run
  must call this together, and agree on the same step. `abstract_state` consists
  of `jax.ShapeDtypeStruct`s with the shardings to restore to.

  Raises:
    CheckpointError: there are checkpoints, but none can be read, or one was
      written by a model with other shapes.
  """
  # Other processes may see an outdated folder.
  steps = json.loads(processes.text_of_first(json.dumps(all_steps(workdir))))
  unreadable: dict[int, str] = {}
  for step in _attempts(workdir, steps):
    result, cause = _try_reading(
      lambda step=step: _read(
        workdir,
        step,
        trees.to_flat(abstract_state),
        share=(jax.process_index(), jax.process_count()),
      ),
      passing=CheckpointError,
    )
    if processes.all_hold(result is not None) and result is not None:
      flat, info = result
      unreadable.pop(step, None)  # An earlier attempt failed.
      unreadable |= orbax_io.undescribed(workdir, steps[: steps.index(step)])
      _set_aside(workdir, unreadable)
      state = trees.from_flat(abstract_state, flat)
      return Restored(step, state, info, unreadable)
    unreadable[step] = cause or "another process could not read it"
  if unreadable:
    raise CheckpointError(
      f"no checkpoint of {workdir} can be read: {_listing(unreadable)};"
      " nothing was moved or deleted"
    )
  return None


def _attempts(workdir: epath.PathLike, steps: Sequence[int]) -> Iterator[int]:
  """The steps, newest first; in a store each several times, with pauses."""
  pauses = _REMOTE_PAUSES if files.is_remote(workdir) else ()
  for step in reversed(steps):
    for pause in (0.0, *pauses):
      time.sleep(pause)
      yield step


def load_model(
  workdir: epath.PathLike,
  step: int | None = None,
  mesh: jax.sharding.Mesh | None = None,
  average: bool = True,
) -> tuple[config_lib.RunConfig, models.Transformer]:
  """The configuration and trained model of a run.

  Args:
    workdir: of the run.
    step: which checkpoint; None for the newest readable one.
    mesh: over which the model is sharded as in training; the default device
      without one. With several processes, all of them call this, with a step.
    average: take the averaged weights once there are any, as evaluations do.

  Raises:
    CheckpointError: there is no such checkpoint, or it cannot be read.
  """
  steps = all_steps(workdir)
  if step is not None and step not in steps:
    raise CheckpointError(f"no checkpoint of step {step} in {workdir}: {steps}")
  unreadable: dict[int, str] = {}
  for candidate in reversed(steps if step is None else [step]):
    result, unreadable[candidate] = _try_reading(
      lambda step=candidate: _read_model(workdir, step, mesh, average)
    )
    if result is not None:
      return result
    logging.warning(
      "checkpoint %d of %s cannot be read: %s",
      candidate,
      workdir,
      unreadable[candidate],
    )
  raise CheckpointError(
    f"no readable checkpoint in {workdir}: {_listing(unreadable) or 'none'}"
  )


def describe(
  workdir: epath.PathLike, step: int
) -> tuple[dict[str, Any], Shapes]:
  """The JSON object saved with a checkpoint, and shapes of arrays by path.

  Raises:
    CheckpointError: it cannot be read.
  """
  return _readable(workdir, step, lambda: _describe(workdir, step))


def read(
  workdir: epath.PathLike, step: int, abstract: Mapping[str, Any]
) -> dict[str, Any]:
  """Some arrays of a checkpoint, by path.

  `abstract` has a `jax.ShapeDtypeStruct` for each, with its sharding.

  Raises:
    CheckpointError: it cannot be read, or has no such array of this shape.
  """
  share = jax.process_index(), jax.process_count()
  return _readable(
    workdir, step, lambda: _read(workdir, step, abstract, share, some=True)[0]
  )


def newest_info(workdir: epath.PathLike) -> dict[str, Any] | None:
  """The JSON object saved with the newest readable checkpoint."""
  for step in _attempts(workdir, all_steps(workdir)):
    described, _ = _try_reading(lambda step=step: _describe(workdir, step))
    if described is not None:
      return described[0]
  return None


def verify(workdir: epath.PathLike) -> dict[int, list[str] | None]:
  """Each step with its damaged files; None if there are no checksums."""
  folder = orbax_io.checkpoints(workdir)
  return {
    step: checksums.damage(folder / str(step)) for step in all_steps(workdir)
  }


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns 1 if a checkpoint is damaged."""
  parser = command_line.Parser(
    "python -m attnres_jax.train.checkpoint",
    "Compares checkpoints with the checksums that were written with them.",
  )
  parser.add_argument("command", choices=["verify"])
  parser.add_argument("--workdir", required=True, help="of the run")
  options = parser.parse_args(argv)
  return command_line.run(_verify, options.workdir)


def _verify(workdir: str) -> int:
  damages = verify(workdir)
  if not damages:
    raise config_lib.ConfigError(
      f"--workdir: got {workdir!r}, expected a run with checkpoints"
    )
  for step, reasons in damages.items():
    if reasons is None:
      print(f"step {step}: unverified, saved without {checksums.FILE}")
    elif not reasons:
      print(f"step {step}: ok")
    for reason in reasons or ():
      print(f"step {step}: damaged, {reason}")
  return int(any(damages.values()))


def _read(
  workdir: epath.PathLike,
  step: int,
  abstract: Mapping[str, Any],
  share: tuple[int, int] = (0, 1),
  some: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Arrays and JSON of one checkpoint, compared with its checksums if any.

  The requested arrays are flat; unless they are `some` of the arrays, there may
  be no others. `share` is the index of this process, and how many processes
  verify together.

  Raises:
    Exception: the one that orbax raised, or `checksums.DamageError`.
  """
  path = _folder(workdir, step)
  parts = orbax_io.split(abstract)
  damage = checksums.damage(path, tuple(parts), share)
  if damage:
    raise checksums.DamageError(damage[0])
  with orbax_io.unsynced(some):
    info, stored = orbax_io.describe(path, tuple(parts))
    if some:
      stored = {name: stored[name] for name in abstract if name in stored}
    _check_same_shapes(path, stored, abstract)
    loaded = jax.block_until_ready(orbax_io.load(path, parts))
  return loaded, info


def _check_same_shapes(
  path: epath.Path, old: Shapes, leaves: Mapping[str, Any]
) -> None:
  """Refuses a readable checkpoint of another model; that is not damage."""
  new = {name: tuple(leaf.shape) for name, leaf in leaves.items()}
  changed = sorted(name for name in old | new if old.get(name) != new.get(name))
  if changed:
    name = changed[0]
    raise CheckpointError(
      f"checkpoint {path} was written by another model: {len(changed)}"
      f" arrays differ, such as {name}: {old.get(name, 'absent')} there,"
      f" {new.get(name, 'absent')} here"
    )


def _read_model(
  workdir: epath.PathLike,
  step: int,
  mesh: jax.sharding.Mesh | None,
  average: bool,
) -> tuple[Any, Any]:
  config = config_lib.build_run_config(_describe(workdir, step)[0]["config"])
  abstract = jax.eval_shape(lambda: models.build_model(config.model))
  share = 0, 1
  if mesh is None:
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    places = jax.tree.map(lambda _: device, abstract)
  else:
    places = sharding.state_sharding(abstract, mesh)
    share = jax.process_index(), jax.process_count()
  average = average and train_state.has_average(config.train, step)
  prefix = "average/" if average else orbax_io.MODEL_PREFIX
  leaves = {
    prefix + name: leaf
    for name, leaf in trees.to_flat(
      sharding.with_sharding(abstract, places)
    ).items()
  }
  flat, _ = _read(workdir, step, leaves, share, some=average)
  flat = {name.removeprefix(prefix): a for name, a in flat.items()}
  return config, trees.from_flat(abstract, flat)


def _folder(workdir: epath.PathLike, step: int) -> epath.Path:
  return orbax_io.checkpoints(workdir) / str(step)


def _describe(
  workdir: epath.PathLike, step: int
) -> tuple[dict[str, Any], Shapes]:
  path = _folder(workdir, step)
  if damage := checksums.damage(path, ()):
    raise checksums.DamageError(damage[0])
  with orbax_io.unsynced():
    return orbax_io.describe(path)


def _readable(workdir: epath.PathLike, step: int, read: Callable[[], _T]) -> _T:
  result, cause = _try_reading(read, passing=CheckpointError)
  if result is None:
    raise CheckpointError(
      f"checkpoint {_folder(workdir, step)} cannot be read: {cause}"
    )
  return result


def _try_reading(
  read: Callable[[], _T],
  passing: type[Exception] | tuple[type[Exception], ...] = (),
) -> tuple[_T | None, str]:
  """What `read` returns, or None and, in one line, which exception it raised.

  A failed read of Orbax leaves coroutines behind that print long warnings when
  they are garbage-collected. They are collected here, while Orbax is silent:
  not before the exception, whose frames refer to them, is gone.
  """
  with orbax_io.quiet():
    try:
      return read(), ""
    except passing:
      raise
    except Exception as error:
      cause = orbax_io.one_line(error)
    gc.collect()
  return None, cause


def _set_aside(workdir: epath.PathLike, unreadable: Mapping[int, str]) -> None:
  """Renames broken checkpoints and writes the cause beside each."""
  if unreadable and processes.is_first():
    target = epath.Path(workdir) / SET_ASIDE
    target.mkdir(parents=True, exist_ok=True)
    for step, cause in unreadable.items():
      count = len(files.glob(target, f"{step}.*.txt"))
      source = epath.Path(workdir) / CHECKPOINTS / str(step)
      files.write(target / f"{step}.{count}.txt", cause + "\n")
      source.rename(target / f"{step}.{count}")
  processes.wait("checkpoints set aside")


def _listing(unreadable: Mapping[int, str]) -> str:
  return "; ".join(f"{step}: {cause}" for step, cause in unreadable.items())


if __name__ == "__main__":
  sys.exit(main())

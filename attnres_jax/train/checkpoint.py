# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: saved asynchronously, verified when they are read.

  python -m attnres_jax.train.checkpoint verify --workdir=runs/tiny

Orbax (the v1 training API) writes and reads the arrays; no other module uses
it. A tree is stored as a flat dict {path: array}, with the model separate from
the rest, so that weights can be read without the optimiser. A JSON object is
stored with the arrays: data position, resolved configuration, and whatever the
caller adds. A checkpoint gets its final name only when it is complete, so a
kill during a save leaves the previous one.

This module adds `checksums` of all files, written before a checkpoint gets its
name and compared while it is read, and recovery: if the newest checkpoint
cannot be read or has changed, the previous one is used. Once an older one has
been read, the unreadable ones are moved to `checkpoints_set_aside/` together
with the cause. A broken checkpoint is never deleted, and if none can be read,
nothing is moved.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import gc
import glob
import json
import logging
import os
import re
import sys
import time
from typing import Any
import warnings

from absl import logging as absl_logging
from etils import epath
import jax
from jax.experimental import multihost_utils
import numpy as np
import orbax.checkpoint
from orbax.checkpoint import v1 as ocp

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax import train
from attnres_jax.common import command_line
from attnres_jax.common import files
from attnres_jax.common import sharding
from attnres_jax.common import trees
from attnres_jax.train import checksums
from attnres_jax.train import old_names
from attnres_jax.train import orbax_s3
from attnres_jax.train import train_state

CHECKPOINTS = train.CHECKPOINTS
SET_ASIDE = "checkpoints_set_aside"
_MODEL_PREFIX = "model/"
_PARTS = "model", "training"
Shapes = dict[str, tuple[int, ...]]
# A store that fails for a moment must not cost a good checkpoint.
_REMOTE_PAUSES = 10.0, 60.0
# Of a save with its checksums, which the first process reads back: the 48B
# network's 600 GB.
_SAVE_SECONDS = 4 * 3600
# Of Orbax's older interface: it lists steps without reading their metadata.
_NAMES = orbax.checkpoint.path.step.standard_name_format()


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
    verified: whether there were checksums to compare with.
  """

  step: int
  state: Any
  info: dict[str, Any]
  unreadable: dict[int, str]
  verified: bool


_Path: Any = type(epath.Path())


@epath.register_path_cls
class _Folder(_Path):
  """A folder in which `glob` takes only its argument for a pattern.

  epath takes the folder's own name for a pattern, too. Orbax looks for the
  arrays of each process by `glob`, and below a local `run[1]` it would commit
  checkpoints without arrays, and say nothing. `epath.Path`, with which Orbax
  converts paths, returns instances of a registered class unchanged.
  """

  def glob(self, pattern: str) -> Iterator["_Folder"]:
    if files.is_remote(self):
      yield from super().glob(pattern)
    else:
      names = glob.glob(pattern, root_dir=self)
      yield from (self / name for name in names)


class Saver:
  """Writes checkpoints of one run; a context manager.

  Open it after `restore_latest`, because it deletes unfinished saves.

  Attributes:
    last_step: of the last save, finished or not; None if there is none.
    writing: whether a save is being written, as the first process sees it.
  """

  def __init__(
    self,
    workdir: epath.PathLike,
    config: config_lib.CheckpointConfig,
    seconds: int = _SAVE_SECONDS,
  ):
    keep = ocp.training.preservation_policies
    policies: list[Any] = [keep.LatestN(config.keep_last)]
    if config.keep_every:
      policies.append(keep.EveryNSteps(config.keep_every))
    # Any: orbax's annotations of policies are too narrow.
    policy: Any = keep.AnyPreservationPolicy(policies)
    self._asynchronous = config.asynchronous
    # A failed save is raised here, so its tracebacks in the log are noise.
    logging.getLogger("absl").addFilter(_is_not_orbax)
    self._folder = _checkpoints(workdir)
    # Orbax calls this on the first process, after all have written their part
    # and before the checkpoint gets its name. (It copies a bound method, with
    # all that it is bound to.)
    options = ocp.options.AsyncOptions(
      timeout_secs=seconds,
      post_finalization_callback=lambda: self._write_checksums(),
    )
    with _quiet():
      self._checkpointer = ocp.training.Checkpointer(
        self._folder,
        context=ocp.Context(async_options=options),
        preservation_policy=policy,
        cleanup_tmp_directories=True,
      )
    latest = self._checkpointer.latest
    self.last_step = None if latest is None else latest.step
    self.writing = False
    self._under_way: Any = None
    self._info: dict[str, Any] = {}
    self._last_bytes = 0
    if latest is not None and jax.process_index() == 0:
      self._last_bytes = checksums.num_bytes(self._folder / str(latest.step))

  def __enter__(self) -> "Saver":
    return self

  def __exit__(self, *unused) -> None:
    self.close()

  def save(self, step: int, state: Any, info: Mapping[str, Any]) -> None:
    """Starts a save, after the previous one has finished.

    Arrays are copied before this returns, so the state may be donated. If a
    save fails in the background, the next call (or `wait`, `close`) raises.

    Args:
      step: steps completed.
      state: a tree of jax arrays.
      info: a JSON object.

    Raises:
      DiskFullError: there is less room than the last save took.
    """
    self.wait()
    files.check_space(self._folder / str(step), self._last_bytes)
    self.last_step = step
    self._info = json.loads(json.dumps(dict(info)))
    self.writing = True
    with self._explaining():
      self._under_way = self._checkpointer.save_checkpointables_async(
        step,
        _split(trees.to_flat(state)),
        custom_metadata=self._info,
        force=True,
      )
    if not self._asynchronous:
      self.wait()

  def wait(self) -> None:
    """Blocks until everything is on disk."""
    under_way, self._under_way = self._under_way, None
    with self._explaining():
      if under_way is not None:
        # The thread that waits for a save, and its event loop, end only here.
        under_way.result()
      self._checkpointer.wait()

  def close(self) -> None:
    with contextlib.ExitStack() as stack:
      absl_logger = logging.getLogger("absl")
      stack.callback(absl_logger.removeFilter, _is_not_orbax)
      stack.enter_context(self._explaining())
      stack.callback(self._checkpointer.close)
      self.wait()

  def _write_checksums(self) -> None:
    # A temporary folder on disks; object stores have the final one.
    final = self._folder / str(self.last_step)
    names = sorted(one.name for one in self._folder.iterdir())
    begins = (name for name in names if name.startswith(f"{final.name}."))
    folder = self._folder / next(begins, final.name)
    checksums.write(folder, self._info)
    self._last_bytes = checksums.num_bytes(folder)
    self.writing = False

  def _explaining(self) -> contextlib.AbstractContextManager[None]:
    return files.explaining_full_disk(
      self._folder / str(self.last_step), self._last_bytes or None
    )


def all_steps(workdir: epath.PathLike) -> list[int]:
  """Steps with a committed checkpoint, oldest first; contents unverified."""
  folder = _checkpoints(workdir)
  if not folder.is_dir():
    return []
  with _quiet():
    return sorted(found.step for found in _NAMES.find_all(folder))


def restore_latest(
  workdir: epath.PathLike, abstract_state: Any
) -> Restored | None:
  """Reads the newest readable checkpoint; None if there are no checkpoints.

  Unreadable ones are moved to `checkpoints_set_aside/`. All processes of a run
  must call this together, and agree on the same step.

  Args:
    workdir: of the run.
    abstract_state: `jax.ShapeDtypeStruct`s with the shardings to restore to.

  Raises:
    CheckpointError: there are checkpoints, but none can be read, or one was
      written by a model with other shapes.
  """
  steps = _agreed_steps(workdir)
  unreadable: dict[int, str] = {}
  for step in _attempts(workdir, steps):
    result, cause = None, "another process could not read it"
    with _quiet():
      try:
        result = _read(
          workdir,
          step,
          trees.to_flat(abstract_state),
          share=(jax.process_index(), jax.process_count()),
        )
      except CheckpointError:
        raise
      except Exception as error:
        cause = _one_line(error)
      gc.collect()
    if all_processes_agree(result is not None) and result is not None:
      flat, info, verified = result
      unreadable.pop(step, None)  # An earlier attempt failed.
      unreadable |= _undescribed(workdir, steps[: steps.index(step)])
      _set_aside(workdir, unreadable)
      state = trees.from_flat(abstract_state, flat)
      return Restored(step, state, info, unreadable, verified)
    unreadable[step] = cause
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
    with _quiet():
      try:
        return _read_model(workdir, candidate, mesh, average)
      except Exception as error:
        unreadable[candidate] = _one_line(error)
      gc.collect()
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
  path = _folder(workdir, step)
  with _quiet(), _alone(), _explaining_damage(path):
    info, there = _describe(path)
    return info, old_names.joined_shapes(there)


def read(
  workdir: epath.PathLike, step: int, abstract: Mapping[str, Any]
) -> dict[str, Any]:
  """Some arrays of a checkpoint, by path.

  Args:
    workdir: of the run.
    step: of the checkpoint.
    abstract: path -> `jax.ShapeDtypeStruct` with the sharding to restore to.

  Raises:
    CheckpointError: it cannot be read, or has no such array of this shape.
  """
  path = _folder(workdir, step)
  share = jax.process_index(), jax.process_count()
  with _quiet(), _explaining_damage(path):
    return _read(workdir, step, abstract, share, some=True)[0]


def newest_info(workdir: epath.PathLike) -> dict[str, Any] | None:
  """The JSON object saved with the newest readable checkpoint."""
  for step in _attempts(workdir, all_steps(workdir)):
    path = _folder(workdir, step)
    with _quiet(), _alone(), contextlib.suppress(Exception):
      checksums.check_metadata(path)
      return _describe(path)[0]
  return None


def verify(workdir: epath.PathLike) -> dict[int, list[str] | None]:
  """Each step with its damaged files; None if there are no checksums."""
  folder = _checkpoints(workdir)
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
  found = verify(workdir)
  if not found:
    raise config_lib.ConfigError(
      f"--workdir: got {workdir!r}, expected a run with checkpoints"
    )
  for step, reasons in found.items():
    if reasons is None:
      print(f"step {step}: unverified, saved without {checksums.FILE}")
    elif not reasons:
      print(f"step {step}: ok")
    for reason in reasons or ():
      print(f"step {step}: damaged, {reason}")
  return int(any(found.values()))


def _split(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """The parts of a checkpoint: weights, and what only training needs."""
  parts: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
  for name, leaf in flat.items():
    if name.startswith(_MODEL_PREFIX):
      parts["model"][name.removeprefix(_MODEL_PREFIX)] = leaf
    else:
      parts["training"][name] = leaf
  return {part: leaves for part, leaves in parts.items() if leaves}


def _join(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
  flat = dict(parts.get("training", {}))
  for name, leaf in parts.get("model", {}).items():
    flat[_MODEL_PREFIX + name] = leaf
  return flat


def _read(
  workdir: epath.PathLike,
  step: int,
  abstract: Mapping[str, Any],
  share: tuple[int, int] = (0, 1),
  some: bool = False,
) -> tuple[dict[str, Any], dict[str, Any], bool]:
  """Arrays and JSON of one checkpoint, and whether they were verified.

  Args:
    workdir: of the run.
    step: of the checkpoint.
    abstract: the requested arrays, flat.
    share: index of this process, and how many processes verify together.
    some: of the arrays; otherwise there may be no others.

  Raises:
    Exception: the one that orbax raised, or `checksums.DamageError`.
  """
  path = _folder(workdir, step)
  parts = _split(abstract)
  with (
    _quiet(),
    _alone(some),
    checksums.verifying(path, tuple(parts), *share) as verified,
  ):
    info, there = _describe(path, tuple(parts))
    stored = old_names.joined_shapes(there)
    if some:
      stored = {name: stored[name] for name in abstract if name in stored}
    _check_same_shapes(path, stored, abstract)
    parts = _split(old_names.split(abstract, there))
    loaded = _join(ocp.load_checkpointables(path, parts))
    loaded = old_names.join(loaded, abstract)
    jax.block_until_ready(loaded)
  return loaded, info, verified


def _describe(
  path: epath.Path, parts: Sequence[str] = ()
) -> tuple[dict[str, Any], Shapes]:
  """See `describe`; shapes as stored, of these parts or else of all."""
  metadata: Any = ocp.checkpointables_metadata(path)
  if not metadata.custom_metadata:
    raise ValueError("its _CHECKPOINT_METADATA is missing or damaged")
  stored = metadata.metadata
  parts = parts or [part for part in _PARTS if part in stored]
  for part in parts:
    # Orbax logs why, which `_quiet` silences, and returns None.
    if stored.get(part) is None:
      damage = checksums.damage(path) or [f"{part}: arrays cannot be listed"]
      raise checksums.DamageError(damage[0])
  flat = _join({part: stored[part] for part in parts})
  shapes = {name: tuple(leaf.shape) for name, leaf in flat.items()}
  return dict(metadata.custom_metadata), shapes


def _check_same_shapes(
  path: epath.Path, old: Shapes, wanted: Mapping[str, Any]
) -> None:
  """Refuses a readable checkpoint of another model; that is not damage."""
  new = {name: tuple(leaf.shape) for name, leaf in wanted.items()}
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
  config = config_lib.build_run_config(describe(workdir, step)[0]["config"])
  abstract = jax.eval_shape(lambda: models.build_model(config.model))
  share = 0, 1
  if mesh is None:
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    places = jax.tree.map(lambda _: device, abstract)
  else:
    places = sharding.state_sharding(abstract, mesh)
    share = jax.process_index(), jax.process_count()
  average = average and train_state.has_average(config.train, step)
  prefix = "average/" if average else _MODEL_PREFIX
  wanted = {
    prefix + name: leaf
    for name, leaf in trees.to_flat(
      sharding.with_sharding(abstract, places)
    ).items()
  }
  flat, _, verified = _read(workdir, step, wanted, share, some=average)
  if not verified:
    logging.warning("checkpoint %d of %s is unverified", step, workdir)
  flat = {name.removeprefix(prefix): a for name, a in flat.items()}
  return config, trees.from_flat(abstract, flat)


def _folder(workdir: epath.PathLike, step: int) -> epath.Path:
  return _checkpoints(workdir) / str(step)


def _checkpoints(workdir: epath.PathLike) -> epath.Path:
  folder = _Folder(files.absolute(workdir), CHECKPOINTS)
  if str(folder).startswith("s3://"):
    orbax_s3.teach()
  return folder


@contextlib.contextmanager
def _explaining_damage(path: epath.Path) -> Iterator[None]:
  try:
    yield
  except CheckpointError:
    raise
  except Exception as error:
    raise CheckpointError(
      f"checkpoint {path} cannot be read: {_one_line(error)}"
    ) from error


def _undescribed(
  workdir: epath.PathLike, steps: Sequence[int]
) -> dict[int, str]:
  """Steps whose metadata Orbax cannot parse: with one, it saves no other."""
  folder = _checkpoints(workdir)
  causes = {}
  for step in steps:
    with _quiet():
      try:
        metadata = _NAMES.find_step(folder, step)
        _ = metadata.commit_timestamp_nsecs
      except Exception as error:
        causes[step] = _one_line(error)
  return causes


def _set_aside(workdir: epath.PathLike, unreadable: Mapping[int, str]) -> None:
  """Renames broken checkpoints and writes the cause beside each."""
  if unreadable and jax.process_index() == 0:
    target = epath.Path(workdir) / SET_ASIDE
    target.mkdir(parents=True, exist_ok=True)
    for step, cause in unreadable.items():
      count = len(files.glob(target, f"{step}.*.txt"))
      source = epath.Path(workdir) / CHECKPOINTS / str(step)
      files.write(target / f"{step}.{count}.txt", cause + "\n")
      source.rename(target / f"{step}.{count}")
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices("checkpoints set aside")


def _agreed_steps(workdir: epath.PathLike) -> list[int]:
  """Process 0's listing: other processes may see an outdated folder."""
  steps = all_steps(workdir)
  if jax.process_count() == 1:
    return steps
  padded = np.full((1024,), -1, np.int32)
  newest = steps[-len(padded) :]
  padded[: len(newest)] = newest
  padded = multihost_utils.broadcast_one_to_all(padded)
  return [int(step) for step in padded if step >= 0]


def all_processes_agree(ok: bool) -> bool:
  """Whether it is true on all processes, which call this together."""
  if jax.process_count() == 1:
    return ok
  return bool(multihost_utils.process_allgather(np.array(ok)).all())


def _alone(some: bool = False) -> ocp.Context:
  """Reads without barriers: a failing process does not block the others."""
  context = ocp.Context()
  context.pytree.loading.partial_load = some
  index = jax.process_index()
  context.multiprocessing.active_processes = {index}
  context.multiprocessing.primary_host = index
  context.multiprocessing.barrier_sync_key_prefix = f"reader_{index}"
  return context


def _is_not_orbax(record: logging.LogRecord) -> bool:
  return f"{os.sep}orbax{os.sep}" not in record.pathname


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Silences orbax while it reads a checkpoint that may be damaged.

  The caller reports the cause in one line. A failed read also leaves coroutines
  behind that print long warnings when they are garbage-collected; the caller
  collects them before it leaves this context.
  """
  level, hook = absl_logging.get_verbosity(), sys.unraisablehook
  absl_logging.set_verbosity(absl_logging.FATAL)
  sys.unraisablehook = lambda _: None
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      yield
  finally:
    sys.unraisablehook = hook
    absl_logging.set_verbosity(level)


def _listing(unreadable: Mapping[int, str]) -> str:
  return "; ".join(f"{step}: {cause}" for step, cause in unreadable.items())


def _one_line(error: BaseException) -> str:
  """The innermost cause, in one short line."""
  logging.debug("A checkpoint cannot be read.", exc_info=error)
  while error.__cause__ is not None:
    error = error.__cause__
  text = re.sub(r"\s+", " ", str(error)).strip()
  text = re.sub(r"\s*\[source locations.*", "", text)
  return f"{type(error).__name__}: {text[:300]}"


if __name__ == "__main__":
  sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Reads and writes arrays of checkpoints by Orbax; no other module imports it.

A tree is stored as a flat dict {path: array}, with the model separate from the
rest, so that weights can be read without the optimiser, and with one JSON
object.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import glob
import logging
import os
import re
import sys
from typing import Any
import warnings

from absl import logging as absl_logging
from etils import epath
import jax
import orbax.checkpoint
from orbax.checkpoint import v1 as ocp

from attnres_jax import config as config_lib
from attnres_jax import train
from attnres_jax.common import files
from attnres_jax.train import checksums
from attnres_jax.train import orbax_s3

MODEL_PREFIX = "model/"
_PARTS = "model", "training"
Shapes = dict[str, tuple[int, ...]]
# Of Orbax's older interface: it lists steps without reading their metadata.
_NAMES = orbax.checkpoint.path.step.standard_name_format()

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


def checkpointer(
  folder: epath.Path,
  config: config_lib.CheckpointConfig,
  seconds: int,
  before_name: Callable[[], None],
) -> Any:
  """An `ocp.training.Checkpointer`, whose saves fail after so many seconds.

  `before_name` is called on the first process, after all have written their
  part and before the checkpoint gets its name. No bound method: Orbax copies
  it, with all that it is bound to.
  """
  preservation = ocp.training.preservation_policies
  policies: list[Any] = [preservation.LatestN(config.keep_last)]
  if config.keep_every:
    policies.append(preservation.EveryNSteps(config.keep_every))
  # Any: orbax's annotations of policies are too narrow.
  policy: Any = preservation.AnyPreservationPolicy(policies)
  options = ocp.options.AsyncOptions(
    timeout_secs=seconds, post_finalization_callback=before_name
  )
  with quiet():
    return ocp.training.Checkpointer(
      folder,
      context=ocp.Context(async_options=options),
      preservation_policy=policy,
      cleanup_tmp_directories=True,
    )


def load(path: epath.Path, parts: dict[str, Any]) -> dict[str, Any]:
  """The arrays of a checkpoint, flat; `parts` as `split` returns them."""
  return _join(ocp.load_checkpointables(path, parts))


def describe(
  path: epath.Path, parts: Sequence[str] = ()
) -> tuple[dict[str, Any], Shapes]:
  """The JSON object, and shapes as stored, of these parts or else of all."""
  metadata: Any = ocp.checkpointables_metadata(path)
  if not metadata.custom_metadata:
    raise ValueError("its _CHECKPOINT_METADATA is missing or damaged")
  stored = metadata.metadata
  parts = parts or [part for part in _PARTS if part in stored]
  for part in parts:
    # Orbax logs why, which `quiet` silences, and returns None.
    if stored.get(part) is None:
      damage = checksums.damage(path) or [f"{part}: arrays cannot be listed"]
      raise checksums.DamageError(damage[0])
  flat = _join({part: stored[part] for part in parts})
  shapes = {name: tuple(leaf.shape) for name, leaf in flat.items()}
  return dict(metadata.custom_metadata), shapes


def all_steps(workdir: epath.PathLike) -> list[int]:
  """Steps with a committed checkpoint, oldest first; contents unverified."""
  folder = checkpoints(workdir)
  if not folder.is_dir():
    return []
  with quiet():
    return sorted(name.step for name in _NAMES.find_all(folder))


def undescribed(
  workdir: epath.PathLike, steps: Sequence[int]
) -> dict[int, str]:
  """Steps whose metadata Orbax cannot parse: with one, it saves no other."""
  folder = checkpoints(workdir)
  causes = {}
  for step in steps:
    with quiet():
      try:
        metadata = _NAMES.find_step(folder, step)
        _ = metadata.commit_timestamp_nsecs
      except Exception as error:
        causes[step] = one_line(error)
  return causes


def checkpoints(workdir: epath.PathLike) -> epath.Path:
  folder = _Folder(files.absolute(workdir), train.CHECKPOINTS)
  if str(folder).startswith("s3://"):
    orbax_s3.teach()
  return folder


def split(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
  """The parts of a checkpoint: weights, and what only training needs."""
  parts: dict[str, dict[str, Any]] = {part: {} for part in _PARTS}
  for name, leaf in flat.items():
    if name.startswith(MODEL_PREFIX):
      parts["model"][name.removeprefix(MODEL_PREFIX)] = leaf
    else:
      parts["training"][name] = leaf
  return {part: leaves for part, leaves in parts.items() if leaves}


def _join(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
  flat = dict(parts.get("training", {}))
  for name, leaf in parts.get("model", {}).items():
    flat[MODEL_PREFIX + name] = leaf
  return flat


def unsynced(some: bool = False) -> ocp.Context:
  """Reads without barriers: a failing process does not block the others."""
  context = ocp.Context()
  context.pytree.loading.partial_load = some
  index = jax.process_index()
  context.multiprocessing.active_processes = {index}
  context.multiprocessing.primary_host = index
  context.multiprocessing.barrier_sync_key_prefix = f"reader_{index}"
  return context


def is_not_orbax(record: logging.LogRecord) -> bool:
  return f"{os.sep}orbax{os.sep}" not in record.pathname


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Silences orbax while it reads a checkpoint that may be damaged.

  The caller reports the cause in one line. A failed read also leaves coroutines
  behind that print long warnings when they are garbage-collected; the caller
  collects them before it leaves this context.
  """
  level, hook = absl_logging.get_verbosity(), sys.unraisablehook
  loops = logging.getLogger("asyncio")
  disabled = loops.disabled
  absl_logging.set_verbosity(absl_logging.FATAL)
  sys.unraisablehook = lambda _: None
  loops.disabled = True
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      yield
  finally:
    sys.unraisablehook = hook
    loops.disabled = disabled
    absl_logging.set_verbosity(level)


def one_line(error: BaseException) -> str:
  """The innermost cause, in one short line."""
  logging.debug("A checkpoint cannot be read.", exc_info=error)
  while error.__cause__ is not None:
    error = error.__cause__
  text = re.sub(r"\s+", " ", str(error)).strip()
  text = re.sub(r"\s*\[source locations.*", "", text)
  return f"{type(error).__name__}: {text[:300]}"

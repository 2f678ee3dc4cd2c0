# SPDX-License-Identifier: Apache-2.0
"""Around the steps of a run: traces for XProf, and no collection of garbage."""

from collections.abc import Iterator
import contextlib
import gc
import pathlib
import shutil
import tempfile
from typing import Any

from etils import epath
import jax

from attnres_jax import config as config_lib
from attnres_jax.common import files

PROFILE = "profile"


@contextlib.contextmanager
def collector_frozen() -> Iterator[None]:
  """A context in which Python's collector skips all objects that exist now.

  A full collection would otherwise visit everything that start-up created
  (modules, programs) from time to time, which stops the host for a second or
  more while the device waits.
  """
  gc.collect()
  gc.freeze()
  try:
    yield
  finally:
    gc.unfreeze()


class Profiler:
  """Writes a trace of some steps to WORKDIR/profile, for XProf.

  View it with `xprof WORKDIR/profile` or TensorBoard's profile plugin. Every
  process traces its own devices.
  """

  def __init__(self, config: config_lib.RunConfig, workdir: epath.PathLike):
    self._steps = config.train.profile_steps
    self._folder = epath.Path(workdir) / PROFILE
    self._temporary: str | None = None

  def step(self, step: int) -> contextlib.AbstractContextManager[Any]:
    """A context that marks a step in the trace; counted from 1."""
    if self._temporary is None:
      return contextlib.nullcontext()
    return jax.profiler.StepTraceAnnotation("train", step_num=step)

  def starts_at(self, step: int) -> bool:
    """Whether a trace starts before this step."""
    return bool(self._steps) and step == self._steps[0]

  def ends_at(self, step: int) -> bool:
    """Whether a running trace ends after this step."""
    return self._temporary is not None and step == self._steps[1]

  def start(self) -> None:
    self._temporary = tempfile.mkdtemp(prefix="attnres_profile_")
    jax.profiler.start_trace(self._temporary)

  def stop(self) -> str:
    """Ends the trace; returns the folder that it is in."""
    assert self._temporary is not None
    jax.profiler.stop_trace()
    temporary, self._temporary = pathlib.Path(self._temporary), None
    for file in temporary.rglob("*"):
      if file.is_file():
        target = self._folder / str(file.relative_to(temporary))
        target.parent.mkdir(parents=True, exist_ok=True)
        files.write(target, file.read_bytes())
    shutil.rmtree(temporary)
    return str(self._folder)

  def close(self) -> None:
    """Drops a trace that did not reach its last step."""
    if self._temporary is not None:
      jax.profiler.stop_trace()
      shutil.rmtree(self._temporary)
      self._temporary = None

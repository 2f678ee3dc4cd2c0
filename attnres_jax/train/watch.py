# SPDX-License-Identifier: Apache-2.0
"""Around the steps of a run: traces for XProf, and no collection of garbage."""

from collections.abc import Iterator
import contextlib
import gc
import pathlib
import shutil
import tempfile

from etils import epath
import jax

from attnres_jax import config as config_lib
from attnres_jax.common import files
from attnres_jax.train import metrics
from attnres_jax.train import step_log

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

  def __init__(
    self,
    config: config_lib.RunConfig,
    workdir: epath.PathLike,
    writer: metrics.Writer,
  ):
    self._steps, self._writer = config.train.profile_steps, writer
    self._folder = epath.Path(workdir) / PROFILE
    self._temporary: str | None = None

  @contextlib.contextmanager
  def step(self, step: int, log: step_log.StepLog) -> Iterator[None]:
    """A context for a step, counted from 1, which the trace may contain."""
    if step in self._steps[:1]:
      with log.paused():
        self._temporary = tempfile.mkdtemp(prefix="attnres_profile_")
        jax.profiler.start_trace(self._temporary)
    if self._temporary is None:
      yield
      return
    with jax.profiler.StepTraceAnnotation("train", step_num=step):
      yield
    if step == self._steps[1]:
      with log.paused():
        self.close()
        self._writer.event(step, "profiled", folder=str(self._folder))

  def close(self) -> None:
    """Ends the trace, whichever step it has reached."""
    if self._temporary is None:
      return
    jax.profiler.stop_trace()
    temporary, self._temporary = pathlib.Path(self._temporary), None
    for file in filter(pathlib.Path.is_file, temporary.rglob("*")):
      target = self._folder / str(file.relative_to(temporary))
      target.parent.mkdir(parents=True, exist_ok=True)
      files.write(target, file.read_bytes())
    shutil.rmtree(temporary)

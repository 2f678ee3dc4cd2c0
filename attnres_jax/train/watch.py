# SPDX-License-Identifier: Apache-2.0
"""Watches the steps of a run: traces for XProf, and the causes of stalls."""

import collections
from collections.abc import Callable, Iterator
import contextlib
import gc
import pathlib
import shutil
import statistics
import tempfile
import time
from typing import Any

from etils import epath
import jax

from attnres_jax import config as config_lib
from attnres_jax.common import files

PROFILE = "profile"

# A step is a stall above this multiple of the median, and this many seconds
# above it.
_TIMES = 3.0
_SECONDS = 0.5
# Steps whose median counts, and the fewest that have one.
_WINDOW, _FEWEST = 100, 10
# The share of the time above the median that makes something the cause.
_SHARE = 0.5


@contextlib.contextmanager
def collector_frozen() -> Iterator["Collector"]:
  """A context in which Python's collector skips all objects that exist now.

  A full collection would otherwise visit everything that start-up created
  (modules, programs) from time to time, which stops the host for a second or
  more while the device waits.
  """
  collector = Collector()
  gc.collect()
  gc.freeze()
  gc.callbacks.append(collector.on_collection)
  try:
    yield collector
  finally:
    gc.callbacks.remove(collector.on_collection)
    gc.unfreeze()


class Collector:
  """Counts the seconds that Python's collector takes."""

  def __init__(self, clock: Callable[[], float] = time.perf_counter):
    self.seconds = 0.0
    self._clock = clock
    self._start = 0.0

  def on_collection(self, phase: str, info: dict[str, int]) -> None:
    """One of `gc.callbacks`."""
    del info
    if phase == "start":
      self._start = self._clock()
    else:
      self.seconds += self._clock() - self._start


class StallWatch:
  """Finds steps that took far longer than the median, and why."""

  def __init__(self, collector: Collector):
    self._collector = collector
    self._collected = collector.seconds
    self._steps: collections.deque[float] = collections.deque(maxlen=_WINDOW)

  def add(
    self, seconds: float, data_wait: float, saving: bool
  ) -> dict[str, Any] | None:
    """A step: what an event says of it if it is a stall, else None.

    Args:
      seconds: that it took.
      data_wait: seconds of these in which it waited for a batch.
      saving: whether a checkpoint was being written.
    """
    collected = self._collector.seconds - self._collected
    self._collected = self._collector.seconds
    usual = None
    if len(self._steps) >= _FEWEST:
      usual = statistics.median(self._steps)
    self._steps.append(seconds)
    if usual is None or seconds < max(_TIMES * usual, usual + _SECONDS):
      return None
    extra = _SHARE * (seconds - usual)
    cause = "unknown: the device, a link or another process"
    if data_wait >= extra:
      cause = "waiting for data"
    elif collected >= extra:
      cause = "Python's collector"
    elif saving:
      cause = "writing a checkpoint"
    return {
      "cause": cause,
      "seconds": seconds,
      "median_seconds": usual,
      "data_wait_seconds": data_wait,
      "collector_seconds": collected,
    }


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

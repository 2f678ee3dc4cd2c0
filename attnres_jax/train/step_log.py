# SPDX-License-Identifier: Apache-2.0
"""Turns metrics on the device into rows without making the device wait.

The metrics of step n are fetched after step n+1 has been dispatched, so the
device always has work while the host reads, logs and waits for data. The time
between two fetches is then the time of a step. Code that needs the numbers
immediately (before an evaluation or a save) drains the log.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import time
from typing import Any

import jax
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import flops
from attnres_jax.common import chips
from attnres_jax.common import exits
from attnres_jax.train import metrics as metrics_lib

# Checked when a step is not finite.
_SUSPECTS = ("loss", "z", "grad_norm")


class NonFiniteError(exits.DivergedError):
  """A loss or gradient was nan or inf, and `train.on_nan` is `stop`."""

  def __init__(self, step: int, cause: str):
    super().__init__(f"step {step}: {cause}")
    self.step = step


class StepLog:
  """Writes train rows every `train.log_every` steps, one step late.

  The last step has one, too. A row has the scalars of that step; the norms of
  the transformer blocks go into `depth` rows, which the training loop writes.
  Times are means over the steps since the previous row: step_seconds (without
  evaluations, saves and depth rows), data_wait_seconds, tokens_per_second (also
  per device). model_flop_utilisation is null on CPU and on chips with unknown
  peak. goodput is the share of this attempt's time that was spent in steps,
  without waiting for data.
  """

  def __init__(
    self,
    config: config_lib.RunConfig,
    writer: metrics_lib.Writer,
    mesh: jax.sharding.Mesh,
    *,
    start: float | None = None,
    fetch: Callable[[Any], Any] = jax.device_get,
    clock: Callable[[], float] = time.perf_counter,
  ):
    """Starts to measure the first step.

    The attempt began at `start` by the clock, now by default. `fetch` copies
    metrics to the host.
    """
    self._config = config
    self._writer = writer
    self._flops_per_token = flops.flops_per_token(
      config.model, config.data.sequence_length
    ).train
    self._device_kind = mesh.devices.flat[0].device_kind
    self._num_devices = mesh.size
    self._fetch = fetch
    self._clock = clock
    self._pending: tuple[int, Any] | None = None
    self._latest: dict[str, Any] = {}
    self._mark = clock()
    self._start = self._mark if start is None else start
    self._useful = self._step_wait = 0.0
    self._reset()

  def add(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Accepts the metrics of a step, and writes the previous step's.

    The step was just dispatched, counted from 1, maybe not computed yet.

    Raises:
      NonFiniteError: the step *before* was not finite.
    """
    self.drain()
    self._pending = (step, metrics)

  def drain(self) -> dict[str, Any]:
    """Waits for the pending step, if any; writes it and returns the latest."""
    if self._pending is None:
      return self._latest
    step, metrics = self._pending
    self._pending = None
    self._latest = metrics = self._fetch(dict(metrics))
    now = self._clock()
    seconds = now - self._mark
    self._seconds += seconds
    self._mark = now
    wait, self._step_wait = self._step_wait, 0.0
    self._data_wait += wait
    self._useful += max(0.0, seconds - wait)
    self._tokens += float(metrics["tokens"])
    self._steps += 1
    self._check_finite(step, metrics)
    train = self._config.train
    if step % train.log_every == 0 or step == train.steps:
      self._write(step, metrics)
    return metrics

  @contextlib.contextmanager
  def waiting_for_data(self) -> Iterator[None]:
    """A context for fetching the next batch."""
    start = self._clock()
    yield
    self._step_wait += self._clock() - start

  @contextlib.contextmanager
  def paused(self) -> Iterator[dict[str, Any]]:
    """A context for work that is not part of a step, with `drain` before."""
    metrics = self.drain()
    start = self._clock()
    yield metrics
    self._mark += self._clock() - start

  def pause(self, seconds: float) -> None:
    """Leaves out seconds that have passed and are not part of a step."""
    self._mark += seconds

  def _write(self, step: int, metrics: Mapping[str, Any]) -> None:
    scalars = {
      name: value
      for name, value in metrics.items()
      if name not in ("finite", "grad_norm_L")
    }
    tokens_per_second = self._tokens / self._seconds
    self._writer.write(
      step,
      "train",
      **scalars,
      step_seconds=self._seconds / self._steps,
      data_wait_seconds=self._data_wait / self._steps,
      tokens_per_second=tokens_per_second,
      tokens_per_second_per_device=tokens_per_second / self._num_devices,
      goodput=self._useful / max(self._clock() - self._start, 1e-9),
      model_flop_utilisation=chips.model_flop_utilisation(
        self._flops_per_token * tokens_per_second,
        self._device_kind,
        self._num_devices,
      ),
    )
    self._reset()

  def _reset(self) -> None:
    self._seconds = self._data_wait = self._tokens = 0.0
    self._steps = 0

  def _check_finite(self, step: int, metrics: Mapping[str, Any]) -> None:
    if metrics["finite"]:
      return
    cause = _cause(metrics)
    self._writer.event(
      step, "not finite", cause=cause, policy=self._config.train.on_nan
    )
    if self._config.train.on_nan == "stop":
      raise NonFiniteError(step, cause)


def _cause(metrics: Mapping[str, Any]) -> str:
  """Names the metrics that are not finite, and the first bad layer."""
  causes = []
  for name in _SUSPECTS:
    value = float(metrics.get(name, 0.0))
    if not np.isfinite(value):
      causes.append(f"{name} is {value}")
  bad_L = np.flatnonzero(~np.isfinite(metrics.get("grad_norm_L", [])))
  if bad_L.size:
    causes.append(f"the first bad gradient is transformer block {bad_L[0]}'s")
  return ", ".join(causes) or "the step is not finite"

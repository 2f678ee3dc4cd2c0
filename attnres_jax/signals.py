# SPDX-License-Identifier: Apache-2.0
"""Turns SIGTERM and SIGINT into a stop at the same step on all processes.

A single process checks its own flag once per step. Under `jax.distributed` the
processes must stop together: JAX catches SIGTERM and agrees on the first step
that no process has passed, so a keyboard interrupt is passed on as SIGTERM. A
second signal of the same kind has its usual effect.

Only the main thread of a process may have handlers. A run in another thread (as
under Ray) stops for SIGTERM under `jax.distributed`, and otherwise for no
signal.
"""

import os
import signal
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils


class StopSignal:
  """Context manager; `requested(step)` is True on the step to stop before.

  Attributes:
    received: name of the signal that this process received, or None. Under
      `jax.distributed`, another process may have received one.
  """

  def __init__(self):
    self.received: str | None = None
    self._distributed = jax.distributed.is_initialized()
    self._previous: dict[signal.Signals, Any] = {}

  def __enter__(self) -> "StopSignal":
    if threading.current_thread() is not threading.main_thread():
      return self
    # JAX's own handler of SIGTERM must stay in place under jax.distributed.
    kinds = [signal.SIGINT] + ([] if self._distributed else [signal.SIGTERM])
    for kind in kinds:
      self._previous[kind] = signal.signal(kind, self._receive)
    return self

  def __exit__(self, *unused) -> None:
    for kind, handler in self._previous.items():
      signal.signal(kind, handler)
    self._previous = {}

  def requested(self, step: int) -> bool:
    """Whether to stop now. Call it once a step, on every process."""
    if self._distributed:
      return multihost_utils.reached_preemption_sync_point(step)
    return self.received is not None

  def _receive(self, number: int, frame: Any) -> None:
    del frame
    kind = signal.Signals(number)
    self.received = kind.name
    signal.signal(kind, self._previous[kind])
    if self._distributed:
      os.kill(os.getpid(), signal.SIGTERM)

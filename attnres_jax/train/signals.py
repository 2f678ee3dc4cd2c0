# SPDX-License-Identifier: Apache-2.0
"""Turns signals into a stop at the same step on all processes.

SIGTERM, SIGINT, SIGHUP (a closed terminal, unless `nohup` ignores it) and
SIGUSR1 (some schedulers, before a time limit) all mean: save and stop.

A single process checks its own flag once per step. Before the first step there
is nothing to save, and a signal ends the process at once: Python calls handlers
between two of its instructions, and one call of a compiler can take minutes.

Under `jax.distributed` the processes must stop together: JAX catches SIGTERM
and agrees on the first step that no process has passed, so every other signal
is passed on as SIGTERM. A second signal of the same kind has its usual effect.

Only the main thread of a process may have handlers. A run in another thread (as
under Ray) stops for SIGTERM under `jax.distributed`, and otherwise for no
signal.
"""

from collections.abc import Callable, Iterator
import contextlib
import os
import signal
import sys
import threading
from typing import Any

KINDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextlib.contextmanager
def calling(handler: Callable[..., Any]) -> Iterator[None]:
  """A context in which signals call `handler(number, frame)`.

  Those that are ignored, as under `nohup`, stay ignored.
  """
  previous = {
    kind: signal.signal(kind, handler)
    for kind in KINDS
    if signal.getsignal(kind) is not signal.SIG_IGN
  }
  try:
    yield
  finally:
    for kind, old in previous.items():
      signal.signal(kind, old)


def outlive_outputs() -> None:
  """Lets this process continue when its stdout or stderr is closed or full."""
  sys.stdout, sys.stderr = (
    stream if isinstance(stream, _Output) else _Output(stream)  # pyrefly: ignore
    for stream in (sys.stdout, sys.stderr)
  )


class _Output:
  """A text stream; what cannot be written is dropped."""

  def __init__(self, stream: Any):
    # Python has none where the file was closed from the start.
    self._stream = stream or open(os.devnull, "w")
    if hasattr(self._stream, "reconfigure"):
      self._stream.reconfigure(errors="backslashreplace")

  def write(self, text: str) -> int:
    self._try(self._stream.write, text)
    return len(text)

  def flush(self) -> None:
    self._try(self._stream.flush)

  def _try(self, action: Callable[..., Any], *args: Any) -> None:
    try:
      action(*args)
    except BlockingIOError:
      pass  # Its reader is slow, and may come back.
    except (OSError, ValueError):
      # Python would complain at its exit, with another exit status.
      with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)


class StopSignal:
  """Context manager; `requested(step)` is True on the step to stop before.

  Attributes:
    received: name of the signal that this process received, or None. Under
      `jax.distributed`, another process may have received one.
  """

  def __init__(self):
    import jax

    self.received: str | None = None
    self._distributed = jax.distributed.is_initialized()
    self._told = -1
    self._reached = False
    self._previous: dict[signal.Signals, Any] = {}

  def __enter__(self) -> "StopSignal":
    """Until `begin_work`, signals end a single process at once."""
    if threading.current_thread() is threading.main_thread():
      first = self._receive if self._distributed else signal.SIG_DFL
      for kind in KINDS:
        # JAX's own handler of SIGTERM must stay under jax.distributed.
        is_ours = not (self._distributed and kind == signal.SIGTERM)
        if is_ours and signal.getsignal(kind) is not signal.SIG_IGN:
          self._previous[kind] = signal.signal(kind, first)
    return self

  def __exit__(self, *unused) -> None:
    for kind, handler in self._previous.items():
      signal.signal(kind, handler)

  def begin_work(self) -> None:
    """From now on, a signal stops after the current step."""
    for kind in self._previous:
      signal.signal(kind, self._receive)

  def requested(self, step: int) -> bool:
    """Whether to stop now. Call it once a step, on every process."""
    if self._distributed:
      from jax.experimental import multihost_utils

      # JAX agrees on the number after the last that it was told, which is 0 in
      # a new process. A resumed run has to come by that number, too.
      for number in range(self._told + 1, step + 1):
        self._reached |= multihost_utils.reached_preemption_sync_point(number)
      self._told = step
      return self._reached
    return self.received is not None

  def _receive(self, number: int, frame: Any) -> None:
    del frame
    kind = signal.Signals(number)
    self.received = kind.name
    signal.signal(kind, self._previous[kind])
    if self._distributed:
      os.kill(os.getpid(), signal.SIGTERM)

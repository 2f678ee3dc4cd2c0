# SPDX-License-Identifier: Apache-2.0
"""Runs tasks in order until the time is over, each in a process of the device.

The process that reads the clock and writes the rows never touches the device.
So a task that crashes, hangs or takes too long becomes a row with the reason,
its process is ended, and the next task gets a new one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import gc
import multiprocessing
import sys
import time
from typing import Any, Protocol

from experiments.first_hour import rows as rows_lib

_REASON = 400


@dataclasses.dataclass(frozen=True)
class Task:
  """A part of the hour that is measured as a whole.

  Attributes:
    part: of the page.
    name: unique.
    call: makes its rows, on the device; can be sent to another process.
    seconds: that it is expected to take; not begun with less left.
    most_seconds: after which it is ended; 0 for four times the expectation and
      five minutes.
    alone: whether it needs a process in which nothing else has run.
  """

  part: str
  name: str
  call: Callable[[], Iterable[rows_lib.Row]]
  seconds: float
  most_seconds: float = 0.0
  alone: bool = False

  @property
  def limit(self) -> float:
    """After how many seconds it is ended."""
    return self.most_seconds or 4 * self.seconds + 300


class Runner(Protocol):
  """Where tasks run."""

  def run(self, call: Callable[[], Any], seconds: float) -> Any:
    """The result of a call.

    Raises:
      Failure: it raised or ended its process; with status SKIPPED, it took
        longer.
    """
    ...

  def renew(self) -> None:
    """Later calls run where nothing has run."""
    ...


class Failure(Exception):
  """Why a task has no result.

  Attributes:
    status: of its row.
  """

  def __init__(self, reason: str, status: str = rows_lib.FAILED):
    super().__init__(reason)
    self.status = status


def run(
  tasks: Sequence[Task],
  ledger: rows_lib.Ledger,
  runner: Runner,
  seconds: float,
  *,
  clock: Callable[[], float] = time.monotonic,
  tell: Callable[[str], None] = print,
) -> None:
  """Runs the tasks that the ledger lacks.

  Args:
    tasks: in the order of what they tell; a task for which too little time is
      left is skipped, with a row that says so, and shorter ones still run.
    ledger: takes the rows.
    runner: has the device.
    seconds: that all of it may take.
    clock: in seconds.
    tell: takes a line per task.
  """
  end = clock() + seconds
  for task in tasks:
    if ledger.done(task.name):
      continue
    start = clock()
    left = end - start
    if task.seconds > left:
      reason = (
        f"takes about {task.seconds:.0f} s, and {max(left, 0):.0f} s were left;"
        " rerun to continue"
      )
      row = rows_lib.make(task.name, status=rows_lib.SKIPPED, reason=reason)
      ledger.put(task.part, task.name, [row])
      tell(f"skipped: {task.name}: {reason}")
      continue
    if task.alone:
      runner.renew()
    limit = min(task.limit, left)
    try:
      rows = runner.run(task.call, limit)
    except Failure as failure:
      status = failure.status
      if status == rows_lib.SKIPPED and limit == task.limit:
        status = rows_lib.FAILED
      reason = str(failure)
      rows = [rows_lib.make(task.name, status=status, reason=reason)]
      tell(f"{status}: {task.name}: {reason}")
    took = clock() - start
    ledger.put(task.part, task.name, rows, took)
    tell(f"{took:6.1f} s, {left - took:5.0f} s left: {task.name}")


class Process:
  """A process that has the device; calls run in it one after the other."""

  def __init__(self, prepare: Callable[[], Any]):
    """`prepare` is called there before anything else."""
    self._prepare = prepare
    self._process: Any = None

  def _start(self) -> Any:
    spawn = multiprocessing.get_context("spawn")
    self._pipe, theirs = spawn.Pipe()
    self._process = spawn.Process(
      target=_serve, args=(theirs, self._prepare), daemon=False
    )
    self._process.start()
    theirs.close()
    return self._process

  def run(self, call: Callable[[], Any], seconds: float) -> Any:
    """See `Runner`."""
    process = self._process or self._start()
    self._pipe.send(call)
    try:
      if not self._pipe.poll(seconds):
        process.kill()
        self.renew()
        reason = f"ended after {seconds:.0f} s without a result"
        raise Failure(reason, rows_lib.SKIPPED)
      kind, result = self._pipe.recv()
    except EOFError:
      process.join()
      code = process.exitcode
      self.renew()
      raise Failure(f"the process ended with exit status {code}") from None
    if kind != rows_lib.OK:
      raise Failure(result, kind)
    return result

  def renew(self) -> None:
    """See `Runner`."""
    self.close()

  def close(self) -> None:
    """Ends the process; the next call starts another."""
    if self._process is None:
      return
    self._pipe.close()
    self._process.join(5)
    if self._process.is_alive():
      self._process.kill()
      self._process.join()
    self._process = None


def in_process(call: Callable[[], Any]) -> tuple[str, Any]:
  """(status, result or reason) of a call; an error is a reason."""
  try:
    result = call()
    # Rows may be made one by one.
    return rows_lib.OK, (
      list(result) if isinstance(result, Iterator) else result
    )
  except NotImplementedError as error:
    return rows_lib.NOT_HERE, _reason(error)
  except Exception as error:  # Compilers raise many kinds; the others go on.
    return rows_lib.FAILED, _reason(error)


def _serve(pipe: Any, prepare: Callable[[], None]) -> None:
  prepare()
  while True:
    try:
      call = pipe.recv()
    except (EOFError, KeyboardInterrupt):
      return
    try:
      pipe.send(in_process(call))
      if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()  # Programs stay in a device's memory.
      gc.collect()
    except (KeyboardInterrupt, BrokenPipeError):
      return  # The other process says what that means, or is gone.


def _reason(error: Exception) -> str:
  text = " ".join(str(error).split())
  name = type(error).__name__
  return f"{name}: {text}"[:_REASON]

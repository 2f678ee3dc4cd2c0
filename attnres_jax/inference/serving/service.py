# SPDX-License-Identifier: Apache-2.0
"""The engine in a thread, and the queue in front of it.

  event loop:     submit, leave  ->  inbox   ->  engine thread
  event loop:  job.pieces()  <-  job.events  <-  engine thread

Only the thread touches the engine, and only the event loop counts what is
accepted. So neither needs a lock. Between two steps, the thread reads its
inbox, fills free slots from its queue, and hands every token to its job.
"""

import asyncio
import collections
from collections.abc import AsyncIterator, Callable, Sequence
import functools
import queue
import threading
from typing import NamedTuple

from attnres_jax.data import text_format as text_format_lib
from attnres_jax.inference import engine as engine_lib
from attnres_jax.inference import text
from attnres_jax.inference.serving import api


class _Started(NamedTuple):
  """A request of a job has a slot."""


class Job:
  """Requests that are answered together.

  Attributes:
    requests: of the engine.
    stop: strings that end their texts.
  """

  def __init__(
    self, requests: Sequence[engine_lib.Request], stop: Sequence[str]
  ):
    self.requests, self.stop = requests, stop
    self._events: asyncio.Queue[_Started | text.Piece | Exception] = (
      asyncio.Queue()
    )
    self._loop = asyncio.get_running_loop()

  def put(self, event: _Started | text.Piece | Exception) -> None:
    """Adds an event, in the event loop."""
    self._events.put_nowait(event)

  def put_from_thread(self, event: _Started | text.Piece) -> None:
    """Adds an event, in any other thread."""
    self._loop.call_soon_threadsafe(self.put, event)

  async def pieces(self, wait_seconds: float) -> AsyncIterator[text.Piece]:
    """Yields the pieces of all texts, as they are drawn.

    Raises:
      ApiError: no slot became free in time, or the engine has failed.
    """
    try:
      async with asyncio.timeout(wait_seconds):
        await self._next()
    except TimeoutError:
      raise api.busy(
        f"no slot became free within {wait_seconds:g} s",
        503,
        "slot_timeout",
        seconds=max(round(wait_seconds), 1),
      ) from None
    unfinished = len(self.requests)
    while unfinished:
      event = await self._next()
      if isinstance(event, text.Piece):
        yield event
        unfinished -= event.finish is not None

  async def _next(self) -> _Started | text.Piece:
    # A full queue never waits, so others would.
    await asyncio.sleep(0)
    event = await self._events.get()
    if isinstance(event, Exception):
      raise event
    return event


class _Text:
  """One request of a job, in the engine's thread."""

  def __init__(
    self, job: Job, index: int, text_format: text_format_lib.TextFormat
  ):
    self.job, self.index = job, index
    before = job.requests[index].prompt
    self.text = text.Text(text_format, before, job.stop)


class Service:
  """Gives requests to an engine.

  Attributes:
    failure: why the engine has stopped, or None.
  """

  def __init__(
    self,
    engine: engine_lib.Engine,
    text_format: text_format_lib.TextFormat,
    most_waiting: int,
    on_failure: Callable[[], None] = lambda: None,
  ):
    """Prepares a thread, which `start` starts.

    Args:
      engine: which nothing else may use from then on.
      text_format: of its network.
      most_waiting: texts that may wait for a slot.
      on_failure: called in the event loop if the engine fails.
    """
    self.failure: Exception | None = None
    self._engine, self._format = engine, text_format
    self._most_texts = engine.slots + most_waiting
    # One request must neither fill the queue nor take all slots, so that others
    # can start at once.
    self.most_of_one = max(engine.slots, self._most_texts // 2)
    self._most_slots = max(engine.slots - 1, 1)
    self._on_failure = on_failure
    # Of the event loop.
    self._jobs: set[Job] = set()
    self._num_open = 0
    # Of the thread.
    self._inbox: queue.SimpleQueue[Callable[[], None] | None] = (
      queue.SimpleQueue()
    )
    self._waiting: collections.deque[_Text] = collections.deque()
    self._running: dict[int, _Text] = {}
    self._thread = threading.Thread(target=self._work, name="engine")

  def start(self) -> None:
    """Starts the thread, in the event loop that will submit jobs."""
    self._loop = asyncio.get_running_loop()
    self._thread.start()

  def stop(self) -> None:
    """Waits for the end of the thread."""
    self._inbox.put(None)
    self._thread.join()

  def submit(
    self, requests: Sequence[engine_lib.Request], stop: Sequence[str]
  ) -> Job:
    """Accepts requests; the caller has to `leave` their job in any case.

    Raises:
      ApiError: the engine has failed, or too many requests wait.
      ConfigError: the engine would refuse one of them.
    """
    if self.failure is not None:
      raise _failed()
    last = None
    for request in requests:
      # Choices share the ids of their prompt.
      if request.prompt is not last:
        self._engine.check(request)
      last = request.prompt
    if self._num_open + len(requests) > self._most_texts:
      raise api.busy("too many requests wait", 429, "queue_full")
    job = Job(requests, stop)
    self._jobs.add(job)
    self._num_open += len(requests)
    self._inbox.put(functools.partial(self._add, job))
    return job

  def leave(self, job: Job) -> None:
    """Ends a job, complete or not, and frees its slots."""
    self._jobs.remove(job)
    self._num_open -= len(job.requests)
    self._inbox.put(functools.partial(self._drop, job))

  def _fail(self, failure: Exception) -> None:
    self.failure = failure
    for job in self._jobs:
      job.put(_failed())
    self._on_failure()

  # From here on, everything is of the thread.

  def _work(self) -> None:
    try:
      while self._obey():
        self._start_waiting()
        for token in self._engine.step():
          self._hand_over(token)
    except Exception as error:  # Such as a device without memory.
      self._running.clear()
      self._waiting.clear()
      self._loop.call_soon_threadsafe(self._fail, error)

  def _obey(self) -> bool:
    """Does what the inbox says; waits for it if there is nothing to do."""
    idle = not (self._waiting or self._running)
    while True:
      try:
        command = self._inbox.get(block=idle)
      except queue.Empty:
        return True
      if command is None:
        return False
      command()
      idle = not (self._waiting or self._running)

  def _add(self, job: Job) -> None:
    self._waiting.extend(
      _Text(job, i, self._format) for i in range(len(job.requests))
    )

  def _drop(self, job: Job) -> None:
    self._waiting = collections.deque(
      text for text in self._waiting if text.job is not job
    )
    for number, one in list(self._running.items()):
      if one.job is job:
        self._engine.cancel(number)
        del self._running[number]

  def _start_waiting(self) -> None:
    while self._waiting and self._engine.num_free:
      # Of the request that has the fewest slots, and among these the oldest.
      slots = collections.Counter(one.job for one in self._running.values())
      one = min(self._waiting, key=lambda text: slots[text.job])
      if slots[one.job] >= self._most_slots:
        return
      self._waiting.remove(one)
      number = self._engine.submit(one.job.requests[one.index])
      self._running[number] = one
      one.job.put_from_thread(_Started())

  def _hand_over(self, token: engine_lib.Token) -> None:
    one = self._running.get(token.request)
    if one is None:
      return  # A stop string has ended it, by another token of the same step.
    piece = one.text.take(token, one.index)
    if piece.finish:
      self._engine.cancel(token.request)
      del self._running[token.request]
    one.job.put_from_thread(piece)


def _failed() -> api.ApiError:
  words = "the engine has failed; the log of the server says why"
  return api.failed(500, words, "engine_failed")

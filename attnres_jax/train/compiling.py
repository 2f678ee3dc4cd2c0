# SPDX-License-Identifier: Apache-2.0
"""Compiles the programs of a run, and says which, how long and how large."""

from collections.abc import Callable, Iterator
import contextlib
import threading
import time
from typing import Any

from attnres_jax.common import compiler
from attnres_jax.common import processes
from attnres_jax.train import metrics as metrics_lib

# Between two lines about a program that compiles.
_SAY_SECONDS = 5.0


def compile_program(
  writer: metrics_lib.Writer,
  step: int,
  name: str,
  function: Any,
  *shapes: Any,
) -> Callable[..., Any]:
  """Compiles a jitted function once, and records the time and memory."""
  start = time.perf_counter()
  with saying_how_long(f"compiling {name}"):
    compiled = function.lower(*shapes).compile()
  seconds = time.perf_counter() - start
  report(writer, step, name, seconds, compiled)
  return compiled


@contextlib.contextmanager
def saying_how_long(what: str) -> Iterator[None]:
  """Says what takes so long, and how long so far, every few seconds."""
  start, over = time.perf_counter(), threading.Event()

  def say() -> None:
    while not over.wait(_SAY_SECONDS):
      seconds = time.perf_counter() - start
      print(f"{what}: {seconds:.0f} s so far", flush=True)

  thread = threading.Thread(target=say, daemon=True)
  if processes.is_first():
    thread.start()
  try:
    yield
  finally:
    over.set()


def report(
  writer: metrics_lib.Writer,
  step: int,
  name: str,
  seconds: float,
  compiled: Any,
) -> None:
  """The event of a compiled program, with its memory."""
  memory = compiled.memory_analysis()
  writer.event(
    step,
    "compiled",
    function=name,
    seconds=seconds,
    argument_bytes=getattr(memory, "argument_size_in_bytes", None),
    temporary_bytes=getattr(memory, "temp_size_in_bytes", None),
    peak_bytes=compiler.peak_bytes(compiled) if memory else None,
  )

# SPDX-License-Identifier: Apache-2.0
"""Compiles the programs of a run, and says which, how long and how large."""

from collections.abc import Callable
import time
from typing import Any

from attnres_jax.common import compiler
from attnres_jax.common import processes
from attnres_jax.train import metrics as metrics_lib


def compile_program(
  writer: metrics_lib.Writer,
  step: int,
  name: str,
  function: Any,
  *shapes: Any,
) -> Callable[..., Any]:
  """Compiles a jitted function once, and records the time and memory."""
  start = time.perf_counter()
  if processes.is_first():
    print(f"compiling {name}", flush=True)
  compiled = function.lower(*shapes).compile()
  seconds = time.perf_counter() - start
  report(writer, step, name, seconds, compiled)
  return compiled


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

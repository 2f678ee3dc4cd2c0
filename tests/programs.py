# SPDX-License-Identifier: Apache-2.0
"""Compiles each program once per process, however often it is traced.

Tests build the same small networks again and again, and every new function is
a new program to `jax.jit`. XLA takes most of the suite's time, tracing little.
Programs whose text, options and devices agree are one program. jax's own cache
would write them to disk, where jax 0.10.2 crashes now and then.

Most programs are single operations on small arrays. Making an MLIR context for
each takes a quarter of their time, so that a few share one, as in jax 0.12.
"""

import hashlib
import threading

# Private: there is no public cache of compiled programs in memory.
from jax._src import compiler
from jax._src.interpreters import mlir

_programs = {}
_contexts = threading.local()
# Types and constants stay as long as their context.
_PROGRAMS_PER_CONTEXT = 20


def share():
  """From here on equal programs are compiled once."""
  _share_contexts()
  compile_program = compiler.compile_or_get_cached

  def compile_once(
    backend, computation, devices, options, host_callbacks, *rest, **named
  ):
    given = (backend, computation, devices, options, host_callbacks, *rest)
    text = computation.operation.get_asm(enable_debug_info=False)
    # A call into Python goes by an address, which may be another's later.
    if host_callbacks or "callback" in text:
      return compile_program(*given, **named)
    key = (
      backend,  # Of a topology: ids of devices say nothing about their chips.
      hashlib.sha256(text.encode()).digest(),
      options.SerializeAsString(),
      tuple(device.id for device in devices.flat),
    )
    if key not in _programs:
      _programs[key] = compile_program(*given, **named)
    return _programs[key]

  compiler.compile_or_get_cached = compile_once


def _share_contexts():
  make_context = mlir.make_ir_context

  def make_or_reuse():
    context, uses = getattr(_contexts, "latest", (None, 0))
    if not uses:
      context, uses = make_context(), _PROGRAMS_PER_CONTEXT
    _contexts.latest = context, uses - 1
    return context

  mlir.make_ir_context = make_or_reuse


def forget():
  """Frees the programs that nobody else holds."""
  _programs.clear()

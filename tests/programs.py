# SPDX-License-Identifier: Apache-2.0
"""Compiles each program once per process, however often it is traced.

Tests build the same small networks again and again, and every new function is
a new program to `jax.jit`. XLA takes most of the suite's time, tracing little.
Programs whose text, options and devices agree are one program. jax's own cache
would write them to disk, where jax 0.10.2 crashes now and then.
"""

import hashlib

# Private: there is no public cache of compiled programs in memory.
from jax._src import compiler

_programs = {}


def share():
  """From here on equal programs are compiled once."""
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


def forget():
  """Frees the programs that nobody else holds."""
  _programs.clear()

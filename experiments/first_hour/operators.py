# SPDX-License-Identifier: Apache-2.0
"""The shapes of the static tables, timed on the device.

Beside each time stand its limit, the bytes of arguments and results over the
bandwidth of memory, and on a TPU its estimate: the longer of schedule and
memory time in kernels/benchmarks/results, divided by the cores of a device.
Operands smaller than a cache may beat the limit. A gradient is one operation
here, but two kernels of the table for `kda` and for `stream_mix`, the first of
which makes the outputs and what the second one reads.
"""

from collections.abc import Callable, Iterator
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

import attnres_kernels
from attnres_kernels import Implementation
from attnres_kernels.depth_attention import shapes
from attnres_kernels.kda import shapes as kda_shapes
from attnres_kernels.stream_mix import shapes as stream_shapes
from experiments.first_hour import budget
from experiments.first_hour import rows as rows_lib
from experiments.first_hour import static_rows
from experiments.first_hour import timing

PART = "operators"
# Device kind -> its name in the static tables, and how many of their cores
# one device has.
CHIPS = {
  "TPU v4": ("v4", 2),
  "TPU v5 lite": ("v5e", 1),
  "TPU v5": ("v5p", 2),
  "TPU v6 lite": ("v6e", 1),
  "TPU7x": ("tpu7x", 1),
}
# Operator here -> kernels of the static tables.
KERNELS = {
  "depth_attention forward": ("depth_attention_forward",),
  "depth_attention backward": ("depth_attention_backward",),
  "depth_merge_norm forward": ("depth_merge_forward",),
  "depth_merge_norm backward": ("depth_merge_backward",),
  "depth_read forward": ("depth_read_forward",),
  "kda forward": ("kda_forward",),
  "kda backward": ("kda_forward_saving", "kda_backward"),
  "short_conv forward": ("short_conv_forward",),
  "short_conv backward": ("short_conv_backward",),
  "stream_mix forward": ("stream_mix_forward",),
  "stream_mix backward": ("stream_mix_forward", "stream_mix_backward"),
}
_SHORT = {
  "depth": shapes.Shape("short", 2, 3, 64, 256),
  "kda": kda_shapes.Shape("short", 1, 128, 1, 128, 128),
  "short": kda_shapes.Shape("short", 1, 128, 1, 128, 128),
  "stream": stream_shapes.Shape("short", "float32", 130, 128, 2, 8),
}

# (function, arguments as shapes)
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def cases(short: bool = False) -> list[tuple[str, Any]]:
  """(operator, shape), in the order of what they tell."""
  if short:
    return [(op, _SHORT[op.partition("_")[0].split()[0]]) for op in KERNELS]
  ends = lambda family: (family[-1], family[0], family[len(family) // 2])
  passes = "forward", "backward"
  attention = [f"depth_attention {way}" for way in passes]
  found = [(op, s) for s in ends(shapes.BLOCK_48B)[:1] for op in attention]
  found += [
    (f"depth_merge_norm {way}", s) for s in shapes.MERGE for way in passes
  ]
  found += [
    (f"{op} {way}", s)
    for op in ("kda", "short_conv")
    for s in kda_shapes.NAMED
    for way in passes
  ]
  found += [
    (f"stream_mix {way}", s) for s in stream_shapes.NAMED for way in passes
  ]
  found += [("depth_read forward", s) for s in shapes.DECODED]
  found += [(op, s) for s in shapes.TABLE for op in attention]
  return list(dict.fromkeys(found))


def tasks(platform: str, short: bool) -> list[budget.Task]:
  """One per operator and shape."""
  found = []
  for op, shape in cases(short):
    chosen: Implementation = "xla"
    if platform == "tpu":
      chosen = "pallas_tpu"
    elif platform == "gpu" and op.startswith(("depth_att", "depth_merge")):
      chosen = "pallas_gpu"  # The others have no kernel.
    call = functools.partial(measure, op, shape, chosen, short)
    seconds = 3 if short else 25
    found.append(budget.Task(PART, f"{op} {shape}", call, seconds))
  return found


def measure(
  op: str, shape: Any, implementation: Implementation, short: bool
) -> Iterator[dict[str, str]]:
  """One row, in microseconds."""
  function, structs = case(op, shape, implementation)
  arguments = _draw(op, shape, structs)
  seconds = timing.of_calls(
    function, arguments, rounds=5 if short else timing.ROUNDS
  )
  limit = timing.least_bytes(function, arguments) / timing.rates().bytes
  kind = jax.devices()[0].device_kind
  yield rows_lib.make(
    op,
    str(shape),
    implementation,
    measured=seconds.median * 1e6,
    spread=(seconds.least * 1e6, seconds.largest * 1e6),
    limit=limit * 1e6,
    estimate=estimate_us(op, shape, kind),
    unit="us",
    reason=f"bandwidth {timing.rates().source}",
  )


def estimate_us(op: str, shape: Any, kind: str) -> float | None:
  """The estimate of the static tables for a device; None without rows."""
  chip, cores = CHIPS.get(kind, ("", 0))
  rows = _static(op, shape, chip)
  if not rows:
    return None
  pairs = [(float(row["schedule_us"]), float(row["hbm_us"])) for row in rows]
  return sum(map(max, pairs)) / cores


def estimated_ratio(op: str, shape: Any, chip: str) -> float | None:
  """Schedule over memory time in the static tables; None without rows."""
  rows = _static(op, shape, chip)
  if not rows:
    return None
  schedule = sum(float(row["schedule_us"]) for row in rows)
  return schedule / sum(float(row["hbm_us"]) for row in rows)


def _static(op: str, shape: Any, chip: str) -> list[static_rows.Row]:
  """The rows of all kernels of an operator, or none."""
  keys = [(kernel, chip, str(shape)) for kernel in KERNELS[op]]
  table = static_rows.by_kernel()
  rows = [table[key] for key in keys if key in table]
  return rows if len(rows) == len(keys) else []


def case(op: str, shape: Any, implementation: Implementation) -> Case:
  """The function that is timed, and what it takes."""
  name, way = op.split()
  build = {
    "depth_attention": _attention,
    "depth_merge_norm": _merge,
    "depth_read": _read,
    "kda": _kda,
    "short_conv": _conv,
    "stream_mix": _streams,
  }[name]
  return build(shape, way == "backward", implementation)


_struct = jax.ShapeDtypeStruct
_LOW, _WIDE = jnp.bfloat16, jnp.float32


def _attention(shape, backward: bool, implementation: Implementation) -> Case:
  token = shape.tokens, shape.width
  sources = [_struct(token, _LOW)] * shape.sources
  query = _struct((shape.queries, shape.width), _WIDE)
  if not backward:
    return lambda query, *sources: attnres_kernels.depth_attention(
      query, sources, implementation=implementation
    ), (query, *sources)
  statistic = _struct((shape.queries, shape.tokens), _WIDE)
  dout = _struct((shape.queries, *token), _LOW)

  def gradients(query, lse, dlse, dout, *sources):
    return attnres_kernels.depth_attention_vjp(
      query, sources, lse, dout, dlse, implementation=implementation
    )

  return gradients, (query, statistic, statistic, dout, *sources)


def _merge(shape, backward: bool, implementation: Implementation) -> Case:
  wide = _struct((shape.tokens, shape.width), _LOW)
  row = _struct((shape.width,), _WIDE)
  merge = functools.partial(
    attnres_kernels.depth_merge_norm, implementation=implementation
  )
  first = wide, _struct((shape.tokens,), _WIDE), row, wide
  if not backward:
    return merge, (*first, wide, row)

  def gradients(out, lse, query, partial, gain, dpartial, dnormed):
    def without_update(out, lse, query, partial, gain):
      return merge(out, lse, query, partial, None, gain)

    _, vjp = jax.vjp(without_update, out, lse, query, partial, gain)
    return vjp((dpartial, dnormed))

  return gradients, (*first, row, wide, wide)


def _read(shape, backward: bool, implementation: Implementation) -> Case:
  del backward
  token = shape.tokens, shape.width
  sources = [_struct(token, _LOW)] * (shape.sources - 1)
  queries = _struct((shape.queries, shape.width), _WIDE)
  return lambda queries, gain, *sources: attnres_kernels.depth_read_norm(
    queries, 0, sources, gain, implementation=implementation
  ), (queries, _struct((shape.width,), _WIDE), *sources, _struct(token, _WIDE))


def _kda(shape, backward: bool, implementation: Implementation) -> Case:
  token = shape.batch, shape.tokens, shape.heads
  key, value = _struct((*token, shape.key), _LOW), (*token, shape.value)
  arguments = (
    key,
    key,
    _struct(value, _LOW),
    _struct(key.shape, _WIDE),
    _struct(token, _WIDE),
  )

  def run(q, k, v, g, beta):
    return attnres_kernels.kda(q, k, v, g, beta, implementation=implementation)

  if not backward:
    return run, arguments

  def gradients(q, k, v, g, beta, do):
    # The gradient of the last state is none: only the outputs are used.
    _, vjp = jax.vjp(lambda *a: run(*a)[0], q, k, v, g, beta)
    return vjp(do)

  return gradients, (*arguments, _struct(value, _LOW))


def _conv(shape, backward: bool, implementation: Implementation) -> Case:
  """Queries or keys of KDA, with four taps."""
  x = _struct((shape.batch, shape.tokens, shape.heads, shape.key), _LOW)
  taps = _struct((4, *x.shape[2:]), _WIDE)
  run = functools.partial(
    attnres_kernels.short_conv, unit_eps=1e-6, implementation=implementation
  )
  if not backward:
    return run, (x, taps)

  def gradients(x, taps, dy):
    _, vjp = jax.vjp(run, x, taps)
    return vjp(dy)

  return gradients, (x, taps, x)


def _streams(shape, backward: bool, implementation: Implementation) -> Case:
  count, tokens, width = shape.count, shape.tokens, shape.width
  streams = [_struct((tokens, width), shape.dtype)] * count
  y, logits = _struct((tokens, width), _LOW), (shape.columns, tokens)
  small = (
    _struct((count, tokens), _WIDE),
    _struct((count, count, tokens), _WIDE),
    _struct((count, width, shape.columns), _WIDE),
    _struct((count,), _WIDE),
    _struct((), _WIDE),
  )

  def run(*arrays):
    new, h, logits = attnres_kernels.stream_mix(
      arrays[:count], *arrays[count:], dtype=_LOW, implementation=implementation
    )
    return *new, h, logits

  if not backward:
    return run, (*streams, y, *small)

  def gradients(*arrays):
    primals, cotangents = arrays[: count + 6], arrays[count + 6 :]
    return jax.vjp(run, *primals)[1](cotangents)

  return gradients, (*streams, y, *small, *streams, y, _struct(logits, _WIDE))


def _draw(op: str, shape: Any, structs: Any) -> list[jax.Array]:
  """Small numbers, but what operators need."""

  @functools.partial(jax.jit, static_argnums=(0, 1))
  def draw(seed, struct):
    x = 0.05 * jax.random.normal(jax.random.key(seed), struct.shape)
    if op.startswith("kda") and seed in (3, 4):
      x = jnp.abs(x) * (-1 if seed == 3 else 1)  # Decays; corrections.
    elif op == "depth_attention backward" and seed == 1:
      x = x + math.log(shape.sources)  # Scores near zero have this normaliser.
    return x.astype(struct.dtype)

  return [draw(i, struct) for i, struct in enumerate(structs)]

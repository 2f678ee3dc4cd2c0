# SPDX-License-Identifier: Apache-2.0
"""Every operator of attnres_kernels on the device, against its reference.

Values and all cotangents, in both dtypes, at widths of the paper's networks.
The reference runs on the same device in float32, with exact products, on the
same inputs: what is rounded to bfloat16 is an input of both. An error is the
root-mean-square of the difference over that of the reference, and a row has
the result that is nearest to its tolerance, or farthest beyond.

Tolerances. A result that is stored in bfloat16 may be off by twice what storing
the exact result is off by. A float32 result may be off by 2e-5 if the inputs
are float32, and by 1e-4 if they are bfloat16. Operators that round to bfloat16
on the way (products of KDA and of `stream_mix`, gradients of KDA's convolution,
the sum that `depth_merge_norm` stores and reads) may be off by 1e-2 with
bfloat16 inputs, as their tests on a CPU allow.
"""

from collections.abc import Callable, Iterator, Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import attnres_kernels
from attnres_kernels.kda import api as kda_api
from experiments.first_hour import budget
from experiments.first_hour import rows as rows_lib

PART = "checks"
DTYPES = ("float32", "bfloat16")
# Of bfloat16 results, over the error of storing them.
_STORED = 2.0
_FLOAT32, _WIDE, _ROUNDED = 2e-5, 1e-4, 1e-2

Results = Mapping[str, jax.Array]
# (implementation, arrays) -> results by name, and the arrays.
Problem = tuple[Callable[..., Results], tuple[Any, ...]]


def tasks(platform: str, short: bool) -> list[budget.Task]:
  """Kernels of this platform; with plain JAX afterwards."""
  kernels = {"tpu": ["pallas_tpu"], "gpu": ["pallas_gpu"]}.get(platform, [])
  found = []
  for implementation in [*kernels, "xla"]:
    for op, build in OPS.items():
      if implementation not in build.implementations:
        continue
      for dtype in DTYPES:
        call = functools.partial(check, op, implementation, dtype, short)
        name = f"{op}, {implementation}, {dtype}"
        found.append(budget.Task(PART, name, call, 2 if short else 25))
  return found


def check(
  op: str, implementation: str, dtype: str, short: bool
) -> Iterator[dict[str, str]]:
  """One row: the worst of all results of an operator."""
  problem = OPS[op]
  function, arrays = problem.build(dtype, short)
  run = jax.jit(functools.partial(function, implementation))
  got = jax.tree.map(np.asarray, run(*arrays))
  wide = jax.tree.map(_wide, arrays)
  with jax.default_matmul_precision("highest"):
    exact = jax.jit(functools.partial(function, problem.reference))(*wide)
  exact = jax.tree.map(np.asarray, exact)
  worst = max(
    (_error(got[name], exact[name], problem, dtype, name) for name in exact),
    key=lambda found: found[0] / found[1],
  )
  error, tolerance, name = worst
  yield rows_lib.make(
    op,
    dtype,
    implementation,
    measured=error,
    limit=tolerance,
    reason=f"worst of {len(exact)}: {name}",
  )


def _error(got, exact, problem, dtype, name):
  """(error, tolerance, name); an error that is no number is infinite."""
  wanted, actual = np.float64(exact), np.float64(got)
  scale = np.sqrt(np.mean(wanted**2)) or 1.0
  error = float(np.sqrt(np.mean((actual - wanted) ** 2)) / scale)
  if dtype == "float32":
    tolerance = _FLOAT32
  elif problem.tolerance:
    tolerance = problem.tolerance
  elif got.dtype == jnp.bfloat16:
    stored = np.float64(exact.astype(jnp.bfloat16)) - wanted
    rounding = 2**-9 / np.sqrt(3)  # Where the exact result needs no rounding.
    stored = max(np.sqrt(np.mean(stored**2)) / scale, rounding)
    tolerance = _STORED * float(stored)
  else:
    tolerance = _WIDE
  return (error if np.isfinite(error) else np.inf), tolerance, name


def _wide(x: jax.Array) -> jax.Array:
  return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x


class _Op:
  """How an operator is checked.

  Attributes:
    build: (dtype, short) -> `Problem`.
    implementations: that it has.
    reference: the implementation that is right by inspection.
    tolerance: of bfloat16 inputs; 0 for that of storage.
  """

  def __init__(
    self,
    build: Callable[[str, bool], Problem],
    implementations: tuple[str, ...] = ("pallas_tpu", "pallas_gpu", "xla"),
    reference: str = "reference",
    tolerance: float = 0.0,
  ):
    self.build, self.implementations = build, implementations
    self.reference, self.tolerance = reference, tolerance


def _draws(seed: int) -> Callable[..., jax.Array]:
  rng = np.random.default_rng(seed)

  def draw(*shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)

  return draw


def _with_gradients(function, arrays, names, cotangents) -> dict[str, Any]:
  """Results by number, and the gradients of `arrays` by name."""
  results, vjp = jax.vjp(function, *arrays)
  gradients = vjp(
    jax.tree.map(lambda r, d: d.astype(r.dtype), results, cotangents)
  )
  named = {f"result {i}": x for i, x in enumerate(results)}
  return named | {f"d{n}": g for n, g in zip(names, gradients, strict=True)}


def _attention(
  dtype: str,
  short: bool,
  *,
  bank: bool = False,
  normed: bool = False,
  heads: int | None = None,
  rank: int | None = None,
):
  # Tokens that fill no tile; a width that is no multiple of 128 lanes.
  queries, sources, tokens, width = (2, 3, 24, 160) if short else (6, 9, 520, 0)
  width = width or (2304 if bank else 1168)
  if heads or rank:
    width = 256 if short else 2048
  draw = _draws(0)
  query = draw(queries, rank or width) * 0.1
  source_MTD = draw(sources, tokens, width, dtype=dtype)
  cotangents = draw(queries, tokens, width, dtype=dtype), None
  shape = (queries, tokens) + ((heads,) if heads else ())
  cotangents = cotangents[0], draw(*shape)
  gains = (1 + 0.1 * draw(width),) if normed else ()

  def run(implementation, query, source_MTD, dout, dlse, *gains):
    def attend(query, *arrays):
      sources = arrays[: len(apart)]
      return attnres_kernels.depth_attention(
        query,
        sources[0] if bank else sources,
        num_sources=jnp.int32(sources[0].shape[0] - 1) if bank else None,
        norm_gain=arrays[-1] if normed else None,
        heads=heads,
        rank=rank,
        implementation=implementation,
      )

    apart = (source_MTD,) if bank else tuple(source_MTD)
    names = ["query", *(f"source {i}" for i in range(len(apart)))]
    names += ["gain"] * normed
    arrays = query, *apart, *gains
    return _with_gradients(attend, arrays, names, (dout, dlse))

  return run, (query, source_MTD, *cotangents, *gains)


def _accumulate(dtype: str, short: bool):
  queries, sources, tokens, width = (2, 3, 24, 256) if short else (4, 8, 256, 0)
  width = width or 2304
  draw = _draws(1)
  query = draw(queries, width) * 0.1
  source_MTD = draw(sources, tokens, width, dtype=dtype)
  before_MTD = draw(sources, tokens, width)

  def run(implementation, query, source_MTD, before_MTD, dout, dlse):
    sources = tuple(source_MTD)
    _, lse = attnres_kernels.depth_attention(
      query, sources, implementation="reference"
    )
    dquery, dsources = attnres_kernels.depth_attention_vjp(
      query,
      sources,
      lse,
      dout.astype(source_MTD.dtype),
      dlse,
      accumulate=tuple(before_MTD),
      implementation=implementation,
    )
    return {"dquery": dquery, "dsources": jnp.stack(dsources)}

  dout = draw(queries, tokens, width, dtype=dtype)
  return run, (query, source_MTD, before_MTD, dout, draw(queries, tokens))


def _merge(
  dtype: str,
  short: bool,
  *,
  norm: bool,
  adds: bool = False,
  rows: bool = False,
  heads: int | None = None,
  rank: int | None = None,
):
  tokens, width = (24, 256) if short else (520, 1168)
  if heads or rank:
    width = 256 if short else 2048
  draw = _draws(2)
  out, partial, update = (draw(tokens, width, dtype=dtype) for _ in range(3))
  lse = draw(tokens, heads) if heads else draw(tokens)
  query, gain = draw(rank or width) * 0.1, 1 + 0.1 * draw(width)
  rest = ((update,) if adds else ()) + ((gain,) if norm else ())
  names = ["out", "lse", "query", "partial"]
  names += ["update"] * adds + ["gain"] * norm

  def run(implementation, douts, *arrays):
    def merge(out, lse, query, partial, *rest):
      if not norm:
        return (
          attnres_kernels.depth_merge(
            out, lse, query, partial, rank=rank, implementation=implementation
          ),
        )
      return attnres_kernels.depth_merge_norm(
        out,
        lse,
        query,
        partial,
        rest[0] if adds else None,
        rest[-1],
        out_row=_row(out, 0) if rows else None,
        partial_row=_row(partial, 2) if rows else None,
        rank=rank,
        implementation=implementation,
      )

    return _with_gradients(merge, arrays, names, tuple(douts)[: 1 + norm])

  douts = draw(2, tokens, width, dtype=dtype)
  return run, (douts, out, lse, query, partial, *rest)


def _row(x: jax.Array, index: int) -> attnres_kernels.Row:
  """Of an array of which the other rows have no part in the result."""
  stack = jnp.full((3, *x.shape), jnp.nan, x.dtype).at[index].set(x)
  return attnres_kernels.Row(stack, jnp.int32(index))


def _sinks(dtype: str, short: bool):
  """A merge that stores and adds up gradients; tokens fill its tiles."""
  tokens, width = (32, 256) if short else (512, 1168)
  draw = _draws(7)
  out, partial, dnormed, high = (
    draw(tokens, width, dtype=dtype) for _ in range(4)
  )
  lse, query, gain = draw(tokens), draw(width) * 0.1, 1 + 0.1 * draw(width)
  low = (draw(tokens, width) * 2**-9).astype(dtype)
  stack = jnp.full((3, tokens, width), jnp.nan, dtype)

  def run(implementation, dnormed, stack, high, low, *arrays):
    def merge(places, out, lse, query, partial, gain):
      row = attnres_kernels.Row(places[0], 1)
      sinks, normed = attnres_kernels.depth_merge_norm(
        out, lse, query, partial, None, gain,
        sinks=attnres_kernels.Sinks(row, *places[1:]),
        implementation=implementation,
      )  # fmt: skip
      return (sinks.out.stack, sinks.high, sinks.low), normed

    collected = stack, high, low
    (_, normed), pull = jax.vjp(merge, collected, *arrays)
    collected, _, dlse, dquery, _, dgain = pull((collected, dnormed))
    dout, high, low = collected[0][1], *map(_wide, collected[1:])
    return {
      "normed": normed, "dout": dout, "dpartial": high + low, "dlse": dlse,
      "dquery": dquery, "dgain": dgain,
    }  # fmt: skip

  arrays = out, lse, query, partial, gain
  return run, (dnormed, stack, high, low, *arrays)


def _read(dtype: str, short: bool):
  sources, tokens, width = (3, 2, 256) if short else (9, 8, 2048)
  draw = _draws(3)
  queries, gain = draw(4, width) * 0.1, 1 + 0.1 * draw(width)
  source_MTD = draw(sources, tokens, width, dtype=dtype)

  def run(implementation, queries, gain, partial, source_MTD):
    normed = attnres_kernels.depth_read_norm(
      queries, 2, [*source_MTD, partial], gain, implementation=implementation
    )
    return {"normed": normed}

  return run, (queries, gain, draw(tokens, width), source_MTD)


def _norm(dtype: str, short: bool):
  tokens, width = (16, 256) if short else (1100, 1168)
  draw = _draws(8)
  x, gain = draw(tokens, width, dtype=dtype), 1 + 0.1 * draw(width)

  def run(implementation, dnormed, *arrays):
    def norm(x, gain):
      normed = attnres_kernels.rms_norm(x, gain, implementation=implementation)
      return (normed,)

    return _with_gradients(norm, arrays, ("x", "gain"), (dnormed,))

  return run, (draw(*x.shape, dtype=dtype), x, gain)


def _kda(dtype: str, short: bool, *, save: kda_api.Save = "chunks"):
  batch, tokens, heads = (1, 64, 1) if short else (2, 512, 8)
  draw = _draws(4)
  shape = (batch, tokens, heads, 128)
  q, k, v = (draw(*shape) for _ in range(3))
  k /= jnp.linalg.norm(k, axis=-1, keepdims=True)
  q, k, v = (x.astype(dtype) for x in (q, k, v))
  g = -jax.nn.softplus(draw(*shape) - 3)
  beta = jax.nn.sigmoid(draw(*shape[:-1]))
  state = draw(batch, heads, 128, 128)
  # Two documents, whose border is inside a chunk.
  ids = jnp.broadcast_to(jnp.arange(tokens) > tokens // 2 + 3, (batch, tokens))
  names = ("q", "k", "v", "g", "beta", "state")

  def run(implementation, ids, do, dstate, *arrays):
    def attend(q, k, v, g, beta, state):
      return attnres_kernels.kda(
        q, k, v, g, beta, initial_state=state, segment_ids=ids, save=save,
        implementation=implementation,
      )  # fmt: skip

    return _with_gradients(attend, arrays, names, (do, dstate))

  do = draw(*shape, dtype=dtype)
  arrays = q, k, v, g, beta, state
  return run, (ids.astype(jnp.int32), do, draw(*state.shape), *arrays)


def _conv(dtype: str, short: bool):
  batch, tokens, heads = (1, 32, 1) if short else (2, 512, 4)
  draw = _draws(5)
  x = draw(batch, tokens, heads, 128, dtype=dtype)
  ids = jnp.broadcast_to(jnp.arange(tokens) > tokens // 2 + 3, (batch, tokens))

  def run(implementation, ids, dy, x, taps):
    def convolve(x, taps):
      y = attnres_kernels.short_conv(
        x, taps, segment_ids=ids, unit_eps=1e-6, implementation=implementation
      )
      return (y,)

    return _with_gradients(convolve, (x, taps), ("x", "taps"), (dy,))

  dy = draw(*x.shape, dtype=dtype)
  return run, (ids.astype(jnp.int32), dy, x, draw(4, heads, 128))


def _streams(dtype: str, short: bool):
  count, tokens, width = (2, 136, 160) if short else (4, 520, 1168)
  draw = _draws(6)
  streams, y = draw(count, tokens, width, dtype=dtype), draw(tokens, width)
  y = y.astype(dtype)
  columns = count * (count + 2)
  mix = jnp.eye(count)[..., None] + 0.3 * draw(count, count, tokens)
  small = (
    draw(count, tokens), mix, draw(count, width, columns) / width**0.5,
    draw(count + 1),  # One array: the gradient of the scale is a lone number.
  )  # fmt: skip
  names = [*(f"stream {i}" for i in range(count)), "y"]
  names += ["write", "mix", "weight", "bias and scale"]

  def run(implementation, dnew, dh, dlogits, streams, *rest):
    def between(*arrays):
      y, write, mix, weight, gate = arrays[count:]
      new, h, logits = attnres_kernels.stream_mix(
        arrays[:count], y, write, mix, weight, gate[:count], gate[count],
        implementation=implementation,
      )  # fmt: skip
      return *new, h, logits

    cotangents = *dnew, dh, dlogits
    return _with_gradients(between, (*streams, *rest), names, cotangents)

  given = draw(*streams.shape, dtype=dtype), draw(*y.shape, dtype=dtype)
  return run, (*given, draw(columns, tokens), streams, y, *small)


def _sinkhorn(dtype: str, short: bool):
  count, tokens = (3, 40) if short else (4, 1100)
  draw = _draws(7)
  logits = 4 * draw(count, count, tokens, dtype=dtype)

  def run(implementation, dresult, logits):
    def scale(logits):
      wide = logits.astype("float32")
      return (attnres_kernels.sinkhorn(wide, implementation=implementation),)

    return _with_gradients(scale, (logits,), ("logits",), (dresult,))

  return run, (draw(*logits.shape), logits)


_partial = functools.partial
# Operator -> how it is checked. The package of `attnres_kernels` comes first.
OPS: dict[str, _Op] = {
  "depth_attention": _Op(_attention),
  "depth_attention, bank": _Op(
    _partial(_attention, bank=True), ("pallas_tpu", "xla")
  ),
  "depth_attention, vjp that adds": _Op(_accumulate, ("pallas_tpu", "xla")),
  "depth_merge": _Op(_partial(_merge, norm=False)),
  "depth_merge, norm": _Op(_partial(_merge, norm=True)),
  "depth_merge, add and norm": _Op(
    _partial(_merge, norm=True, adds=True),
    ("pallas_tpu", "xla"),
    tolerance=_ROUNDED,
  ),
  # Plain JAX rounds the mixture before it normalises it.
  "depth_attention, normed": _Op(
    _partial(_attention, normed=True),
    ("pallas_tpu", "xla"),
    tolerance=_ROUNDED,
  ),
  "depth_merge, rows": _Op(_partial(_merge, norm=True, rows=True)),
  "depth_merge, sinks": _Op(
    _sinks, ("pallas_tpu", "xla"), reference="xla", tolerance=_ROUNDED
  ),
  "depth_attention, heads": _Op(_partial(_attention, heads=16)),
  "depth_attention, rank": _Op(_partial(_attention, rank=64)),
  "depth_merge, heads": _Op(_partial(_merge, norm=True, heads=16)),
  "depth_merge, rank": _Op(_partial(_merge, norm=True, rank=64)),
  "depth_read": _Op(_read, ("pallas_tpu", "xla")),
  "rms_norm": _Op(_norm, ("pallas_tpu", "xla"), reference="xla"),
  "kda": _Op(_kda, ("pallas_tpu", "xla"), tolerance=_ROUNDED),
  "kda, arguments": _Op(
    _partial(_kda, save="arguments"), ("pallas_tpu", "xla"), tolerance=_ROUNDED
  ),
  # Its plain form is its definition: one shifted product per tap.
  "short_conv": _Op(
    _conv, ("pallas_tpu", "xla"), reference="xla", tolerance=_ROUNDED
  ),
  "stream_mix": _Op(_streams, ("pallas_tpu", "xla"), tolerance=_ROUNDED),
  "sinkhorn": _Op(_sinkhorn, ("pallas_tpu", "xla")),
}

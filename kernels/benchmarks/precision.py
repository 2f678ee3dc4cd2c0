# SPDX-License-Identifier: Apache-2.0
"""Errors of every backend against float64, and the error of storage alone.

  export PYTHONPATH=.:kernels
  python kernels/benchmarks/precision.py --out precision.csv

Relative root-mean-square errors on random inputs; `stored` is the error of
rounding the exact result to the storage dtype, the lowest possible error. TPU
and GPU kernels run in interpret mode on CPU, where a product of bfloat16
numbers is exact and summed in float32, as on the matrix unit. GPU kernels need
jax >= 0.12. Takes about three minutes.
"""

import argparse
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from attnres_jax import csv_rows
import attnres_kernels
from attnres_kernels import dispatch

FIELDS = ("op", "backend", "dtype", "case", "result", "error", "stored")
_CASES = ("random", "large", "equal", "zero", "one")
_BACKENDS = ("reference", "xla", "pallas_tpu", "pallas_gpu")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--out", default="")
  options = parser.parse_args()
  jax.config.update("jax_enable_x64", True)
  rows = []
  for dtype in ("float32", "bfloat16"):
    for case in _CASES:
      for op, arrays, function in _problems(dtype, case):
        exact = _run(function, "reference", _cast(arrays, "float64"))
        for backend in _BACKENDS:
          with jax.enable_x64(False):
            got = _run(function, backend, arrays)
          for name, actual in got.items():
            wanted = exact[name]
            stored = 0.0
            if str(actual.dtype) == "bfloat16":
              stored = _error(np.asarray(jnp.asarray(wanted, dtype)), wanted)
            error = f"{_error(actual, wanted):.1e}"
            cells = op, backend, dtype, case, name, error, f"{stored:.1e}"
            rows.append(dict(zip(FIELDS, cells, strict=True)))
            print(*cells, flush=True)
  if options.out:
    csv_rows.write(options.out, rows)


def _problems(dtype, case):
  # Tokens: a full tile of the TPU kernels, and part of a tile.
  queries, sources, tokens, width = 3, 1 if case == "one" else 6, 24, 256
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  query = draw(queries, width) * 0.1
  source = draw(sources, tokens, width).astype(dtype)
  if case == "large":
    query = query * 3e3
  elif case == "equal":
    source = jnp.broadcast_to(source[:1], source.shape)
  elif case == "zero":
    source = source.at[1:3].set(0)
  dout = draw(queries, tokens, width).astype(dtype)
  dlse = draw(queries, tokens)

  def attention(backend, query, source, dout, dlse):
    (out, lse), vjp = jax.vjp(
      lambda q, *s: attnres_kernels.depth_attention(
        q, s, implementation=backend
      ),
      query,
      *source,
    )
    dquery, *dsources = vjp((dout, dlse))
    return {
      "out": out,
      "lse": lse,
      "dquery": dquery,
      "dsources": jnp.stack(dsources),
    }

  yield "depth_attention", (query, source, dout, dlse), attention
  if case in ("equal", "one"):
    return

  def merge(backend, out, lse, query, partial, update, gain, dtotal, dnormed):
    (total, normed), vjp = jax.vjp(
      lambda *a: attnres_kernels.depth_merge_norm(*a, implementation=backend),
      out,
      lse,
      query,
      partial,
      update,
      gain,
    )
    names = ("dout", "dlse", "dquery", "dpartial", "dupdate", "dgain")
    gradients = dict(zip(names, vjp((dtotal, dnormed))))
    return {"total": total, "normed": normed, **gradients}

  # The backward pass reads the stored partial sum, so make it exact.
  partial = jnp.round(source[1].astype(jnp.float32) * 8) / 8
  update = jnp.round(source[2].astype(jnp.float32) * 8) / 8
  arrays = (
    source[0],
    dlse[0],
    query[0],
    partial.astype(dtype),
    update.astype(dtype),
    1 + query[1],
    dout[0],
    dout[1],
  )
  yield "depth_merge_norm", arrays, merge


def _run(function, backend, arrays):
  params: Any = pltpu.InterpretParams()
  if backend == "pallas_gpu":
    # Only newer versions of jax can interpret GPU kernels.
    gpu_params = plgpu.InterpretGPUParams  # pyrefly: ignore[missing-attribute]
    # The barrier of a cluster is inline code.
    params = gpu_params(inline_mgpu="ignore")
  with dispatch.interpreted(params):
    return function(backend, *arrays)


def _cast(arrays, dtype):
  return tuple(array.astype(dtype) for array in arrays)


def _error(actual, wanted):
  actual, wanted = np.float64(actual), np.float64(wanted)
  scale = np.mean(wanted**2)
  error = np.mean((actual - wanted) ** 2)
  # A gradient that is exactly zero (one source) has no relative error.
  return float(np.sqrt(error / scale if scale > 1e-20 else error))


if __name__ == "__main__":
  main()

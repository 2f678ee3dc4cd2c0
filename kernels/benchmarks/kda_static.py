# SPDX-License-Identifier: Apache-2.0
"""Static roofline of the KDA kernels on TPU, as in `tpu_static.py`.

  export PYTHONPATH=kernels
  python kernels/benchmarks/kda_static.py --out kda_static.csv

A chunk takes many small products that depend on each other, so the schedule is
longer than the memory time; the ratio says how much longer. About 30 s per row.
"""

import argparse

from benchmarks import tpu_static


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--chips", default="v6e,v5p,v5e,tpu7x")
  parser.add_argument("--kernels", default=",".join(_OPERANDS))
  parser.add_argument("--shapes", default="", help="comma-separated names")
  parser.add_argument("--chunk", type=int, default=64)
  parser.add_argument("--heads", type=int, default=0, help="per grid step")
  parser.add_argument("--out", default="")
  options = parser.parse_args()
  tpu_static.restart_with_dumps()
  from attnres_kernels.kda import shapes

  rows = []
  for chip in options.chips.split(","):
    for kernel in options.kernels.split(","):
      for shape in shapes.NAMED:
        if options.shapes and shape.name not in options.shapes.split(","):
          continue

        def build(shape, kernel=kernel):
          return _build(kernel, shape, options.chunk, options.heads)

        row = tpu_static.measure(kernel, shape, chip, build)
        rows.append(row)
        print(*(row[field] for field in tpu_static.FIELDS), flush=True)
        if options.out:
          tpu_static.write(options.out, rows)


# Operands and results that a kernel moves: in the input dtype with width K or
# V, in float32 with width K, per token, and matrices per chunk.
_OPERANDS = {
  "kda_forward": dict(low=4, wide=1, rows=1, states=0, inverses=0),
  "kda_states": dict(low=2, wide=1, rows=1, states=1, inverses=1),
  "kda_backward": dict(low=7, wide=2, rows=2, states=1, inverses=1),
}


def _build(kernel, shape, chunk, heads):
  import jax
  import jax.numpy as jnp

  from attnres_kernels.kda import pallas_tpu

  heads = heads or pallas_tpu.choose_heads(chunk, shape.heads, shape.key)
  token = shape.batch, shape.tokens, shape.heads
  struct = jax.ShapeDtypeStruct
  key = struct((*token, shape.key), jnp.bfloat16)
  value = struct((*token, shape.value), jnp.bfloat16)
  decay = struct(key.shape, jnp.float32)
  beta = struct(token, jnp.float32)
  state = struct(
    (shape.batch, shape.heads, shape.key, shape.value), jnp.float32
  )
  options = dict(scale=1.0, chunk_size=chunk, heads=heads)
  arguments = key, key, value, decay, beta, state
  if kernel == "kda_forward":
    function = lambda *a: pallas_tpu.forward(*a, **options)
  else:
    function = lambda *a: pallas_tpu.backward(*a, **options)
    arguments += value, state
  return function, arguments, _plan(shape, chunk, heads, **_OPERANDS[kernel])


def _plan(shape, chunk, heads, low, wide, rows, states, inverses):
  """Bytes per chunk and head, times chunks and heads; states enter once."""
  assert shape.key == shape.value
  tile = chunk * shape.key
  # Rows of tokens and matrices fill whole tiles of 128 lanes in memory.
  lanes = max(chunk, 128)
  square = shape.key * shape.value
  matrices = 2 * (states * square + inverses * chunk * lanes)
  step = heads * ((2 * low + 4 * wide) * tile + 4 * 8 * rows * lanes + matrices)
  all_heads = shape.batch * shape.heads
  steps = all_heads // heads * (shape.tokens // chunk)
  ends = 8 * all_heads * square
  tokens = all_heads * shape.tokens
  minimum = tokens * ((2 * low + 4 * wide) * shape.key + 4 * rows) + ends
  return {
    "tile": chunk,
    "steps": steps,
    "minimum": minimum,
    "actual": steps * step + ends,
    "vmem": 2 * step + 4 * heads * square,
  }


if __name__ == "__main__":
  main()

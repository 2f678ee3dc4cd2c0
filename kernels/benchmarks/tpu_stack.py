# SPDX-License-Identifier: Apache-2.0
"""Whole stacks as the TPU compiler sees them: Block AttnRes over PreNorm.

Forward and backward of a stack of sublayers that only pass their input on, so
that nothing but the residual scheme and the pre-norms costs anything: the
harshest ratio there is. Compiled ahead of time with libtpu, unrolled (the cost
model counts a loop body once); our kernels are counted by their CostEstimate.

  export PYTHONPATH=kernels
  python kernels/benchmarks/tpu_stack.py --out tpu_stack.csv
"""

import argparse
import csv
import functools
import os

FIELDS = (
  "chip",
  "arm",
  "sublayers",
  "block",
  "tokens",
  "width",
  "bytes_GB",
  "bytes_ratio",
  "hbm_ms",
  "peak_GiB",
)
_TOPOLOGY = {"v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
_BANDWIDTH = {"v5p": 2460e9, "v6e": 1640e9}  # Bytes per second and device.


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--chips", default="v6e,v5p")
  parser.add_argument("--sublayers", type=int, default=32)
  parser.add_argument("--block", type=int, default=8)
  parser.add_argument("--batch", type=int, default=4)
  parser.add_argument("--tokens", type=int, default=4096)
  parser.add_argument("--width", type=int, default=2048)
  parser.add_argument("--out", default="")
  options = parser.parse_args()
  os.environ["TPU_SKIP_MDS_QUERY"] = "1"
  os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "true"
  os.environ["JAX_PLATFORMS"] = "cpu"
  rows = []
  for chip in options.chips.split(","):
    base, bandwidth = None, _BANDWIDTH[chip]
    for arm in ("prenorm", "block, plain JAX", "block, kernels"):
      compiled = compile_arm(arm, chip, options)
      # The model's own seconds are not used: they come out negative here.
      cost = compiled.cost_analysis()
      memory = compiled.memory_analysis()
      assert cost is not None and memory is not None
      total = cost["bytes accessed"]
      base = base or total
      rows.append(
        {
          "chip": chip,
          "arm": arm,
          "sublayers": options.sublayers,
          "block": options.block,
          "tokens": options.batch * options.tokens,
          "width": options.width,
          "bytes_GB": f"{total / 1e9:.2f}",
          "bytes_ratio": f"{total / base:.3f}",
          "hbm_ms": f"{total / bandwidth * 1e3:.2f}",
          "peak_GiB": f"{memory.peak_memory_in_bytes / 2**30:.2f}",
        }
      )
      print(*rows[-1].values(), flush=True)
      if options.out:
        with open(options.out, "w", newline="") as file:
          writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
          writer.writeheader()
          writer.writerows(rows)


def compile_arm(arm, chip, options):
  """The compiled gradient of one arm."""
  import jax
  from jax.experimental import topologies
  import jax.numpy as jnp

  topology = topologies.get_topology_desc(
    platform="tpu", topology_name=_TOPOLOGY[chip]
  )
  sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
  shape = (options.batch, options.tokens, options.width)
  rows = (options.sublayers + 1, options.width)
  structs = [
    jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding),
    *[jax.ShapeDtypeStruct(rows, jnp.float32, sharding=sharding)] * 2,
    jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding),
  ]

  def step(x, query, gain, cotangent):
    out, vjp = jax.vjp(
      lambda *a: _stack(arm, options.sublayers, options.block, *a),
      x,
      query,
      gain,
    )
    return out, vjp(cotangent)

  return jax.jit(step).lower(*structs).compile()


def _stack(arm, sublayers, block, x, query, gain):
  import jax

  import attnres_kernels

  # An identity that the compiler can neither see through nor fuse across, like
  # the matrix products of a real sublayer.
  def sublayer(h):
    return jax.lax.optimization_barrier(h)

  if arm == "prenorm":
    for l in range(sublayers):
      x = x + sublayer(_rms_norm(x, gain[l]))
    return _rms_norm(x, gain[sublayers])

  implementation = "xla" if arm == "block, plain JAX" else "pallas_tpu"
  attend = functools.partial(
    attnres_kernels.depth_attention, implementation=implementation
  )
  merge = functools.partial(
    attnres_kernels.depth_merge_norm, implementation=implementation
  )
  sources = [x]
  for start in range(0, sublayers, block):
    stop = min(start + block, sublayers)
    out, lse = attend(query[start:stop], sources)
    out, lse = (
      [y[0] for y in jax.lax.split(z, [1] * (stop - start))] for z in (out, lse)
    )
    partial = sublayer(_rms_norm(out[0], gain[start]))
    update = None
    for i in range(1, stop - start):
      l = start + i
      partial, h = merge(out[i], lse[i], query[l], partial, update, gain[l])
      update = sublayer(h)
    sources.append(partial if update is None else partial + update)
  out, _ = attend(query[sublayers:], sources)
  return _rms_norm(out[0], gain[sublayers])


def _rms_norm(x, gain):
  import jax
  import jax.numpy as jnp

  wide = x.astype(jnp.float32)
  square = jnp.mean(wide * wide, axis=-1, keepdims=True)
  return (wide * jax.lax.rsqrt(square + 1e-6) * gain).astype(x.dtype)


if __name__ == "__main__":
  main()

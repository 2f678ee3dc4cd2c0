# SPDX-License-Identifier: Apache-2.0
"""Compiles the GPU kernels to machine code, without a GPU.

  pip install jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvdisasm
  # and ptxas, gcc
  export PYTHONPATH=.:kernels
  python kernels/benchmarks/gpu_static.py --out gpu_static.csv

Lowers each kernel for an H200, lets JAX's CUDA plugin compile it, and reads
what ptxas reports about the sm_90a code: registers and spills. The plugin asks
the driver for the compute capability and loads the result; a stand-in for the
driver, built by this program, answers the request and ignores the result.
Spills would mean that partial sums do not fit the registers; registers
determine how many thread blocks run on one multiprocessor at the
same time. `gpu_sass` counts the instructions of the machine code per token and
per byte: `issue_over_memory` is the time in which four schedulers issue them,
over that in which the memory of the chip moves the bytes. Above 1, a kernel
waits for its instructions, whatever its copies do.
"""

import argparse
import ctypes
import functools
import importlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from benchmarks import gpu_sass

from attnres_jax import csv_rows

# On an H100 or H200.
_REGISTERS, _THREADS, _BLOCKS = 65536, 128, 16
_SHARED = 228 * 2**10
_SHAPES = "table2,48b,one_query,wide,kimi_k3"
# The compute capability is 9.0, and everything else succeeds.
_DRIVER = """
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : 1;
  return 0;
}
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuGetErrorString(int error, const char **text) { *text = ""; return 0; }
"""
_SUCCEEDS = (
  "cuInit cuCtxGetCurrent cuModuleLoadData cuModuleGetFunction"
  " cuFuncSetAttribute cuModuleUnload"
)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--shapes", default=_SHAPES, help="names of families")
  parser.add_argument("--cuda", default="/usr/local/cuda")
  parser.add_argument("--nvdisasm", default="nvdisasm")
  parser.add_argument("--out", default="")
  options = parser.parse_args()
  if "MOSAIC_GPU_DUMP_TO" not in os.environ:
    _restart(options.cuda)
  rows = []
  for shape in _shapes(options.shapes.split(",")):
    for row in compile_shape(shape, options):
      rows.append(row)
      print(*row.values(), flush=True)
  if options.out:
    csv_rows.write(options.out, rows)


def compile_shape(shape, options):
  """The rows of both directions of one shape."""
  import jax
  import jax.numpy as jnp

  import attnres_kernels
  from attnres_kernels import warpgroup
  from attnres_kernels.depth_attention import pallas_gpu_cluster_plan

  struct = jax.ShapeDtypeStruct
  attend = functools.partial(
    attnres_kernels.depth_attention, implementation="pallas_gpu"
  )

  def step(query, sources):
    values, vjp = jax.vjp(attend, query, sources)
    return vjp(values)

  query = struct((shape.queries, shape.width), jnp.float32)
  source = struct((shape.tokens, shape.width), jnp.bfloat16)
  text = _lower(step, query, (source,) * shape.sources)
  plugin = importlib.import_module("jax_plugins.xla_cuda13")
  library = ctypes.CDLL(str(plugin._get_library_path()))
  library.MosaicGpuCompile.restype = ctypes.c_void_p
  folder = pathlib.Path(os.environ["MOSAIC_GPU_DUMP_TO"])
  for module in modules(text):
    if not library.MosaicGpuCompile(ctypes.c_char_p(module), len(module)):
      raise RuntimeError(f"{shape} does not compile")
  for path in sorted(folder.glob("*.ptxas")):
    kernel = re.sub(r"_\d+$", "", path.stem)
    backward = kernel.endswith("backward")
    plan = pallas_gpu_cluster_plan.plan(
      "backward" if backward else "forward",
      query,
      (source,) * shape.sources,
      shape.tokens,
    )
    found = report(path.read_text(), shared_bytes(shape, backward, plan))
    text = disassembled(path.with_suffix(".ptx"), options)
    if plan is None:
      tile = warpgroup.Tiles(shape.width).size
      kinds, places = gpu_sass.per_token(
        text, tiles=shape.width // tile, sources=shape.sources
      )
    else:
      tile = plan.columns
      kinds, places = gpu_sass.per_token_of_cluster(
        text,
        chunks=plan.chunks,
        spans=plan.spans,
        scale=plan.parts / plan.tokens,
      )
    moved = gpu_sass.read_bytes(
      shape.queries, shape.sources, shape.width, backward
    )
    yield {
      "kernel": kernel,
      "shape": str(shape),
      "parts": 1 if plan is None else plan.parts,
      "tile": tile,
      **found,
      "warps": found["blocks"] * _THREADS // 32,
      **gpu_sass.columns(kinds, places, moved),
      "exchanged": 0 if plan is None else plan.exchanged_bytes,
      "jax": jax.__version__,
    }
    path.unlink()


def disassembled(path: pathlib.Path, options) -> str:
  """The machine code of a kernel in PTX, as text."""
  code = path.with_suffix(".cubin")
  ptxas = pathlib.Path(options.cuda) / "bin" / "ptxas"
  subprocess.run(
    [ptxas, "-arch=sm_90a", "-O3", path, "-o", code],
    check=True,
    capture_output=True,
  )
  path.unlink()
  return subprocess.run(
    [options.nvdisasm, "-c", code], check=True, capture_output=True, text=True
  ).stdout


def modules(text: str) -> list[bytes]:
  """The kernels in the text of a lowered program, with escapes removed."""
  pieces = re.findall(r'module = "((?:[^"\\]|\\.)*)"', text)
  byte = re.compile(rb'\\([0-9A-F]{2}|\\|")')

  def unescape(match):
    escaped = match[1]
    return bytes([int(escaped, 16)]) if len(escaped) == 2 else escaped

  return [byte.sub(unescape, piece.encode("latin1")) for piece in pieces]


def shared_bytes(shape, backward: bool, plan) -> int:
  """Shared memory of a thread block: statistics, sums, exchanges."""
  from attnres_kernels import warpgroup

  if plan is not None:
    return plan.shared_bytes
  exchanges = 8 * _THREADS * 4
  if not backward:
    return 4 * shape.sources * min(shape.queries, 8) + exchanges
  tiles = warpgroup.Tiles(shape.width)
  sums = 4 * tiles.number * tiles.size * shape.queries
  sums = sums if sums <= warpgroup.SUMS_BYTES else 0
  return 4 * 3 * shape.sources * shape.queries + sums + exchanges


def report(text: str, shared: int = 0) -> dict[str, int]:
  """Registers per thread, bytes spilled, and thread blocks that fit.

  Args:
    text: of ptxas.
    shared: bytes of shared memory of a thread block.
  """
  registers = int(re.findall(r"Used (\d+) registers", text)[0])
  spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", text)
  # Registers are allocated in groups of eight.
  taken = -(-registers // 8) * 8
  return {
    "registers": registers,
    "spill_bytes": sum(map(int, spills)),
    "blocks": min(
      _BLOCKS,
      _REGISTERS // (taken * _THREADS),
      # A thread block takes a KiB more than it asks for.
      _SHARED // (shared + 2**10),
    ),
  }


def _shapes(names):
  from attnres_kernels.depth_attention import shapes

  known = {shape.name: shape for shape in shapes.NAMED}
  # The read at the output, and the shape that a peer favours.
  known["one_query"] = shapes.Shape("one_query", 1, 9, 8192, 7168)
  return [known[name] for name in names]


def _lower(function, *arguments):
  import jax
  from jax._src import mesh as mesh_lib

  device = mesh_lib.AbstractDevice(
    device_kind="NVIDIA H200", num_cores=132, platform="gpu"
  )
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
  with jax.sharding.use_abstract_mesh(mesh):
    traced = jax.jit(function).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def _restart(cuda):
  """Runs this program again, with a driver that accepts everything."""
  with tempfile.TemporaryDirectory() as folder:
    source = pathlib.Path(folder) / "driver.c"
    succeeds = "".join(
      f"int {name}() {{ return 0; }}\n" for name in _SUCCEEDS.split()
    )
    source.write_text(_DRIVER + succeeds)
    target = str(source.with_name("libcuda.so.1"))
    subprocess.run(
      ["gcc", "-shared", "-fPIC", "-o", target, str(source)], check=True
    )
    environment = os.environ | {
      "JAX_PLATFORMS": "cpu",
      "LD_LIBRARY_PATH": folder,
      "MOSAIC_GPU_CUDA_ROOT": cuda,
      "MOSAIC_GPU_DUMP_TO": folder,
      "MOSAIC_GPU_DUMP_PTX": "1",
      "MOSAIC_GPU_DUMP_PTXAS": "1",
    }
    command = [sys.executable, *sys.argv]
    sys.exit(subprocess.run(command, env=environment).returncode)


if __name__ == "__main__":
  main()

# SPDX-License-Identifier: Apache-2.0
"""How much memory a host needs to load a checkpoint onto a mesh.

  python -m tests.interop.peak_memory FOLDER 16

writes a Llama of 16 layers with random bytes (2.0 GB in bfloat16) to FOLDER,
unless it is there, loads it onto 8 CPU devices and prints, in MB, the largest
shard of a leaf, what all leaves take, and the peak of the process above what it
had before and above what the leaves take.
"""

import json
import pathlib
import resource
import sys
import threading
import time

import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.interop import families
from attnres_jax.interop import huggingface
from attnres_jax.interop import tensor_files

_MB = 1e6


def write(folder, layers):
  """Writes a Llama whose weights are random."""
  config = config_lib.ModelConfig(
    vocab_size=32_000, width=2048, num_layers=layers, num_heads=16,
    num_kv_heads=8, head_width=128, mlp_width=8192, tie_embeddings=True,
    residual=config_lib.ResidualConfig(name="prenorm"),
  )  # fmt: skip
  family = families.FAMILIES["llama"]
  rng, entries = np.random.default_rng(0), []
  for rule in family.rules(config):
    shape = rule.tensor_shape
    draw = lambda shape=shape: rng.standard_normal(shape, np.float32)
    entries += [
      tensor_files.Entry(name, "BF16", shape, draw) for name in rule.names
    ]
  folder.mkdir(parents=True, exist_ok=True)
  tensor_files.write_folder(folder, entries, 500_000_000)
  values = family.write_config(config) | {"model_type": "llama"}
  (folder / huggingface.CONFIG).write_text(json.dumps(values))


def measure(folder):
  """Loads it; returns sizes in MB."""
  import jax

  mesh = sharding.make_mesh(config_lib.MeshConfig(data=1, fsdp=4, tensor=2))
  jax.device_put(np.zeros(8), sharding.replicated(mesh)).block_until_ready()
  source = huggingface.read(folder)
  before, most, done = _resident(), [0.0], threading.Event()

  def watch():
    while not done.wait(0.002):
      most[0] = max(most[0], _resident())

  watcher = threading.Thread(target=watch)
  watcher.start()
  began = time.perf_counter()
  model = huggingface.load(source, mesh)
  seconds = time.perf_counter() - began
  done.set()
  watcher.join()
  leaves = jax.tree.leaves(model)
  total = sum(s.data.nbytes for a in leaves for s in a.addressable_shards)
  shard = max(s.data.nbytes for a in leaves for s in a.addressable_shards)
  return dict(
    largest_shard=shard / _MB,
    leaves=total / _MB,
    peak=most[0] - before,
    above_leaves=most[0] - before - total / _MB,
    seconds=seconds,
    peak_of_process=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
  )


def _resident():
  pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
  return pages * resource.getpagesize() / _MB


def main(folder, layers):
  import jax

  jax.config.update("jax_num_cpu_devices", 8)
  folder = pathlib.Path(folder)
  if not folder.exists():
    write(folder, int(layers))
  found = measure(folder)
  print(json.dumps({name: round(value, 1) for name, value in found.items()}))


if __name__ == "__main__":
  main(*sys.argv[1:])

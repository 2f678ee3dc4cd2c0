# SPDX-License-Identifier: Apache-2.0
"""A prompt of 131072 tokens, compiled for v5p: what its blocks take.

Compiles one chunk of the prompt as the engine computes it, and notes the memory
of its temporaries and the collectives of its sublayers. `paper` is a network as
wide as the paper's example (section 4.2: d=7168, 8 blocks), whose sublayers are
narrow, so that blocks are most of what there is; what Block AttnRes takes more
than PreNorm is blocks, their embedding, and phase-1 mixtures. `48b` is the
first layers of the 48B network, with all kinds of sublayers.

  python -m experiments.decode_cost.prompts paper
  python -m experiments.decode_cost.prompts 48b --layers 4

Rows are added to prompts.csv. A program takes about a minute of one core.
"""

import collections
import os
import pathlib
import sys
import time
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.common import command_line
from attnres_jax.common import csv_rows
from attnres_jax.common import environment
from attnres_jax.common import sharding
from attnres_jax.inference import programs
from attnres_jax.models import residuals
from attnres_jax.models.residuals import base
from attnres_jax.plan import hlo
from attnres_jax.plan import topology

TABLE = pathlib.Path(__file__).with_suffix(".csv")
KEYS = ("network", "scheme", "devices", "chunk", "cached")
TOKENS, CHUNK, DEVICES = 131072, 16384, 8
SLICE = "v5p:2x2x2"
# Devices, tokens at once, tokens before them.
CASES = {
  "paper": ((1, TOKENS, 0), (DEVICES, TOKENS, 0), (DEVICES, CHUNK, 0)),
  "48b": (
    (DEVICES, TOKENS, 0),
    (DEVICES, CHUNK, 0),
    (DEVICES, CHUNK, TOKENS - CHUNK),
  ),
}
SCHEMES = ("prenorm", "block_attnres")


def main() -> None:
  parser = command_line.Parser(
    "python -m experiments.decode_cost.prompts", __doc__
  )
  parser.add_argument("network", choices=tuple(CASES))
  parser.add_argument("--layers", type=int, default=4, help="of the 48B")
  parser.add_argument("--chunk", default="", help="only this size")
  parser.add_argument("--schemes", default=",".join(SCHEMES))
  parser.add_argument("--out", default=str(TABLE), help="the table")
  options = parser.parse_args()
  for case in CASES[options.network]:
    if options.chunk not in ("", str(case[1])):
      continue
    for scheme in options.schemes.split(","):
      start = time.perf_counter()
      network = options.network
      config = _config(network, scheme, options.layers)
      if network == "48b":
        network += f", {options.layers} layers"
      row = dict(zip(KEYS, (network, scheme, *map(str, case))))
      row |= measure(config, *case)
      facts = environment.facts()
      row |= {name: facts[name] for name in ("jax", "python", "commit")}
      csv_rows.put(options.out, row, KEYS)
      print(f"{time.perf_counter() - start:.0f} s:", row, flush=True)


def measure(
  config: config_lib.ModelConfig, devices: int, chunk: int, cached: int
) -> dict[str, Any]:
  """The columns of a row."""
  size = config_lib.MeshConfig(data=1, tensor=devices)
  mesh = sharding.make_mesh(size, topology.devices(SLICE))
  model = jax.eval_shape(lambda: models.build_model(config))
  traced = programs.trace_extend(model, mesh, chunk, cached, TOKENS)
  row: dict[str, Any] = {
    "blocks_GB": _gigabytes(
      _block_bytes(config, -(-min(TOKENS, chunk) // devices))
    )
  }
  try:
    compiled = traced.lower().compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return row | {"temporary_GB": "does not fit"}
  memory = compiled.memory_analysis()
  assert memory is not None
  found = _collectives(hlo.Program(compiled.as_text()))
  return row | {
    "temporary_GB": _gigabytes(memory.temp_size_in_bytes),
    "sublayers": config.num_sublayers,
    "all_gather": found["all-gather"],
    "reduce_scatter": found["reduce-scatter"],
    "all_reduce": found["all-reduce"],
    "others": sum(found.values())
    - found["all-gather"]
    - found["reduce-scatter"]
    - found["all-reduce"],
  }


def _collectives(program: hlo.Program) -> collections.Counter[str]:
  """Of activations; the head and the drawing of a token send a few numbers."""
  found: collections.Counter[str] = collections.Counter()
  for one in program.collectives():
    if max((array.nbytes for array in one.arrays), default=0) > 2**20:
      found[one.kind] += round(one.count)
  return found


def _config(network: str, scheme: str, layers: int) -> config_lib.ModelConfig:
  if network == "48b":
    spec = f"configs/kimi_linear.py:size=48b,residual={scheme}"
    overrides = {"model.num_layers": layers}
    return config_lib.load_config(spec, overrides).model
  return config_lib.ModelConfig(
    vocab_size=1024,
    width=7168,
    num_layers=16,
    num_heads=DEVICES,
    head_width=128,
    mlp_width=1024,
    dtype="bfloat16",
    residual=config_lib.ResidualConfig(scheme, num_blocks=8),
  )


def _gigabytes(nbytes: int) -> str:
  return f"{nbytes / 1e9:.3f}"


def _block_bytes(config: config_lib.ModelConfig, tokens: int) -> int:
  """Bytes of all completed blocks of so many tokens, but the embedding."""

  def blocks() -> Any:
    residual = residuals.build_residual(config, rngs=nnx.Rngs(params=0))
    x_BTD = jnp.zeros((1, tokens, config.width), config.dtype)
    run = base.run_through(residual, x_BTD, lambda l, carry, slot: x_BTD)
    return residual.take_apart(run)[0]

  _, *completed = jax.eval_shape(blocks) or (None,)
  return sum(block.size * block.dtype.itemsize for block in completed)


if __name__ == "__main__":
  sys.exit(command_line.run(main))

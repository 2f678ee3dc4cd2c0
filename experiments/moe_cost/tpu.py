# SPDX-License-Identifier: Apache-2.0
"""Compiles one MoE sublayer of the 48B model for a TPU.

  python -m experiments.moe_cost.tpu [--tokens=8192,32768]

Compiled ahead of time for one v5p device with libtpu (no device needed), all
256 experts on it, in bfloat16. `flops_ratio` is the compiler's count over that
of the products of the chosen experts, the shared one and the router: 1 means
that no expert computes tokens that were not routed to it. `gigabytes` is what
the instructions of the compiled program read and write, as in every report of
`attnres_jax.plan`. (The compiler's own total takes the estimates of kernels,
some of which count each tile of weights as often as there are tiles of rows.)
`matrix_ms` and `hbm_ms` are flops and bytes over the peaks of the chip; the
larger one bounds the sublayer. Writes `tpu.csv` beside this file.
"""

import itertools
import os
import pathlib

os.environ["JAX_PLATFORMS"] = "cpu"

from absl import app
from absl import flags
from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.models import moe
from attnres_jax.plan import hlo
from attnres_jax.plan import topology
from experiments import measure as measure_lib

_TOKENS = flags.DEFINE_list(
  "tokens", ["8192", "32768"], "tokens of the device's rows"
)
_OUTPUT = flags.DEFINE_string(
  "output",
  str(pathlib.Path(__file__).with_name("tpu.csv")),
  "CSV file to write the rows to",
)

_TOPOLOGY = "v5p:2x2x1"
CONFIG = config_lib.ModelConfig(
  width=2304,
  num_layers=1,
  num_heads=32,
  dtype="bfloat16",
  moe=config_lib.MoeConfig(num_experts=256, top_k=8, expert_width=1024),
)


def measure(tokens: int, kind: str) -> dict:
  """Compiles one pass; returns the compiler's counts."""
  device = topology.devices(_TOPOLOGY)[0]
  place = jax.sharding.SingleDeviceSharding(device)
  module, x_BTD = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place),
    jax.eval_shape(
      lambda: (
        moe.Moe(CONFIG, rngs=nnx.Rngs(params=0)),
        jnp.zeros((1, tokens, CONFIG.width), jnp.bfloat16),
      )
    ),
  )

  def forward(module, x_BTD):
    return module(x_BTD)

  def forward_backward(module, x_BTD):
    y_BTD, pull = jax.vjp(forward, module, x_BTD)
    return pull(y_BTD)

  function = dict(forward=forward, forward_backward=forward_backward)[kind]
  compiled = jax.jit(function).lower(module, x_BTD).compile()
  cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
  text = compiled.as_text()
  assert cost is not None and memory is not None and text is not None
  shape = CONFIG.moe
  chosen = (shape.top_k + shape.num_shared) * 3 * shape.expert_width
  useful = 2 * tokens * CONFIG.width * (chosen + shape.num_experts)
  if kind == "forward_backward":
    useful *= 3
  flops = cost["flops"]
  moved = hlo.Program(text).hbm_bytes()
  chip = topology.chip(device)
  return dict(
    tokens=tokens,
    measure=kind,
    teraflops=round(flops / 1e12, 3),
    flops_ratio=round(flops / useful, 3),
    gigabytes=round(moved / 1e9, 2),
    matrix_ms=round(flops / chip.peak_flops_per_second * 1e3, 2),
    hbm_ms=round(moved / chip.hbm_bytes_per_second * 1e3, 2),
    temporary_GiB=round(memory.temp_size_in_bytes / 2**30, 2),
  )


def main(argv):
  del argv
  passes = itertools.product(
    map(int, _TOKENS.value), ("forward", "forward_backward")
  )
  rows = itertools.starmap(measure, passes)
  measure_lib.record(_OUTPUT.value, rows, hardware="compiled for v5p")


if __name__ == "__main__":
  app.run(main)

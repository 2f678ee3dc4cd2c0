# SPDX-License-Identifier: Apache-2.0
"""Temporary memory of a compiled step over the number of microbatches."""

from collections.abc import Iterator

from attnres_jax.aot import topology
from experiments.pipeline_cost import plans
from experiments.pipeline_cost import programs

TOPOLOGY = "v5e:2x4"
SIZE = programs.Size(
  ranks=2, virtual_stages=2, data=4, sublayers=8, block_size=2,
  width=256, length=256, dtype="bfloat16",
)  # fmt: skip
VARIANTS = ("prenorm", "block minimum", "block naive", "block autodiff")


def rows() -> Iterator[plans.Row]:
  """A row per variant and M, from P to 8 P.

  `units` is the compiler's temporary memory of a device over a vector of
  [tokens, width]; `slots` the slots of the pools of inputs, blocks and
  gradients that the plan asks for.
  """
  devices = topology.devices(TOPOLOGY)
  for variant in VARIANTS:
    for microbatches in (SIZE.ranks * n for n in (1, 2, 4, 8)):
      yield measure(variant, microbatches, devices)


def measure(variant: str, microbatches: int, devices) -> plans.Row:
  """Compiles one step."""
  config = programs.make_config(variant, SIZE, microbatches)
  pipeline = programs.make_pipeline(config, devices)
  memory = programs.lower(config, pipeline).compile().memory_analysis()
  stage = pipeline.stage
  pools = (stage.inputs, stage.blocks, stage.gradients)
  return dict(
    variant=variant,
    P=SIZE.ranks,
    V=SIZE.virtual_stages,
    M=microbatches,
    temporary_bytes=memory.temp_size_in_bytes,
    units=round(memory.temp_size_in_bytes / SIZE.vector_bytes, 2),
    slots=" ".join(str(pool.size) for pool in pools),
    token_bytes=3 * 4 * SIZE.length * microbatches,
    compiled_for=TOPOLOGY,
  )

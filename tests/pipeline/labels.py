# SPDX-License-Identifier: Apache-2.0
"""What devices really receive: a pipeline whose vectors are labels.

The program is the real one (`attnres_jax.pipeline`): its tables, transport,
pools, switches and backward passes. Only the network differs: chunk c computes
blocks in which each element names the microbatch and the block, and a running
sum that names the microbatch and the chunk. It checks that its inputs are the
right ones, of the right microbatch. So the content of an array that arrives at
a device is known without using the plan.

Each vector that a chunk computes is its label plus the sum of all inputs and
weights of the chunk, minus the same sum as a constant. This does not change its
value, and makes every gradient that is sent a positive number.
"""

from collections.abc import Callable
import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.common import sharding
from attnres_jax.models import loss as loss_lib
from attnres_jax.pipeline import layout as layout_lib
from attnres_jax.pipeline import spmd
from attnres_jax.pipeline import stage as stage_lib
from attnres_jax.pipeline import transport as transport_lib
from attnres_jax.plan import hlo

WIDTH, LENGTH = 8, 4
VECTOR_BYTES = 4 * WIDTH * LENGTH


class Arrival(NamedTuple):
  """The content of one message.

  Attributes:
    backward: whether these are gradients.
    tick: when it was sent.
    rank: the receiver.
    blocks: (microbatch, block) of each vector that is not padding; (-1, -1) for
      each gradient, which has no label.
    partial: (microbatch, chunk before the boundary), as above; None without.
  """

  backward: bool
  tick: int
  rank: int
  blocks: tuple[tuple[int, int], ...]
  partial: tuple[int, int] | None


class Sent(NamedTuple):
  """The transfers of a pipeline's loop, for all devices together.

  Attributes:
    ticks: how often the loop runs.
    forward: vectors per tick, from a rank to the next.
    backward: vectors per tick, to the previous rank.
    vector_bytes: sizes of the vectors that are sent.
  """

  ticks: int
  forward: int
  backward: int
  vector_bytes: frozenset[int]


def make_config(
  layout: layout_lib.Layout, rule: Any, microbatches: int, data: int = 1
) -> config_lib.RunConfig:
  """A sublayer per chunk, as narrow as possible."""
  return config_lib.RunConfig(
    model=config_lib.ModelConfig(
      vocab_size=256,
      width=WIDTH,
      num_layers=layout.num_sublayers // 2,
      num_heads=1,
      mlp_width=2 * WIDTH,
      dtype="float32",
      residual=config_lib.residual_config(
        "block_attnres", block_size=layout.block_size or 0
      ),
    ),
    data=config_lib.DataConfig(
      sequence_length=LENGTH, batch_size=microbatches * data
    ),
    mesh=config_lib.MeshConfig(stage=layout.num_ranks, data=data),
    pipeline=config_lib.PipelineConfig(
      layout.num_virtual_stages, microbatches, "fused", rule
    ),
  )


def lower(
  config: config_lib.RunConfig, devices: Any = None
) -> tuple[spmd.Pipeline, Callable[[spmd.Pipeline], Any]]:
  """A pipeline of labelled chunks, and what lowers its loss and gradient."""
  mesh = sharding.make_mesh(config.mesh, devices)
  pipeline = spmd.make_pipeline(config, mesh, network=LabelledNetwork)
  model = jax.eval_shape(lambda: models.build_model(config.model))
  model = sharding.with_sharding(model, sharding.state_sharding(model, mesh))
  shape = config.data.batch_size, config.data.sequence_length
  rows: Any = jax.ShapeDtypeStruct(
    shape, jnp.int32, sharding=sharding.batch_sharding(mesh)
  )
  weights: Any = rows.update(dtype=jnp.float32)
  examples = loss_lib.Examples(rows, rows, weights, None)
  return pipeline, lambda pipeline: jax.jit(pipeline.value_and_grad).lower(
    model, examples
  )


def sent(text: str, num_ranks: int, num_copies: int = 1) -> Sent:
  """Counts every collective-permute of a compiled program.

  Args:
    text: of the program.
    num_ranks: P, above 2; in a ring of two, both directions are the same.
    num_copies: devices that share a rank; their axes come after `stage`.

  Raises:
    ValueError: the program permutes outside of its loop, or not along the ring.
  """
  counts, sizes = set(), set()
  directions = {1: 0, num_ranks - 1: 0}
  for count, instruction, _ in hlo.Program(text).instructions():
    if instruction.op.removesuffix("-start") != "collective-permute":
      continue
    pairs = re.search(
      r"source_target_pairs=\{(\{[\d,{}]*\})\}", instruction.attributes
    )
    ends = re.findall(r"\{(\d+),(\d+)\}", pairs[1] if pairs else "")
    steps = {
      (int(b) // num_copies - int(a) // num_copies) % num_ranks for a, b in ends
    }
    if len(steps) != 1 or not steps <= directions.keys():
      raise ValueError(f"{instruction.name} is not along a ring: {pairs}")
    directions[steps.pop()] += len(ends)
    counts.add(count)
    sizes.add(int(instruction.arrays[0].nbytes))
  if len(counts) != 1:
    raise ValueError(f"expected one loop with permutes, found {sorted(counts)}")
  return Sent(
    counts.pop(), directions[1], directions[num_ranks - 1], frozenset(sizes)
  )


def receive(
  layout: layout_lib.Layout, rule: str, microbatches: int
) -> tuple[list[Arrival], str]:
  """Runs a step; returns everything that arrived, and the compiled program.

  Raises:
    RuntimeError: a chunk received a wrong input.
  """
  config = make_config(layout, rule, microbatches)
  heard: list[Callable[[], Arrival]] = []
  pipeline, lowered = lower(config)
  pipeline = _ListeningPipeline.of(pipeline, heard.append)
  # Almost nothing is computed; what is sent does not change.
  quick = {"xla_backend_optimization_level": 0}
  compiled = lowered(pipeline).compile(quick)
  model = models.build_model(config.model)
  of_row = np.arange(microbatches, dtype=np.int32)[:, None]
  tokens: Any = np.broadcast_to(of_row, (microbatches, LENGTH))
  batch = loss_lib.Examples(tokens, tokens, jnp.ones(tokens.shape), None)
  arguments = jax.device_put((model, batch), compiled.input_shardings[0])
  loss, _ = jax.block_until_ready(compiled(*arguments))
  jax.effects_barrier()
  if loss.nll != 0 or loss.z != microbatches:
    raise RuntimeError(
      f"{layout}, {rule}: {float(loss.nll):g} wrong elements in the inputs of"
      f" chunks, {float(loss.z):g} of {microbatches} microbatches at the end"
    )
  return [arrival() for arrival in heard], compiled.as_text()


@dataclasses.dataclass(frozen=True)
class LabelledNetwork(stage_lib.Network):
  """Chunks that compute labels."""

  def run(self, chunk, sublayers, shared, blocks, partial, microbatch):
    """See the base class. Final states count wrong elements of all inputs."""
    del shared
    index_B = microbatch.inputs[:, 0]
    layout, last = self.layout, self.layout.num_chunks - 1
    inputs = [
      (x_BTD, _block_label(layout, index_B, b))
      for b, x_BTD in enumerate(blocks)
    ]
    if layout.has_partial(chunk):
      inputs.append((partial, _partial_label(layout, index_B, chunk - 1)))
    wrong_BTD = self.no_states(microbatch)
    total = functools.reduce(
      jnp.add, (jnp.sum(leaf) for leaf in jax.tree.leaves(sublayers))
    )
    read_BTD = jnp.full((*microbatch.inputs.shape, WIDTH), total)
    for x_BTD, label_B in inputs:
      is_wrong_BTD = x_BTD != label_B[:, None, None]
      wrong_BTD += is_wrong_BTD.astype(jnp.float32)
      read_BTD += x_BTD
    nothing_BTD = read_BTD - jax.lax.stop_gradient(read_BTD)
    if chunk == last:
      # Errors of earlier chunks are part of their outputs.
      return wrong_BTD + nothing_BTD
    # A wrong input gives an output that no chunk accepts.
    error = 0.5 * jnp.minimum(jnp.sum(wrong_BTD), 1.0)

    def made(label_B):
      return label_B[:, None, None] + error + nothing_BTD

    return (
      tuple(
        made(_block_label(layout, index_B, b)) for b in layout.produced(chunk)
      ),
      made(_partial_label(layout, index_B, chunk))
      if layout.has_partial(chunk + 1)
      else None,
    )

  def loss_sums(self, h_BTD, head_DV, microbatch):
    """See the base class. `nll` counts wrong elements, `z` microbatches."""
    del head_DV
    total, count = jnp.sum(h_BTD), jnp.sum(microbatch.weights) / LENGTH
    return loss_lib.LossSums(total, jax.lax.stop_gradient(total), count)


def _block_label(layout: layout_lib.Layout, index, block):
  """From 1 upwards, as float32."""
  return jnp.float32(1 + index * (layout.num_blocks + 1) + block)


def _partial_label(layout: layout_lib.Layout, index, chunk):
  """From -1 downwards."""
  return jnp.float32(-1 - index * layout.num_chunks - chunk)


class _Clock:
  """The tick that is being traced."""

  now: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class _ListeningPipeline(spmd.Pipeline):
  """Reports every message that arrives at a device."""

  clock: _Clock

  @classmethod
  def of(cls, pipeline: spmd.Pipeline, report) -> "_ListeningPipeline":
    clock = _Clock()
    parts = _fields(pipeline)
    wire = _ListeningTransport(
      **_fields(pipeline.stage.transport), report=report, clock=clock
    )
    parts["stage"] = dataclasses.replace(pipeline.stage, transport=wire)
    return cls(**parts, clock=clock)

  def loop(self, tick, ticks, state):
    def body(state, slots):
      self.clock.now, state = state
      return self.clock.now + 1, tick(state, slots)

    return super().loop(body, ticks, (jnp.int32(ticks.start), state))[1]


@dataclasses.dataclass(frozen=True)
class _ListeningTransport(transport_lib.Transport):
  report: Callable[[Callable[[], Arrival]], None]
  clock: _Clock

  def send(self, message, *, backward=False):
    arrived = super().send(message, backward=backward)
    note = functools.partial(_note, self.layout, self.report, backward)
    rank = jax.lax.axis_index(self.axis)
    jax.debug.callback(
      note, self.clock.now, rank, arrived.blocks, arrived.partial
    )
    return arrived


def _fields(item: Any) -> dict[str, Any]:
  return {
    field.name: getattr(item, field.name) for field in dataclasses.fields(item)
  }


def _note(layout, report, backward, tick, rank, blocks, partial):
  """Stores one message, to be read later without delaying the devices."""
  copies = [np.array(x) for x in blocks]
  rest = None if partial is None else np.array(partial)
  tick, rank = int(tick), int(rank)
  report(lambda: _read(layout, backward, tick, rank, copies, rest))


def _read(layout, backward, tick, rank, blocks, partial):
  def label(x_BTD, unit):
    if backward:
      return -1, -1
    if not (x_BTD == x_BTD.flat[0]).all() or x_BTD.flat[0] % 1:
      raise RuntimeError(f"rank {rank}, tick {tick}: {x_BTD} names nothing")
    return divmod(int(abs(x_BTD.flat[0])) - 1, unit)

  labels = [label(x, layout.num_blocks + 1) for x in blocks if x.any()]
  rest = None
  if partial is not None and partial.any():
    rest = label(partial, layout.num_chunks)
  return Arrival(backward, tick, rank, tuple(labels), rest)

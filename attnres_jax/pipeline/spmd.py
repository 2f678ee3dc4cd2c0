# SPDX-License-Identifier: Apache-2.0
"""The pipeline as one program that all ranks run in lockstep.

One `shard_map`, manual over all axes of the mesh. A tick has a forward and a
backward slot on each rank. The tables of the schedule say which chunk of which
microbatch is in a slot. Each chunk has a loop of one or no trip, which writes
its results in place and has no collectives. On every rank, a tick does this:

  send    gradients that the last tick has made, to the rank before
  F       the forward slot; needs nothing of that, and hides it
  send    what F has made, to the next rank
  head    of the microbatch whose last chunk was in F, if there is one
  B       the backward slot; the next tick needs that, so that B hides it

In lockstep, all ranks would wait while one of them computes the head, so each
takes its share of the microbatch's tokens: the last rank sends it their states,
and receives their gradients. Whether a tick has a head is the same on all
ranks. Every rank adds up gradients of the whole head and the whole token table.

Warm-up and drain are ticks of the same loop in which B, or F, is empty on all
ranks, so that they take as long as the other slot. Separate loops would not
send zeros, but the program would contain every chunk twice.

The loop holds what `memory` has counted, for any number of microbatches.
Gradients are reduced once, after the loop, except over axes that shard weights
which are gathered at each tick (see `placement`).

`pipeline.schedule="gpipe"` uses autodiff of the forward loop, which saves the
cache at every tick: the simple mode, with which tests compare. Evaluation is
the forward loop alone.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.common import precision
from attnres_jax.common import scopes
from attnres_jax.common import sharding
from attnres_jax.models import loss as loss_lib
from attnres_jax.models import segments
from attnres_jax.pipeline import checks
from attnres_jax.pipeline import memory
from attnres_jax.pipeline import placement as placement_lib
from attnres_jax.pipeline import schedule as schedule_lib
from attnres_jax.pipeline import stage as stage_lib
from attnres_jax.pipeline import ticks as ticks_lib
from attnres_jax.pipeline import transport as transport_lib

Parameters = placement_lib.Parameters

# The axes over which the loss is summed: shares of a microbatch, and rows.
_LOSS_AXES = (sharding.STAGE, *sharding.ROWS)


class Slots(NamedTuple):
  """Slots of all ranks at a tick, int32 [P, 2]: chunk and microbatch, or -1."""

  forward: jax.Array
  backward: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Pipeline:
  """A pipelined network for `train_state`.

  `differentiate` maps (pipeline, parameters, batch) to the loss and gradients
  of this rank.
  """

  schedule: schedule_lib.Schedule
  stage: stage_lib.Stage
  placement: placement_lib.Placement
  differentiate: Callable[..., tuple[loss_lib.LossSums, Parameters]]

  @property
  def microbatches(self) -> int:
    """M: the number of parts of a batch."""
    return self.schedule.num_microbatches

  def loss_sums(
    self, model: models.Transformer, examples: loss_lib.Examples
  ) -> loss_lib.LossSums:
    """Sums of the loss over all rows: the forward loop alone."""

    def program(model, batch):
      parameters = self.gathered(self.placement.collect(model))
      sums = ticks_lib.forward_loss(self, parameters, self.cut(batch))
      return jax.lax.psum(sums, _LOSS_AXES)

    return self.on_mesh(program, sharding.WHOLE)(model, examples)

  def value_and_grad(
    self, model: models.Transformer, examples: loss_lib.Examples
  ) -> tuple[loss_lib.LossSums, models.Transformer]:
    """The sums of the loss, and the gradient of their total."""

    def program(model, batch):
      parameters, pull_back = jax.vjp(self.placement.collect, model)
      parameters = self.gathered(parameters)
      loss, gradient = self.differentiate(self, parameters, self.cut(batch))
      (gradient,) = pull_back(self.scattered(gradient))
      loss = jax.lax.psum(loss, _LOSS_AXES)
      return loss, self.placement.reduce(gradient)

    out_specs = sharding.WHOLE, self.placement.specs
    return self.on_mesh(program, out_specs)(model, examples)

  def kept_bytes(self, model: models.Transformer) -> dict[str, int]:
    """The pools of a device, which hold all microbatches in flight."""
    del model
    cache = jax.eval_shape(self.stage.empty_cache)
    return dict(
      running_state_bytes=_nbytes(cache.inputs),
      block_bytes=_nbytes(cache.blocks),
    )

  def on_mesh(
    self, program: Callable[..., Any], out_specs: Any
  ) -> Callable[..., Any]:
    """Runs `program(model, batch)` on every device, with its shards of both."""

    def named(model, batch):
      with scopes.part(scopes.PIPELINE):
        return program(model, batch)

    return jax.shard_map(
      named,
      mesh=self.placement.mesh,
      in_specs=(self.placement.specs, sharding.SEQUENCES),
      out_specs=out_specs,
      # Unchecked, so that no gradient rule within the loops sums over devices.
      check_vma=False,
    )

  def gathered(self, parameters: Parameters) -> Parameters:
    """The parameters as the loop uses them."""
    if self.placement.gathers_at_ticks:
      return parameters
    weights = self.placement.gather(parameters.weights)
    return parameters._replace(weights=weights)

  def scattered(self, gradient: Parameters) -> Parameters:
    """The gradient of the model, from the gradient of the loop's parameters."""
    if self.placement.gathers_at_ticks:
      return gradient
    weights = self.placement.scatter(gradient.weights)
    return gradient._replace(weights=weights)

  def cut(self, batch: loss_lib.Examples) -> loss_lib.Examples:
    """Rows of this device [B, ...] as [M, B / M, ...]."""
    count = self.microbatches
    return jax.tree.map(
      lambda a: a.reshape(count, a.shape[0] // count, *a.shape[1:]), batch
    )

  def loop(
    self, tick: Callable[[Any, Slots], Any], ticks: range, state: Any
  ) -> Any:
    """The state after some ticks."""

    def body(state, slots):
      return tick(state, slots), None

    slots = Slots(
      *(
        jnp.asarray(slots[ticks.start : ticks.stop])
        for slots in (self.schedule.forward, self.schedule.backward)
      )
    )
    return jax.lax.scan(body, state, slots)[0]

  def unit(
    self, slots: jax.Array, parameters: Parameters, batch: loss_lib.Examples
  ) -> tuple[jax.Array, stage_lib.Work]:
    """The chunk of this rank, from the slots of all ranks, and its work."""
    chunk, index = slots[jax.lax.axis_index(sharding.STAGE)]
    microbatch = jax.tree.map(lambda a: a[index], batch)
    weights = parameters.weights
    if self.placement.gathers_at_ticks:
      place = self.virtual_stage(chunk)
      shard = jax.tree.map(lambda w: w[place][None], weights)
      weights = self.placement.gather(shard)
    return chunk, stage_lib.Work(weights, parameters.shared, microbatch, index)

  def at_head(
    self, slots: Slots, batch: loss_lib.Examples
  ) -> tuple[jax.Array, loss_lib.Examples]:
    """Whether the last chunk is in a forward slot, and the microbatch."""
    layout = self.placement.layout
    chunk, index = slots.forward[layout.num_ranks - 1]
    return (
      chunk == layout.num_chunks - 1,
      jax.tree.map(lambda a: a[index], batch),
    )

  def share_of_loss(
    self,
    h_BTD: jax.Array,
    head_DV: jax.Array,
    microbatch: loss_lib.Examples,
  ) -> loss_lib.LossSums:
    """The loss of this rank's share of a microbatch's tokens.

    The last rank has their final states, and every rank the whole head.
    """
    ranks = self.placement.layout.num_ranks
    rank = jax.lax.axis_index(sharding.STAGE)

    def shares(x: jax.Array) -> jax.Array:
      """[P, tokens, ...], padded with zeros."""
      x = x.reshape(-1, *x.shape[2:])
      x = jnp.pad(x, [(0, -x.shape[0] % ranks)] + [(0, 0)] * (x.ndim - 1))
      return x.reshape(ranks, -1, *x.shape[1:])

    with scopes.part(scopes.HEAD):
      h_PUD = jax.lax.all_to_all(shares(h_BTD), sharding.STAGE, 0, 0)
      share = jax.tree.map(lambda a: shares(a)[rank][None], microbatch)
      config = self.stage.network.config
      return loss_lib.loss_sums(config, h_PUD[-1:], head_DV, share)

  def run_unit(
    self,
    slot: str,
    chunk: jax.Array,
    function: Callable[..., Any],
    state: Any,
    operands: tuple[Any, ...],
  ) -> Any:
    """`function(chunk, state, *operands)` for the chunk in a slot, if any."""
    for c in self.chunks:
      state = self.if_any(
        chunk == c,
        functools.partial(function, c),
        state,
        operands,
        name=scopes.unit(slot, c),
      )
    return state

  def if_any(
    self,
    condition: jax.Array,
    function: Callable[..., Any],
    state: Any,
    operands: tuple[Any, ...],
    *,
    ranks: int = 1,
    name: str = "",
  ) -> Any:
    """`function(state, *operands)` if the condition holds, else the state.

    A loop of at most one trip, whose state is updated in place; a conditional
    would copy it. The condition is true once per microbatch, on so many
    `ranks`. A unit of work has a name.
    """
    share = self.microbatches / self.schedule.num_ticks
    share *= ranks / self.placement.layout.num_ranks

    def body(i, state):
      # The compiler moves what no trip changes out of a loop, where it would
      # run at every tick. So all depends on the number of the trip.
      _, held = jax.lax.optimization_barrier((i, operands))
      return function(state, *held)

    with scopes.mean_trips(share, name):
      return jax.lax.fori_loop(0, condition.astype(jnp.int32), body, state)

  def virtual_stage(self, chunk: jax.Array) -> jax.Array:
    """The virtual stage of a chunk; 0 for chunk -1."""
    return jnp.maximum(chunk, 0) // self.placement.layout.num_ranks

  @property
  def chunks(self) -> range:
    """All chunks, one of which may be in a slot."""
    return range(self.placement.layout.num_chunks)


def make_pipeline(config: config_lib.RunConfig, mesh: Mesh) -> Pipeline:
  """Plans the steps of a run, on a mesh with an axis `stage` above 1.

  Raises:
    ConfigError: the mesh, the batch and the network do not fit together.
  """
  layout = checks.layout(config, mesh)
  microbatches = checks.num_microbatches(config, mesh)
  model = jax.eval_shape(lambda: models.build_model(config.model))
  scheme = model.residual
  layout = dataclasses.replace(
    layout, block_size=scheme.block_size, stream=scheme.stream
  )
  if config.model.depth_loop == "scan":
    segments.check(config.model.sublayer_kinds, layout.ends, scheme)
  chunks = stage_lib.Network(config, layout)
  rows = config.data.batch_size // sharding.num_row_shards(mesh) // microbatches
  block, partial = _state_shapes(chunks, model, rows)
  rule = config.pipeline.rule
  wire = transport_lib.Transport(layout, rule, sharding.STAGE, block, partial)
  schedule = schedule_lib.make_schedule(layout, microbatches)
  pools = {
    kind: schedule.slot_pool(kind, rule=rule) for kind in memory.LIFETIMES
  }
  specs = jax.tree.map(lambda s: s.spec, sharding.state_sharding(model, mesh))
  differentiate = _DIFFERENTIATE[config.pipeline.schedule]
  dtype = jnp.dtype(config.model.dtype)
  # Autodiff would round gradients to the dtype in which weights are sent.
  wide = differentiate is ticks_lib.by_autodiff
  dtypes = sharding.map_parameters(
    lambda p: precision.wide(dtype) if wide or p.wide else dtype, model
  )
  placement = placement_lib.Placement(
    mesh, layout, config.model.sublayer_kinds, specs, dtypes,
    config.pipeline.gather,
  )  # fmt: skip
  stage = stage_lib.Stage(chunks, wire, **pools)
  return Pipeline(schedule, stage, placement, differentiate)


# Indexed by `pipeline.schedule`.
_DIFFERENTIATE = {"fused": ticks_lib.by_hand, "gpipe": ticks_lib.by_autodiff}


def _state_shapes(
  network: stage_lib.Network, model: Any, rows: int
) -> tuple[jax.ShapeDtypeStruct | None, Any]:
  """Shapes of a completed block and of the rest of a state, at any boundary.

  Raises:
    ConfigError: they differ from one boundary to the next.
  """
  config, layout = network.config, network.layout
  shape = rows, config.data.sequence_length
  tokens: Any = jax.ShapeDtypeStruct(shape, jnp.int32)
  weights: Any = jax.ShapeDtypeStruct(shape, jnp.float32)
  batch = loss_lib.Examples(
    inputs=tokens,
    targets=tokens,
    weights=weights,
    segment_ids=tokens if config.data.segment_ids else None,
  )
  shared = placement_lib.Shared.of(model)
  blocks, shapes = (), []
  encode = lambda embedding, tokens: embedding.encode(tokens)
  partial = jax.eval_shape(encode, model.embedding, tokens)
  for chunk in range(layout.num_chunks - 1):
    kinds = network.kinds(chunk)
    sublayers = {
      kind: jax.tree.map(
        lambda a, count=kinds.count(kind): jax.ShapeDtypeStruct(
          (count, *a.shape[1:]), a.dtype
        ),
        model.sublayers[kind],
      )
      for kind in dict.fromkeys(kinds)
    }
    made, partial = jax.eval_shape(
      functools.partial(network.run, chunk),
      sublayers, shared, blocks, partial, batch,
    )  # fmt: skip
    blocks = (*blocks, *made)
    shapes.append((len(blocks), partial))
  partials = [partial for _, partial in shapes if partial is not None]
  expected = [
    (
      layout.complete(chunk + 1),
      partials[0] if layout.has_partial(chunk + 1) else None,
    )
    for chunk in range(layout.num_chunks - 1)
  ]
  if shapes != expected or any(block != blocks[0] for block in blocks):
    config_lib.fail(
      "model.residual.name",
      config.model.residual.name,
      "a scheme whose state, apart from completed blocks, has one shape at"
      " every boundary between chunks, with mesh.stage above 1",
    )
  return blocks[0] if blocks else None, partials[0] if partials else None


def _nbytes(tree: Any) -> int:
  leaves = jax.tree.leaves(tree)
  return sum(math.prod(a.shape) * a.dtype.itemsize for a in leaves)

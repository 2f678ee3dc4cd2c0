# SPDX-License-Identifier: Apache-2.0
"""What every rank does at a tick: by hand in fused order, or for autodiff.

See `spmd` for the order of a tick's parts.
"""

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from attnres_jax.common import scopes
from attnres_jax.models import loss as loss_lib
from attnres_jax.pipeline import placement as placement_lib
from attnres_jax.pipeline import stage as stage_lib

if TYPE_CHECKING:
  from attnres_jax.pipeline import spmd

Parameters = placement_lib.Parameters


def by_hand(
  plan: "spmd.Pipeline", parameters: Parameters, batch: loss_lib.Examples
) -> tuple[loss_lib.LossSums, Parameters]:
  """The fused order: loss and gradients of this rank."""
  stage, wire = plan.stage, plan.stage.transport
  embedding = parameters.shared.embedding
  (table_VD, head_DV), of_embedding = jax.vjp(
    lambda embedding: (embedding.table[...], embedding.head_DV()), embedding
  )

  gathers = plan.placement.gathers_at_ticks

  def forward(chunk, state, message, work):
    return stage.forward(chunk, state[0], message, work)

  def backward(chunk, state, cache, message, d_final_BTD, work):
    sums, grads, *_ = state
    return stage.backward(chunk, cache, sums, grads, message, d_final_BTD, work)

  def head(state, microbatch):
    """Replaces the states of a microbatch by their gradient."""
    loss, d_head_DV, h_BTD = state

    def total(h_BTD, head_DV):
      sums = plan.share_of_loss(h_BTD, head_DV, microbatch)
      return sums.total, sums

    (d_BTD, more_DV), more = jax.grad(total, (0, 1), has_aux=True)(
      h_BTD, head_DV
    )
    loss = jax.tree.map(jnp.add, loss, more)
    return loss, d_head_DV + more_DV, d_BTD

  def tick(state, slots):
    cache, sums, gradient, d_embedding, loss, arrived, leaving = state
    d_table_VD, d_head_DV = d_embedding
    returned = wire.send(leaving, backward=True)
    chunk, work = plan.unit(slots.forward, parameters, batch)
    message, h_BTD = wire.message(), stage.network.no_states(work.microbatch)
    cache, message, h_BTD = plan.run_unit(
      scopes.FORWARD, chunk, forward, (cache, message, h_BTD), (arrived, work)
    )
    arrived = wire.send(message)
    any_head, microbatch = plan.at_head(slots, batch)
    loss, d_head_DV, d_final_BTD = plan.if_any(
      any_head,
      head,
      (loss, d_head_DV, h_BTD),
      (microbatch,),
      ranks=plan.placement.layout.num_ranks,
    )
    chunk, work = plan.unit(slots.backward, parameters, batch)
    grads = stage_lib.zeros_like(work.weights) if gathers else gradient
    leaving, d_first_BTD = wire.message(), jnp.zeros_like(d_final_BTD)
    sums, grads, leaving, d_first_BTD = plan.run_unit(
      scopes.BACKWARD,
      chunk,
      backward,
      (sums, grads, leaving, d_first_BTD),
      (cache, returned, d_final_BTD, work),
    )
    d_table_VD = plan.if_any(
      chunk == 0,
      embedding.add_gradient,
      d_table_VD,
      (work.microbatch.inputs, d_first_BTD),
    )
    if gathers:
      place, grads = plan.virtual_stage(chunk), plan.placement.scatter(grads)
      grads = jax.tree.map(lambda a, g: a.at[place].add(g[0]), gradient, grads)
    d_embedding = d_table_VD, d_head_DV
    return cache, sums, grads, d_embedding, loss, arrived, leaving

  state = (
    stage.empty_cache(),
    stage.no_gradients(parameters.shared),
    stage_lib.zeros_like(parameters.weights),
    stage_lib.zeros_like((table_VD, head_DV)),
    stage.network.no_loss(),
    wire.message(),
    wire.message(),
  )
  ticks = range(plan.schedule.num_ticks)
  _, sums, gradient, d_embedding, loss, *_ = plan.loop(tick, ticks, state)
  (embedding,) = of_embedding(d_embedding)
  return loss, Parameters(gradient, sums.shared._replace(embedding=embedding))


def by_autodiff(
  plan: "spmd.Pipeline", parameters: Parameters, batch: loss_lib.Examples
) -> tuple[loss_lib.LossSums, Parameters]:
  """GPipe: loss and gradients of this rank."""

  def total(parameters):
    sums = forward_loss(plan, parameters, batch)
    return sums.total, sums

  gradient, sums = jax.grad(total, has_aux=True)(parameters)
  return sums, gradient


def forward_loss(
  plan: "spmd.Pipeline", parameters: Parameters, batch: loss_lib.Examples
) -> loss_lib.LossSums:
  """The forward loop alone: loss of this rank."""
  stage, wire = plan.stage, plan.stage.transport
  head_DV = parameters.shared.embedding.head_DV()

  def no_forward(cache, message, work):
    del message
    nothing_BTD = stage.network.no_states(work.microbatch)
    return cache, wire.message(), nothing_BTD

  units = [functools.partial(stage.forward, c) for c in plan.chunks]

  # Conditionals have a gradient, unlike the loops of `Pipeline.if_any`.
  @jax.checkpoint
  def tick(state, slots):
    cache, loss, arrived = state
    chunk, work = plan.unit(slots.forward, parameters, batch)
    cache, message, h_BTD = jax.lax.switch(
      chunk + 1, [no_forward, *units], cache, arrived, work
    )
    any_head, microbatch = plan.at_head(slots, batch)
    more = jax.lax.cond(
      any_head,
      plan.share_of_loss,
      lambda *_: stage.network.no_loss(),
      h_BTD, head_DV, microbatch,
    )  # fmt: skip
    return cache, jax.tree.map(jnp.add, loss, more), wire.send(message)

  ticks = range(plan.schedule.num_forward_ticks)
  state = stage.empty_cache(), stage.network.no_loss(), wire.message()
  _, loss, _ = plan.loop(tick, ticks, state)
  return loss

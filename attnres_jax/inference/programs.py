# SPDX-License-Identifier: Apache-2.0
"""The compiled steps of an engine, and the state that they change.

Shapes are static, and the state is donated: a program changes it in place.
"""

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from attnres_jax import models
from attnres_jax.common import sharding
from attnres_jax.inference import draw as draw_lib
from attnres_jax.inference import prepared
from attnres_jax.models.mixers import cache as cache_lib


class State(NamedTuple):
  """What is on the device: the caches and settings of all slots.

  The last token of each slot is not in its cache yet.
  """

  cache: cache_lib.Cache
  token_B: jax.Array
  rows: draw_lib.Rows


def trace_next(
  model: models.Transformer,
  mesh: Mesh,
  slots: int,
  length: int,
) -> Any:
  """The traced program of the next token of all slots, whose caches are full.

  The model has abstract arrays, and `length` tokens are in each cache.
  """
  model, state = _abstract(model, mesh, slots, length)
  active_B = jax.ShapeDtypeStruct((slots,), bool)
  return next_token.trace(model, state, active_B, context=length, mesh=mesh)


def trace_extend(
  model: models.Transformer, mesh: Mesh, tokens: int, cached: int, length: int
) -> Any:
  """The traced program of a chunk of a prompt, for each shard of rows.

  The chunk of `tokens` follows `cached` ones, in caches for `length`.
  """
  rows = sharding.num_row_shards(mesh)
  model, state = _abstract(model, mesh, rows, length)
  int_P = jax.ShapeDtypeStruct((rows,), jnp.int32)
  bool_P = jax.ShapeDtypeStruct((rows,), bool)
  tokens_PT = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
  return extend.trace(
    model, state, tokens_PT, int_P, int_P, bool_P,
    context=cached, mesh=mesh,
  )  # fmt: skip


def _abstract(
  model: models.Transformer,
  mesh: Mesh,
  slots: int,
  length: int,
) -> tuple[models.Transformer, State]:
  """The shapes of an engine's network and state, with their shardings."""
  model = prepared.abstract_prepared(model, mesh)
  state = jax.eval_shape(lambda model: empty_state(model, slots, length), model)
  state = sharding.with_sharding(state, _state_sharding(model, state, mesh))
  return model, state


def empty_state(
  model: models.Transformer,
  slots: int,
  length: int,
  separate: bool = False,
) -> State:
  empty = model.init_cache(slots, length)
  if separate:
    empty = cache_lib.separated(empty)
  return State(
    empty,
    jnp.zeros(slots, jnp.int32),
    draw_lib.Rows.empty(slots),
  )


def _state_sharding(model: models.Transformer, state: State, mesh: Mesh) -> Any:
  """Caches are sharded over rows and heads, the rest is replicated."""
  rest = jax.tree.map(lambda _: sharding.replicated(mesh), state)
  cache = jax.tree.map(
    lambda spec: NamedSharding(mesh, spec),
    cache_lib.like_layers(model.cache_specs(), state.cache),
    is_leaf=lambda node: isinstance(node, PartitionSpec),
  )
  return rest._replace(cache=cache)


def _on(function: Any) -> Any:
  """Compiles a step: the state is donated, and its sharding does not change."""

  def run(model, state, *args, mesh, **static):
    ambient = (
      contextlib.nullcontext() if mesh is None else sharding.ambient(mesh)
    )
    with ambient:
      state, *rest = function(model, state, *args, **static)
    if mesh is not None:
      # Every process reads what was drawn.
      replicated = sharding.replicated(mesh)
      rest = jax.lax.with_sharding_constraint(rest, replicated)
    return keep_sharded(model, state, mesh), *rest

  run.__name__ = function.__name__
  return jax.jit(
    run,
    donate_argnames="state",
    static_argnames=("context", "mesh"),
  )


@_on
def start(model, state, slot, settings):
  """An empty slot for another request."""
  del model
  states = cache_lib.map_both(
    lambda a: a, lambda a: a.at[:, slot].set(0), state.cache.states
  )
  cache = cache_lib.Cache(state.cache.length_B.at[slot].set(0), states)
  rows = {
    name: getattr(state.rows, name).at[slot].set(value)
    for name, value in settings.items()
  }
  return (State(cache, state.token_B, draw_lib.Rows(**rows)),)


@_on
def extend(model, state, tokens_PT, slot_P, length_P, last_P, *, context):
  """A chunk of the prompts of P slots; the first token where a prompt ends."""
  out = model.extend(
    tokens_PT,
    cache_lib.take_rows(state.cache, slot_P, context),
    length_P,
  )
  last_P11 = jnp.maximum(length_P - 1, 0)[:, None, None]
  h_P1D = jnp.take_along_axis(out.hidden_BTD, last_P11, axis=1)
  logits_PV = model.embedding.decode(h_P1D)[:, 0]
  rows = jax.tree.map(lambda a: a.at[slot_P].get(mode="clip"), state.rows)
  rows = rows.greedy_unless(last_P)
  position_P = out.added.chunk.start_B + length_P
  drawn = draw_lib.draw(logits_PV, rows, position_P)
  # Prompts that do not end here have no place for a token.
  ended_P = jnp.where(last_P, slot_P, state.token_B.size)
  return (
    State(
      cache_lib.append(state.cache, out.added, slot_P),
      state.token_B.at[ended_P].set(drawn.token_B, mode="drop"),
      state.rows,
    ),
    drawn,
  )


@_on
def next_token(model, state, active_B, *, context):
  """The next token of every active slot."""
  out = model.extend(
    state.token_B[:, None],
    state.cache,
    active_B.astype(jnp.int32),
    context=context,
  )
  logits_BV = model.embedding.decode(out.hidden_BTD)[:, 0]
  position_B = out.added.chunk.start_B + 1
  rows = state.rows.greedy_unless(active_B)
  drawn = draw_lib.draw(logits_BV, rows, position_B)
  return (
    State(
      cache_lib.append(state.cache, out.added),
      jnp.where(active_B, drawn.token_B, state.token_B),
      state.rows,
    ),
    drawn,
  )


def keep_sharded(model, state, mesh):
  """Constrains a state, so that it is the same from step to step."""
  if mesh is None:
    return state
  return jax.lax.with_sharding_constraint(
    state, _state_sharding(model, state, mesh)
  )

# SPDX-License-Identifier: Apache-2.0
"""The programs of whole networks: to time on this machine.

Each function takes a network and an arm (`networks`) and returns a call for
each of its programs; a call returns arrays. Compiling is timed once.
"""

from collections.abc import Callable
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.models.mixers import cache as cache_lib
from attnres_jax.train import train_state
from experiments import measure as measure_lib
from experiments.cost import experts as experts_lib
from experiments.cost import networks

Calls = dict[str, Callable[[], Any] | measure_lib.Seconds]


def step(network: networks.Network, arm: str) -> Calls:
  """Passes through the trunk, and the time to compile a training step.

  The passes leave out head and loss, which all schemes share; the training step
  includes the optimiser.
  """
  model, tokens_BT = networks.build(network, arm), _tokens(network)

  def trunk_loss(model):
    return jnp.mean(jnp.square(model.hidden(tokens_BT)))

  return {
    "compile": _compile_seconds(network, arm),
    "forward": functools.partial(jax.jit(trunk_loss), model),
    "forward_backward": functools.partial(jax.jit(jax.grad(trunk_loss)), model),
  }


def _compile_seconds(
  network: networks.Network, arm: str
) -> measure_lib.Seconds:
  data = config_lib.DataConfig(
    batch_size=network.batch, sequence_length=network.tokens
  )
  config = config_lib.RunConfig(
    model=networks.with_arm(network, arm), data=data
  )
  mesh = sharding.make_mesh(config_lib.MeshConfig(data=1))
  program = train_state.make_program(config, mesh)
  state = program.init_state()
  tokens = np.asarray(_tokens(network, 1))
  lower = functools.partial(
    program.train_step.lower,
    state,
    sharding.shard_batch({"tokens": tokens}, mesh),
  )
  return measure_lib.timed(lambda: lower().compile() and None)


def decode(network: networks.Network, arm: str) -> Calls:
  """A token for each row, whose caches have one free entry.

  Beside it what a program without caches needs: the pass through all tokens.
  """
  net, rows, tokens = networks.build(network, arm), *network[1:3]

  @functools.partial(jax.jit, donate_argnums=1)
  def next_token(net, cache, ids_B):
    out = net.extend(ids_B[:, None], cache)
    logits_BV = net.embedding.decode(out.hidden_BTD)[:, 0]
    cache = cache_lib.append(cache, out.added)
    start_B = jnp.full(rows, tokens - 1, jnp.int32)
    return cache._replace(length_B=start_B), jnp.argmax(logits_BV, axis=-1)

  @jax.jit
  def recompute(net, tokens_BT):
    hidden_BTD = net.hidden(tokens_BT)
    logits_BV = net.embedding.decode(hidden_BTD[:, -1:])[:, 0]
    return jnp.argmax(logits_BV, axis=-1)

  cache = net.init_cache(rows, tokens)
  separate = isinstance(next(iter(net.sublayers.values())), nnx.List)
  if separate:
    cache = jax.jit(cache_lib.separated)(cache)
  cache = cache._replace(length_B=jnp.full(rows, tokens - 1, jnp.int32))
  state: list[Any] = [cache, jnp.zeros(rows, jnp.int32)]

  def decoded():
    state[0], ids_B = next_token(net, *state)
    state[1] = ids_B.astype(jnp.int32)
    return state[1]

  calls: Calls = {"decode": decoded}
  if not separate and rows == 1:
    calls["recompute"] = functools.partial(recompute, net, _tokens(network))
  return calls


def prefill(network: networks.Network, arm: str) -> Calls:
  """A prompt as one chunk: its cache and its first token."""
  net, rows, tokens = networks.build(network, arm), *network[1:3]

  @jax.jit
  def first_token(net, tokens_BT):
    cache = net.init_cache(rows, tokens)
    out = net.extend(tokens_BT, cache, context=0)
    logits_BV = net.embedding.decode(out.hidden_BTD[:, -1:])[:, 0]
    return cache_lib.append(cache, out.added), jnp.argmax(logits_BV, axis=-1)

  return {"prefill": functools.partial(first_token, net, _tokens(network))}


def experts(network: networks.Network, arm: str) -> Calls:
  """Both passes of a sublayer of experts; the arm does not matter."""
  del arm
  shape = network.batch, network.tokens, network.model.width
  x_BTD, dy_BTD = jax.random.normal(
    jax.random.key(0), (2, *shape), network.model.dtype
  )
  module = experts_lib.module_of(network.model)
  both = jax.jit(experts_lib.both_passes)
  return {"experts": functools.partial(both, module, x_BTD, dy_BTD)}


def _tokens(network: networks.Network, more: int = 0) -> jax.Array:
  """A batch of the network, with so many more tokens in a row."""
  rng, shape = np.random.default_rng(0), (network.batch, network.tokens + more)
  drawn = rng.integers(0, network.model.vocab_size, shape)
  return jnp.asarray(drawn, jnp.int32)

# SPDX-License-Identifier: Apache-2.0
"""Optimisers built from optax transformations, without schedules.

  weights            clipping -> AdamW or Muon -> weight decay -> learning rate
  selection biases   balancing of the experts' load, at a separate rate

A parameter declares, where it is created, which of its axes form a matrix,
whether it decays, and whether it is a selection bias. Transformations contain
no schedule: each update is given its rates (`learning_rate`, `balance_rate`),
so that a skipped step does not count and a restored state is consistent.

The rules follow Moonlight (arXiv:2502.16982) unless marked as our choice:

  matrices of mixers, MLPs, experts, routers   Muon, each expert separately
  embedding and head (axes with V)             AdamW
  vectors                                      AdamW
  decay                                        everything, including gains of
                                               norms, except `decays=False`:
                                               a_log and dt_bias of KDA,
                                               pseudo-queries and key gains (our
                                               choice)
  selection biases of experts (`load=True`)    `balance_update`; no clipping,
                                               norms, decay or optimiser

The room exceeds its budget of 600 lines by `groups`: an upcycled network may
freeze its trained parameters, or train its new ones at other rates.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.optimizer import groups
from attnres_jax.optimizer import muon
from attnres_jax.optimizer.schedules import (
  make_balance_schedule as make_balance_schedule,
)
from attnres_jax.optimizer.schedules import make_schedule as make_schedule
from attnres_jax.optimizer.schedules import settled_steps as settled_steps


def _adamw(config: config_lib.OptimConfig) -> optax.GradientTransformation:
  adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)

  def update(updates, state, params=None):
    # optax raises a float to the power of an integer count.
    with jax.numpy_dtype_promotion("standard"):
      return adam.update(updates, state, params)

  return optax.GradientTransformation(adam.init, update)


def _muon(config: config_lib.OptimConfig) -> optax.GradientTransformation:
  orthogonalised = muon.scale_by_muon(
    config.muon_momentum, config.muon_iterations, config.muon_update_rms
  )
  return optax.partition(
    {True: orthogonalised, False: _adamw(config)}, matrices
  )


# Each returns updates before weight decay and learning rate.
OPTIMIZERS: Mapping[
  str, Callable[[config_lib.OptimConfig], optax.GradientTransformation]
] = {"adamw": _adamw, "muon": _muon}


def make_optimizer(
  config: config_lib.OptimConfig,
) -> optax.GradientTransformationExtraArgs:
  """Turns gradients into the updates that are added to parameters.

  `update` takes two scalar keywords: `learning_rate`, and `balance_rate`, the
  step size of selection biases.
  """
  make = config_lib.choose("optim.name", config.name, OPTIMIZERS)
  clip = (
    optax.clip_by_global_norm(config.clip_norm)
    if config.clip_norm
    else optax.identity()
  )
  weights = optax.chain(
    clip,
    make(config),
    optax.add_decayed_weights(config.weight_decay, mask=decays),
    _scale_by_learning_rate(),
  )
  # Names of groups are parts of paths in checkpoints.
  members: Any = {False: weights, True: _balance()}
  chosen = optax.partition(members, loads)
  if config.freeze or config.rates:
    return groups.with_groups(chosen, config)
  return chosen


def _scale_by_learning_rate() -> optax.GradientTransformationExtraArgs:
  def update(updates, state, params=None, **rates):
    del params
    learning_rate = rates["learning_rate"]
    return jax.tree.map(lambda u: -learning_rate * u, updates), state

  return optax.GradientTransformationExtraArgs(_no_state, update)


def _balance() -> optax.GradientTransformationExtraArgs:
  def update(updates, state, params=None, **rates):
    del params

    def change(load):
      return balance_update(jnp.zeros_like(load), load, rates["balance_rate"])

    return jax.tree.map(change, updates), state

  return optax.GradientTransformationExtraArgs(_no_state, update)


def balance_update(
  bias: jax.Array, load: jax.Array, rate: float | jax.Array
) -> jax.Array:
  """The selection bias after a step (arXiv:2502.16982, appendix C).

  b <- b + rate (sign(e) - mean of sign(e)),  e = mean(load) - load

  Args:
    bias: float32 [..., E]; leading axes are independent layers.
    load: [..., E], tokens per expert over the global batch. A common factor
      does not change the result.
    rate: step size of the bias; 0 leaves it unchanged.
  """
  sign = jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
  return bias + rate * (sign - jnp.mean(sign, axis=-1, keepdims=True))


def _no_state(params: Any) -> optax.EmptyState:
  del params
  return optax.EmptyState()


def decays(params: Any) -> Any:
  """Tree of booleans: which parameters weight decay applies to."""
  return sharding.map_parameters(lambda p: p.decays and not p.load, params)


def matrices(params: Any) -> Any:
  """Tree of booleans: which parameters Muon trains."""
  return sharding.map_parameters(
    lambda p: p.is_matrix and "V" not in p.axes, params
  )


def loads(params: Any) -> Any:
  """Tree of booleans: which are selection biases."""
  return sharding.map_parameters(lambda p: p.load, params)


def trained(tree: Any, freeze: Sequence[str] = ()) -> Any:
  """The tree (of parameters or gradients) without what no gradient trains."""

  def trained_value(p: sharding.Parameter) -> Any:
    fixed = p.load or (freeze and groups.matches(freeze, p.name))
    return None if fixed else p.value

  return sharding.map_parameters(trained_value, tree)

# SPDX-License-Identifier: Apache-2.0
"""Optimisers built from optax transformations, without schedules.

  weights            clipping -> AdamW or Muon -> weight decay -> learning rate
  selection biases   balancing of the experts' load, at a rate of its own

`groups.TABLE` says which parameter goes where. A transformation holds no
schedule: each update is told its rates (`learning_rate`, `balance_rate`), so
that a step that is left out does not count, and a restored state is one.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from attnres_jax import config as config_lib
from attnres_jax.models import moe
from attnres_jax.optimizer import groups
from attnres_jax.optimizer import muon
from attnres_jax.optimizer.groups import trained
from attnres_jax.optimizer.schedules import make_balance_schedule
from attnres_jax.optimizer.schedules import make_schedule
from attnres_jax.optimizer.schedules import settled_steps

__all__ = [
  "OPTIMIZERS",
  "make_balance_schedule",
  "make_optimizer",
  "make_schedule",
  "settled_steps",
  "trained",
]


def _adamw(config: config_lib.OptimConfig) -> optax.GradientTransformation:
  return optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)


def _muon(config: config_lib.OptimConfig) -> optax.GradientTransformation:
  matrices = muon.scale_by_muon(
    config.muon_momentum, config.muon_iterations, config.muon_update_rms
  )
  return optax.partition(
    {True: matrices, False: _adamw(config)}, groups.matrices
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
    optax.add_decayed_weights(config.weight_decay, mask=groups.decays),
    _scale_by_learning_rate(),
  )
  return optax.partition({False: weights, True: _balance()}, groups.loads)


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
      return moe.balance_update(
        jnp.zeros_like(load), load, rates["balance_rate"]
      )

    return jax.tree.map(change, updates), state

  return optax.GradientTransformationExtraArgs(_no_state, update)


def _no_state(params: Any) -> optax.EmptyState:
  del params
  return optax.EmptyState()

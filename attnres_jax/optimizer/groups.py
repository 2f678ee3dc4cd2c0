# SPDX-License-Identifier: Apache-2.0
"""Groups of parameters that are not trained, or train at other rates.

An upcycled network has new parameters, which know nothing yet, beside trained
ones:

  optim.freeze=("^embedding/", "^sublayers/", "^final_norm/")  queries first
  optim.rates=("^residual/=10",)      all at once, queries ten times as fast

The optimiser's state is the same with and without groups, so that a run can
start from one that had others (`train.start_from`).
"""

from collections.abc import Sequence
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

from attnres_jax import config as config_lib
from attnres_jax.common import sharding


def with_groups(
  inner: optax.GradientTransformationExtraArgs, config: config_lib.OptimConfig
) -> optax.GradientTransformationExtraArgs:
  """`inner`, with the updates of some parameters multiplied by a factor.

  Gradients of frozen parameters are zero, so they do not count in a norm that
  is clipped; weight decay and balancing leave them alone, too.

  Raises (`init`):
    ConfigError: a pattern that no parameter matches; says what there is.
  """

  def init(params):
    _check(params, config)
    return inner.init(params)

  def update(updates, state, params=None, **rates):
    factors = factors_of(updates, config)
    updates = jax.tree.map(_times, _frozen_or_one(factors), updates)
    updates, state = inner.update(updates, state, params, **rates)
    return jax.tree.map(_times, factors, updates), state

  return optax.GradientTransformationExtraArgs(init, update)


def factors_of(params: Any, config: config_lib.OptimConfig) -> Any:
  """Tree of floats: what each parameter's updates are multiplied by.

  The first pattern of `rates` that is found in a name counts.
  """
  rates = [setting.rpartition("=") for setting in config.rates]

  def factor(parameter: sharding.Parameter) -> float:
    if matches(config.freeze, parameter.name):
      return 0.0
    for pattern, _, value in rates:
      if re.search(pattern, parameter.name):
        return float(value)
    return 1.0

  return sharding.map_parameters(factor, params)


def _frozen_or_one(factors: Any) -> Any:
  return jax.tree.map(lambda factor: float(factor != 0), factors)


def _times(factor: float, update: jax.Array) -> jax.Array:
  # 0 times what is not finite would not be 0.
  return factor * update if factor else jnp.zeros_like(update)


def matches(patterns: Sequence[str], name: str) -> bool:
  """Whether one of the patterns is found in the name of a parameter."""
  return any(re.search(pattern, name) for pattern in patterns)


def _check(params: Any, config: config_lib.OptimConfig) -> None:
  names: list[str] = []
  sharding.map_parameters(lambda p: names.append(p.name), params)
  rates = [setting.rpartition("=")[0] for setting in config.rates]
  for field, patterns in (("freeze", config.freeze), ("rates", rates)):
    for pattern in patterns:
      if not any(re.search(pattern, name) for name in names):
        listed = ", ".join(sorted({n.partition("/")[0] for n in names}))
        config_lib.fail(
          f"optim.{field}",
          pattern,
          f"a pattern found in a parameter's name, which begin with {listed}",
        )
  if names and all(matches(config.freeze, name) for name in names):
    config_lib.fail(
      "optim.freeze", config.freeze, "to leave something to train"
    )

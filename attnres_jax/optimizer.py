# SPDX-License-Identifier: Apache-2.0
"""Optimisers and learning-rate schedules, as optax parts.

Which parameters decay, in one table:

  embedding, head, matrices of the layers     weight decay
  gains of pre-norms and of the final norm    weight decay (Moonlight's recipe)
  residual scheme: pseudo-queries, key gains  none: decay would pull every depth
                                              softmax back to uniform. The paper
                                              does not say; this is our choice
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from attnres_jax import config as config_lib

NO_DECAY = ("residual",)


def _constant(config: config_lib.OptimConfig, steps: int) -> optax.Schedule:
  del steps
  if not config.warmup_steps:
    # optax holds the first value, 0, when there is no transition.
    return optax.constant_schedule(config.peak_lr)
  return optax.linear_schedule(0.0, config.peak_lr, config.warmup_steps)


def _cosine(config: config_lib.OptimConfig, steps: int) -> optax.Schedule:
  return optax.warmup_cosine_decay_schedule(
    init_value=0.0,
    peak_value=config.peak_lr,
    warmup_steps=config.warmup_steps,
    decay_steps=steps,
    end_value=config.final_lr_fraction * config.peak_lr,
  )


def _adamw(config: config_lib.OptimConfig) -> optax.GradientTransformation:
  return optax.chain(
    optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps),
    optax.add_decayed_weights(config.weight_decay, mask=decays),
  )


# Each maps (OptimConfig, number of steps) to a schedule over steps from 0.
SCHEDULES: dict[str, Callable[..., optax.Schedule]] = {
  "constant": _constant,
  "cosine": _cosine,
}

# Each returns updates that the learning rate still has to scale.
OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
  "adamw": _adamw,
}


def make_schedule(config: config_lib.OptimConfig, steps: int) -> optax.Schedule:
  """Learning rate as a function of the step, from 0, for a run of `steps`.

  Step s (the s+1-th update) takes the schedule's value at s + 1, so that the
  first update of a warm-up is not wasted on a learning rate of zero.
  """
  schedule = config_lib.choose("optim.schedule", config.schedule, SCHEDULES)
  if config.warmup_steps >= steps:
    config_lib.fail(
      "optim.warmup_steps",
      config.warmup_steps,
      f"fewer than train.steps={steps}",
    )
  values = schedule(config, steps)
  return lambda step: values(step + 1)


def make_optimizer(
  config: config_lib.OptimConfig,
) -> optax.GradientTransformation:
  """Clipping, then the optimiser; the caller applies the learning rate."""
  make = config_lib.choose("optim.name", config.name, OPTIMIZERS)
  clip = (
    optax.clip_by_global_norm(config.clip_norm)
    if config.clip_norm
    else optax.identity()
  )
  return optax.chain(clip, make(config))


def decays(params: Any) -> Any:
  """Tree of booleans: which parameters weight decay applies to."""

  def one(path, _):
    return not any(getattr(key, "name", None) in NO_DECAY for key in path)

  return jax.tree_util.tree_map_with_path(one, params)

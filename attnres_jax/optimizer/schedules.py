# SPDX-License-Identifier: Apache-2.0
"""Learning rates and rates of expert balancing over the steps of a run.

All warm up linearly from 0 and are continuous where their phases join:

  constant   the peak
  linear     a straight line from the peak to the final rate
  cosine     half a cosine from the peak to the final rate
  wsd        warm-up, stable, decay (arXiv:2404.06395): the peak until the last
             `decay_fraction` of the steps, then down along `decay_shape`
"""

from collections.abc import Callable, Mapping
import math

import jax.numpy as jnp
import optax

from attnres_jax import config as config_lib


def make_schedule(config: config_lib.OptimConfig, steps: int) -> optax.Schedule:
  """Learning rate as a function of the step, from 0, for a run of `steps`.

  Step s (the (s+1)-th update) uses the schedule's value at s + 1, so that the
  first update of a warm-up does not have a learning rate of zero.

  Raises:
    ConfigError: no such schedule or shape of decay, or its phases do not fit
      into the run.
  """
  make = config_lib.choose("optim.schedule", config.schedule, SCHEDULES)
  config_lib.choose("optim.decay_shape", config.decay_shape, DECAY_SHAPES)
  stop = _decay_start(config, steps)
  if config.warmup_steps >= steps or config.warmup_steps > stop:
    what = f"fewer than train.steps={steps}"
    if config.schedule == "wsd":
      what = f"at most {stop}, where the decay of train.steps={steps} starts"
    config_lib.fail("optim.warmup_steps", config.warmup_steps, what)
  rest = make(config, steps)
  values = rest
  if config.warmup_steps:
    # Without a transition, optax would keep the first value, 0.
    warmup = optax.linear_schedule(0.0, config.peak_lr, config.warmup_steps)
    values = optax.join_schedules([warmup, rest], [config.warmup_steps])

  def rate(step):
    # Compiled, a line to 0 would end just below it.
    return jnp.clip(
      values(jnp.asarray(step + 1, jnp.float32)), 0.0, config.peak_lr
    )

  return rate


def make_balance_schedule(
  config: config_lib.OptimConfig, steps: int
) -> optax.Schedule:
  """Step size of the experts' selection biases: 0 once a `wsd` rate decays."""
  stop = _decay_start(config, steps) if config.schedule == "wsd" else math.inf

  def rate(step):
    return jnp.where(
      jnp.asarray(step, jnp.float32) < stop, config.balance_rate, 0.0
    )

  return rate


def settled_steps(config: config_lib.OptimConfig, steps: int) -> float:
  """The number of first steps whose rates do not depend on `steps`.

  Up to this step, the length of a run may be changed.
  """
  if config.schedule == "constant":
    return math.inf
  if config.schedule == "wsd":
    return _decay_start(config, steps)
  return config.warmup_steps


def _decay_start(config: config_lib.OptimConfig, steps: int) -> int:
  """Steps of a `wsd` run before its decay."""
  if config.schedule != "wsd":
    return steps
  return steps - round(config.decay_fraction * steps)


# Each maps (OptimConfig, number of steps) to a schedule from the peak.
_Shape = Callable[[config_lib.OptimConfig, int], optax.Schedule]


def _flat(config: config_lib.OptimConfig, steps: int) -> optax.Schedule:
  del steps
  return optax.constant_schedule(config.peak_lr)


def _line(config: config_lib.OptimConfig, steps: int) -> optax.Schedule:
  final = config.final_lr_fraction * config.peak_lr
  return optax.linear_schedule(config.peak_lr, final, steps)


def _half_cosine(config: config_lib.OptimConfig, steps: int) -> optax.Schedule:
  return optax.cosine_decay_schedule(
    config.peak_lr, steps, alpha=config.final_lr_fraction
  )


DECAY_SHAPES: Mapping[str, _Shape] = {"cosine": _half_cosine, "linear": _line}


def _after_warmup(shape: _Shape) -> _Shape:
  return lambda config, steps: shape(config, steps - config.warmup_steps)


def _wsd(config: config_lib.OptimConfig, steps: int) -> optax.Schedule:
  start = _decay_start(config, steps)
  if start == steps:
    return _flat(config, steps)
  decay = DECAY_SHAPES[config.decay_shape](config, steps - start)
  return optax.join_schedules(
    [_flat(config, steps), decay], [start - config.warmup_steps]
  )


# Each maps (OptimConfig, number of steps) to the schedule after warm-up.
SCHEDULES: Mapping[str, _Shape] = {
  "constant": _flat,
  "linear": _after_warmup(_line),
  "cosine": _after_warmup(_half_cosine),
  "wsd": _wsd,
}

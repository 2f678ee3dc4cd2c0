# SPDX-License-Identifier: Apache-2.0
"""Lines for people: the run that is about to train, and its cost."""

from collections.abc import Mapping, Sequence
import os
from typing import Any

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.common import chips
from attnres_jax.models import residuals


def tokens_of(config: config_lib.RunConfig, steps: int | None = None) -> int:
  """Tokens on which a run, or its first steps, are trained."""
  steps = config.train.steps if steps is None else steps
  return steps * config.data.batch_size * config.data.sequence_length


def num_chips(devices: Sequence[Any]) -> float:
  """Chips of a program's devices, of which some kinds have two per chip."""
  return len(devices) / chips.devices_per_chip(devices[0].device_kind)


def start_lines(
  config: config_lib.RunConfig,
  workdir: os.PathLike[str] | str,
  parameters: int,
  text_tokens: Sequence[int],
) -> list[str]:
  """Scheme, blocks, parameters, tokens and epochs, warm-up, folder.

  `text_tokens` are of each path of the training split.
  """
  name, optim = config.model.residual.name, config.optim
  label = residuals.RESIDUALS[name].style.label or name
  tokens = tokens_of(config)
  epochs = data.epochs(config.data, text_tokens, tokens)
  lines = {
    "scheme": label if label == name else f"{label} ({name})",
    "blocks": _blocks(config.model),
    "parameters": f"{parameters:,}",
    "tokens": f"{tokens:,} in {config.train.steps:,} steps: {epochs:.3g} epochs"
    f" of {sum(text_tokens):,}",
    "warm-up": f"{optim.warmup_steps:,} of {config.train.steps:,} steps, to a"
    f" rate of {optim.peak_lr:g}",
    "folder": str(workdir),
  }
  return [f"{key + ':':<12}{value}" for key, value in lines.items()]


def end_line(summary: Mapping[str, Any]) -> str:
  """The cost of a run over all of its attempts."""
  tokens, hours = summary["tokens"], summary["chip_hours"]
  return f"cost: {hours_text(hours)}, {tokens:,} tokens"


def hours_text(chip_hours: float) -> str:
  """Such as "0.0123 chip-hours" and "1,234 chip-hours"."""
  if chip_hours >= 100:
    return f"{chip_hours:,.0f} chip-hours"
  return f"{chip_hours:.3g} chip-hours"


def _blocks(model: config_lib.ModelConfig) -> str:
  """The blocks into which the scheme divides the depth."""
  size = residuals.abstract_residual(model).block_size
  depth = model.num_sublayers
  if not size:
    return f"none; {depth} sublayers"
  number, rest = -(-depth // size), depth % size
  last = f", the last of {rest}" if rest and number > 1 else ""
  return f"{number} of {size} sublayers{last}; {depth} sublayers"

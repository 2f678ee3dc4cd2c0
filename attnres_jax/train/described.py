# SPDX-License-Identifier: Apache-2.0
"""Builds what a config describes, without arrays, so that wrong names are told.

Registries of code map names of schemes, mixers and optimisers to classes, which
check many fields themselves. So a config is right if its network and its
optimiser can be built, which takes a tenth of a second. Only a mesh needs
devices (`train_state.make_program`).
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import jax

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax import optimizer
from attnres_jax.config import fields
from attnres_jax.models import residuals
from attnres_jax.models import segments
from attnres_jax.models import sublayer
from attnres_jax.optimizer import qk_clip

_RESIDUAL = "model.residual."
# Stands for the size of a vocabulary that is not known yet.
_SOME_TOKENS = 256


def check(config: config_lib.RunConfig) -> None:
  """Refuses a config without a network, an optimiser or a schedule.

  Raises:
    ConfigError: names the field or the parameter.
    NotImplementedError: the scheme lacks a method.
  """
  model = config.model
  if not model.vocab_size:
    model = dataclasses.replace(model, vocab_size=_SOME_TOKENS)
  optimizer.make_schedule(config.optim, config.train.steps)
  scheme = residuals.scheme_of(model)
  scheme.check_methods()
  # Not the rate, in which runs of a sweep differ.
  optim = dataclasses.replace(config.optim, peak_lr=1.0)
  make = optimizer.OPTIMIZERS.get(optim.name)
  cores = tuple(map(sublayer.CORES.get, model.sublayer_kinds))
  _check_built(model, optim, scheme, make, cores)
  if config.optim.qk_clip:
    qk_clip.check(config)
  # Chunks of a pipeline have a scan each.
  if model.depth_loop == "scan" and config.mesh.stage == 1:
    kinds = model.sublayer_kinds
    residual = residuals.abstract_residual(model)
    segments.check(kinds, (len(kinds),), residual)


@functools.lru_cache(maxsize=256)
def _check_built(
  model: config_lib.ModelConfig, optim: config_lib.OptimConfig, *registered: Any
) -> None:
  """Builds both; `registered` are keys of the cache only."""
  del registered
  network = jax.eval_shape(lambda: models.build_model(model))
  jax.eval_shape(optimizer.make_optimizer(optim).init, network)


def check_new(config: config_lib.RunConfig, by_hand: Mapping[str, Any]) -> None:
  """`check` of a config that no run has yet, whose fields a person has set.

  Raises:
    ConfigError: names the field or the parameter.
    NotImplementedError: the scheme lacks a method.
  """
  check(config)
  if residuals.scheme_of(config.model).has_blocks:
    config.model.check_num_blocks()
  for name, value in by_hand.items():
    check_acts(config, name, value)


def check_acts(config: config_lib.RunConfig, name: str, value: Any) -> None:
  """Refuses a field that a person has set, if it does not act in this config.

  Raises:
    ConfigError: says beside what it acts.
  """
  option = name.removeprefix(_RESIDUAL).split(".")[0]
  if name.startswith(_RESIDUAL) and option != "name":
    residual, sizes = config.model.residual, {"block_size", "num_blocks"}
    options = {*fields.kinds(type(residual))} - {"name"}
    if not residuals.scheme_of(config.model).has_blocks:
      options -= sizes
    acts = option in options or option in sizes and not value
    if option == "form" and acts:
      acts = residuals.abstract_residual(config.model).form == value
    if not acts:
      listed = ", ".join(sorted(options)) or "none"
      given = f"{_RESIDUAL}name={residual.name!r}, whose options are {listed}"
      config_lib.fail(name, value, f"no value of its own with {given}")
  fields.check_acts(config, name, value)

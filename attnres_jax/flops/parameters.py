# SPDX-License-Identifier: Apache-2.0
"""Numbers of parameters, counted in the abstract network of a configuration."""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import jax

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.common import sharding
from attnres_jax.models import residuals
from attnres_jax.models import sublayer


@dataclasses.dataclass(frozen=True)
class Count:
  """Parameters of one part of a network.

  Attributes:
    total: of all.
    idle: parameters that no product with a token uses: of experts that it is
      not routed to, and of the embedding, which is a lookup.
    state: selection biases, which are not trained by gradients.
  """

  total: int = 0
  idle: int = 0
  state: int = 0

  @property
  def active(self) -> int:
    """The parameters that one token uses."""
    return self.total - self.idle

  def __add__(self, other: "Count") -> "Count":
    return Count(
      self.total + other.total,
      self.idle + other.idle,
      self.state + other.state,
    )


Parts = Mapping[str, Count]


def of_parts(model: config_lib.ModelConfig) -> dict[str, Count]:
  """All sublayers of each kind, norms, residual scheme, embedding and head."""
  kinds = dict.fromkeys(model.sublayer_kinds)
  names = (*kinds, "norms", "residual", "embedding", "head")
  modules = _modules(model, *_registered(model))
  return {name: total(modules.get(name, {})) for name in names}


def of_modules(model: config_lib.ModelConfig, kind: str) -> dict[str, Count]:
  """Parameters of all sublayers of a kind by module, without pre-norms."""
  return dict(_modules(model, *_registered(model))[kind])


def total(parts: Parts, *without: str) -> Count:
  """The sum of all parts except these."""
  left = [count for name, count in parts.items() if name not in without]
  return sum(left, start=Count())


def _registered(model: config_lib.ModelConfig) -> list[Any]:
  """The classes of the names in a config, which a notebook may replace."""
  cores = [sublayer.CORES.get(kind) for kind in set(model.sublayer_kinds)]
  return [residuals.RESIDUALS.get(model.residual.name), *cores]


@functools.lru_cache(maxsize=64)
def _modules(
  model: config_lib.ModelConfig, *registered: Any
) -> Mapping[str, Parts]:
  """{part: {module: count}} of a network."""
  del registered  # Part of the cache's key.
  counts: dict[str, dict[str, Count]] = {}

  def add(parameter: sharding.Parameter) -> None:
    part, module = _place(parameter.name)
    modules = counts.setdefault(part, {})
    count = _count(model, part, parameter)
    modules[module] = modules.get(module, Count()) + count

  # An unknown vocabulary counts as empty.
  sized = dataclasses.replace(model, vocab_size=model.vocab_size or 1)
  network = jax.eval_shape(lambda: models.build_model(sized))
  sharding.map_parameters(add, network)
  if not model.vocab_size:
    counts["embedding"], counts["head"] = {}, {}
  return counts


def _place(name: str) -> tuple[str, str]:
  """(part, module) of a parameter, by its path in the network."""
  first, *rest = name.split("/")
  if first == "final_norm" or rest[1:] == ["norm", "gain"]:
    return "norms", "gain"
  if first == "embedding":
    return {"table": "embedding", "head": "head"}[rest[0]], rest[0]
  # sublayers/kind/core/module or residual/module
  return (rest[0], rest[2]) if first == "sublayers" else (first, rest[0])


def _count(
  model: config_lib.ModelConfig, part: str, parameter: sharding.Parameter
) -> Count:
  size, idle = parameter.value.size, 0
  if part == "embedding" and not model.tie_embeddings:
    idle = size  # A token looks up one row; the head is a product.
  if parameter.is_matrix and parameter.axes.startswith("E"):
    idle = (
      size // model.moe.num_experts * (model.moe.num_experts - model.moe.top_k)
    )
  return Count(size, idle, size if parameter.load else 0)

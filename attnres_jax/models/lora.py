# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (LoRA, arXiv:2106.09685) on any matrix.

  W' = W + alpha / rank * A B

`model.lora` selects matrices by their names. In a module, a `Matrix` takes the
place of such a parameter: reading it gives W', through which no gradient
reaches W. B begins as zeros, so the network begins as it was. The optimiser
trains adapters and nothing else, if there are any. `merged` adds them to their
matrices: what is sampled, served and exported is a plain network.

W' of a sublayer is computed when the sublayer is, so one of them is in memory
at a time.
"""

from collections.abc import Callable
import dataclasses
import math
import re
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision

# Parts of a network that may have adapters.
_PARTS = ("embedding", "sublayers")
# In paths of checkpoints: where the matrix is, with and without adapters.
_WEIGHT, _VALUE = "/weight/value", "/value"


class Matrix(nnx.Module):
  """In a module, takes the place of a parameter that is a matrix."""

  def __init__(self, weight: nnx.Variable, rank: int, scale: float, key: Any):
    metadata = weight.get_metadata()
    *stack, rows, columns = metadata["axes"].split("|")
    shape = weight.shape
    before = len(shape) - len(rows) - len(columns)
    lead, ins = shape[:before], shape[before : before + len(rows)]
    outs = shape[before + len(rows) :]
    self.rows, self.scale = len(rows), scale
    self.weight = nnx.Param(weight[...], **_known(metadata))
    drawn = jax.random.normal(key, (*lead, *ins, rank), jnp.float32)
    self.lora_a = nnx.Param(
      drawn / math.sqrt(math.prod(ins)),
      axes="|".join([*stack, rows, "R"]), adapter=True,
    )  # fmt: skip
    self.lora_b = nnx.Param(
      jnp.zeros((*lead, rank, *outs), jnp.float32),
      axes="|".join([*stack, "R", columns]), adapter=True,
    )  # fmt: skip

  @property
  def shape(self) -> tuple[int, ...]:
    return self.weight.shape

  def __getitem__(self, index: Any) -> jax.Array:
    return self._sum(jax.lax.stop_gradient(self.weight[...]))[index]

  def merged(self) -> nnx.Param:
    """The parameter that it took the place of, with the adapter added."""
    metadata = self.weight.get_metadata()
    weight = self.weight[...]
    merged = self._sum(weight).astype(weight.dtype)
    return nnx.Param(merged, **_known(metadata))

  def _sum(self, weight: jax.Array) -> jax.Array:
    a, b = self.lora_a[...], self.lora_b[...]
    before, rank = a.ndim - self.rows - 1, a.shape[-1]
    lead = weight.shape[:before]
    product = jnp.matmul(
      a.reshape(*lead, -1, rank),
      b.reshape(*lead, rank, -1),
      precision=jax.lax.Precision.HIGHEST,
    )
    return precision.widen(weight) + self.scale * product.reshape(weight.shape)


def attach(model: Any, config: config_lib.LoraConfig, key: Any) -> None:
  """Gives adapters to the matrices of a network that `config` selects.

  Raises:
    ConfigError: there is no such matrix; the message lists the existing ones.
  """
  names = _matrices(model)
  chosen = [name for name in names if re.search(config.match, name)]
  if not chosen:
    config_lib.fail(
      "model.lora.match",
      config.match,
      "a regular expression that is found in one of " + ", ".join(names),
    )
  keys = dict(zip(chosen, jax.random.split(key, len(chosen))))

  def with_adapter(name: str, node: nnx.Variable) -> Any:
    if name not in keys:
      return node
    scale = config.alpha / config.rank
    return Matrix(node, config.rank, scale, keys[name])

  for part in _PARTS:
    setattr(model, part, _replaced(part, getattr(model, part), with_adapter))


def merged(model: Any) -> Any:
  """The same function without adapters; the network itself if it has none."""
  if not model.config.lora.rank:
    return model
  model = jax.tree.map(lambda a: a, model)  # A copy, of modules only.
  is_leaf = lambda node: isinstance(node, Matrix)
  for part in _PARTS:
    plain = jax.tree.map(
      lambda node: node.merged() if is_leaf(node) else node,
      getattr(model, part),
      is_leaf=is_leaf,
    )
    setattr(model, part, plain)
  lora = config_lib.LoraConfig()
  model.config = dataclasses.replace(model.config, lora=lora)
  return model


def name_in_plain(path: str) -> str:
  """Where the checkpoint of a network without adapters has an array."""
  if path.endswith(_WEIGHT):
    return path.removesuffix(_WEIGHT) + _VALUE
  return path


def _matrices(model: Any) -> list[str]:
  names: list[str] = []

  def add_name(name: str, node: nnx.Variable) -> nnx.Variable:
    if "|" in node.get_metadata()["axes"]:
      names.append(name)
    return node

  for part in _PARTS:
    _replaced(part, getattr(model, part), add_name)
  return names


def _replaced(
  part: str, tree: Any, function: Callable[[str, nnx.Variable], Any]
) -> Any:
  """Replaces each parameter of a part by `function(name, parameter)`."""

  def at(path: Any, node: Any) -> Any:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return function(f"{part}/{name}", node)

  return jax.tree_util.tree_map_with_path(
    at, tree, is_leaf=lambda node: isinstance(node, nnx.Variable)
  )


def _known(metadata: dict[str, Any]) -> dict[str, Any]:
  """What a parameter says of itself where it is created."""
  names = "axes", "decays", "load", "wide", "exact"
  return {name: metadata[name] for name in names if name in metadata}

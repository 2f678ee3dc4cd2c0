# SPDX-License-Identifier: Apache-2.0
"""The trunk for new tokens of rows whose earlier tokens are in caches.

Sublayers run one by one: a program of a step grows with depth, and is faster
than one with a loop over layers.
"""

from collections.abc import Mapping
import contextlib
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax.common import scopes
from attnres_jax.common import sharding
from attnres_jax.models import layer_stacks
from attnres_jax.models import trunk
from attnres_jax.models.mixers import cache as cache_lib
from attnres_jax.models.residuals import tools

# The key of what a residual scheme keeps of earlier tokens, in a cache.
RESIDUAL = "residual"


def extend(
  run: trunk.Trunk, sublayers: Mapping[str, Any], embedding_BTD: jax.Array,
  caches: Mapping[str, Any], chunk: cache_lib.Chunk, *,
  context: int | None = None,
) -> tuple[jax.Array, dict[str, Any]]:  # fmt: skip
  """`Trunk.run`, for new tokens of rows whose earlier tokens are in caches.

  Sublayers are stacks, or lists (`layer_stacks.separated`). Caches are stacked
  like them; the cache of a scheme that looks back is a `cache.Layers`.
  `context` is at least as many tokens as any row has before the chunk, by
  default as many as there is room for.

  Returns:
    h_out [B, T, D]; by kind, what the caches should add (`cache.append`).
  """
  kinds = run.kinds
  cores: list[_Core] = []

  def layer(l: int) -> _Single:
    kind, place = kinds[l], kinds[:l].count(kinds[l])
    layers: Any = sublayers[kind]
    if isinstance(layers, nnx.List):
      single = layer_stacks.single(layers[place])
    else:
      single = layer_stacks.one_of(layers, place)
    cache = None
    if kind in caches:
      cache = cache_lib.layer(caches[kind], place, context)
    cores.append(_Core(single.core, cache, chunk))
    return _Single(single.norm, cores[-1])

  history, looking_back = None, contextlib.nullcontext()
  if RESIDUAL in caches:
    earlier = caches[RESIDUAL]
    if isinstance(earlier, cache_lib.Layers):
      (earlier,) = earlier.trees
    history = tools.History([a[0] for a in earlier], chunk.length_B)
    looking_back = history.looking_back()
  with looking_back:
    written = embedding_BTD.shape[1] > 1
    state = run.run_singly(embedding_BTD, None, layer, written=written)
    with scopes.part(scopes.RESIDUAL):
      h_BTD = run.residual.readout(state)
  added: dict[str, Any] = {
    kind: _like(
      caches[kind], [c.added for k, c in zip(kinds, cores) if k == kind]
    )
    for kind in caches.keys() & set(kinds)
  }
  if history is not None:
    added[RESIDUAL] = _like(caches[RESIDUAL], [tuple(history.later)])
  return h_BTD, added


def _like(cache: Any, trees: list[Any]) -> Any:
  """The trees of all layers, as a cache has its layers."""
  if isinstance(cache, cache_lib.Layers):
    add_axis = lambda tree: jax.tree.map(lambda a: a[None], tree)
    return cache_lib.Layers(tuple(map(add_axis, trees)))
  return jax.tree.map(lambda *a: jnp.stack(a), *trees)


class _Single(NamedTuple):
  """A sublayer, as `sublayer.apply` sees it."""

  norm: Any
  core: Any


class _Core:
  """A core, with its cache if it has one, as `sublayer.apply` sees it.

  It gathers tokens first.

  Attributes:
    added: what the cache should add, after the call.
  """

  def __init__(self, core: Any, cache: Any, chunk: cache_lib.Chunk):
    self.reads_qkv = getattr(core, "reads_qkv", False)
    self.added = None
    self._core, self._cache, self._chunk = core, cache, chunk

  def __call__(self, x: Any, segment_ids_BT: jax.Array | None) -> jax.Array:
    if self._cache is None:
      return self._core(_gathered(x), segment_ids_BT)
    y_BTD, self.added = self._core.extend(
      _gathered(x), self._cache, self._chunk
    )
    return y_BTD

  def project(self, x: Any) -> Any:
    return self._core.project(_gathered(x))

  def finish(
    self, x: Any, query: Any, key: Any, value: Any, segment_ids_BT: Any
  ) -> jax.Array:
    y_BTD, self.added = self._core.extend_heads(
      _gathered(x), query, key, value, self._cache, self._chunk
    )
    return y_BTD


def _gathered(x: Any) -> Any:
  return jax.tree.map(sharding.gather_tokens, x)

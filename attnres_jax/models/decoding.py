# SPDX-License-Identifier: Apache-2.0
"""The trunk for new tokens of rows whose earlier tokens are in caches."""

from collections.abc import Mapping, Sequence
import contextlib
import itertools
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax.common import scopes
from attnres_jax.common import sharding
from attnres_jax.models import layer_stacks
from attnres_jax.models import memory as memory_lib
from attnres_jax.models import trunk
from attnres_jax.models.mixers import cache as cache_lib
from attnres_jax.models.residuals import base

# The key of what a residual scheme keeps of earlier tokens, in a cache.
RESIDUAL = "residual"


def extend(
  sublayers: trunk.Sublayers,
  kinds: Sequence[str],
  residual: base.Residual,
  embedding_BTD: jax.Array,
  caches: Mapping[str, Any],
  chunk: cache_lib.Chunk,
  *,
  memory: memory_lib.DepthMemory,
  scan: bool,
  context: int | None = None,
) -> tuple[jax.Array, dict[str, Any]]:
  """`trunk.run`, for new tokens of rows whose earlier tokens are in caches.

  Args:
    sublayers: as in `trunk.run`.
    kinds: as in `trunk.run`.
    residual: as in `trunk.run`.
    embedding_BTD: of the new tokens.
    caches: of mixers by kind, stacked like the sublayers, or `cache.Layers`;
      and of the scheme, if it looks back.
    chunk: the new tokens.
    memory: as in `trunk.run`.
    scan: as in `trunk.run`.
    context: at least as many tokens as any row has before the chunk; by default
      as many as there is room for.

  Returns:
    h_out [B, T, D]; by kind, what the caches should add (`cache.append`).
  """
  scan &= RESIDUAL not in caches  # What is looked back at leaves the loop.
  # So do layers in separate arrays.
  scan &= not any(map(_is_separate, [*sublayers.values(), *caches.values()]))
  places = {kind: itertools.count() for kind in sublayers}

  def apply(residual, memory, kind, l, carries, slots, segment_ids_BT):
    if not scan:
      l = next(places[kind])
    layers: Any = sublayers[kind]
    if isinstance(layers, nnx.List):
      (single,) = layer_stacks.unstack(layers[l], 1)
    else:
      # Out of the whole stack: a loop over part of it would copy that part.
      single = layer_stacks.one_of(layers, l)
    core: Any = _OfWholeRows(single.core)
    if kind in caches:
      cache = cache_lib.layer(caches[kind], l, context)
      core = _WithCache(core, cache, chunk)
    y_BTD, new, carry, _ = trunk.apply_sublayer(
      residual,
      memory,
      kind,
      _Single(single.norm, core),
      carries,
      slots,
      segment_ids_BT,
    )
    added = core.added if kind in caches else None
    return y_BTD, new, carry, added

  counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
  history, looking_back = None, contextlib.nullcontext()
  if RESIDUAL in caches:
    earlier = caches[RESIDUAL]
    if _is_separate(earlier):
      (earlier,) = earlier.trees
    history = base.History([a[0] for a in earlier], chunk.length_B)
    looking_back = history.looking_back()
  with looking_back:
    with scopes.part(scopes.RESIDUAL):
      state = residual.init(embedding_BTD)
    (state, _), outputs = trunk.run_part(
      {kind: jnp.arange(count) for kind, count in counts.items()},
      kinds,
      residual,
      (state, memory.init()),
      None,
      memory=memory,
      scan=scan,
      remat="none",
      apply=apply,
    )
    with scopes.part(scopes.RESIDUAL):
      h_BTD = residual.readout(state)
  added: dict[str, Any] = {}
  for kind in caches.keys() & set(kinds):
    trees = [
      layer_stacks.interleave(
        [out for k, out in zip(run.kinds, outs) if k == kind]
      )
      for run, outs in outputs
      if kind in run.kinds
    ]
    is_separate = _is_separate(caches[kind])
    join = _as_layers if is_separate else layer_stacks.concatenate
    added[kind] = join(trees)
  if history is not None:
    later = tuple(a[None] for a in history.later)
    if _is_separate(caches[RESIDUAL]):
      later = cache_lib.Layers((later,))
    added[RESIDUAL] = later
  return h_BTD, added


def _is_separate(layers: Any) -> bool:
  return isinstance(layers, nnx.List | cache_lib.Layers)


def _as_layers(trees: list[Any]) -> cache_lib.Layers:
  return cache_lib.Layers(tuple(trees))


class _OfWholeRows:
  """A core that gathers tokens first, for `apply_sublayer` and `_WithCache`."""

  def __init__(self, core: Any):
    self.reads_qkv = getattr(core, "reads_qkv", False)
    self._core = core

  def __call__(self, x: Any, *arguments: Any) -> jax.Array:
    return self._core(_gathered(x), *arguments)

  def __getattr__(self, name: str) -> Any:
    method = getattr(self._core, name)
    return lambda x, *arguments: method(_gathered(x), *arguments)


def _gathered(x: Any) -> Any:
  return jax.tree.map(sharding.gather_tokens, x)


class _Single(NamedTuple):
  """A sublayer, as `apply_sublayer` sees it."""

  norm: Any
  core: Any


class _WithCache:
  """A mixer with its cache, as a depth memory sees it.

  Attributes:
    added: what the cache should add, after the call.
  """

  def __init__(self, core: Any, cache: Any, chunk: cache_lib.Chunk):
    self.reads_qkv = getattr(core, "reads_qkv", False)
    self.added = None
    self._core = core
    self._rest = cache, chunk

  def __call__(self, x: Any, segment_ids_BT: jax.Array | None) -> jax.Array:
    del segment_ids_BT
    y_BTD, self.added = self._core.extend(x, *self._rest)
    return y_BTD

  def project(self, x: Any) -> Any:
    return self._core.project(x)

  def finish(
    self,
    x: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids_BT: jax.Array | None = None,
    *columns: Any,
  ) -> jax.Array:
    del segment_ids_BT
    y_BTD, self.added = self._core.extend_heads(
      x, query, key, value, *self._rest, *columns
    )
    return y_BTD

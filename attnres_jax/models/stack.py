# SPDX-License-Identifier: Apache-2.0
"""The trunk: runs sublayers under a residual scheme it never looks into.

Depth segments (the blocks of Block AttnRes) run in a Python loop, since each
has more sources than the last. Inside a segment the transformer blocks are one
`lax.scan` where the scheme's carry allows it, else a Python loop too.

Activation checkpointing keeps the contract of the paper's section 4: per
sublayer its running state, per segment nothing but references to the completed
blocks. Two nested checkpoints do it. The outer one, around a segment, saves
the running states by name and recomputes phase 1 from the blocks. The inner
one, around a sublayer, sees to it that only one sublayer's intermediates are
alive at a time.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.models import layer as layer_lib
from attnres_jax.models import linear
from attnres_jax.models.residuals import base

Trace = base.Trace


def _remat_none(function: Callable[..., Any]) -> Callable[..., Any]:
  return function


def _remat_by(policy: Any) -> Callable[..., Any]:
  def remat(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.checkpoint(function, policy=policy)

  return remat


def _keep(*names: str) -> Any:
  return jax.checkpoint_policies.save_only_these_names(*names)


# Name -> (around a segment, around a sublayer).
REMAT = {
  "none": (_remat_none, _remat_none),
  "full": (_remat_by(_keep(base.DEPTH_STATE)), _remat_by(None)),
  "dots": (
    _remat_by(_keep(base.DEPTH_STATE, linear.PRODUCT)),
    _remat_by(None),
  ),
}


def run(
  layers: layer_lib.Layer,
  residual: base.Residual,
  embedding_BTD: jax.Array,
  segment_ids_BT: jax.Array | None,
  *,
  scan: bool,
  remat: str,
) -> jax.Array:
  """Runs all sublayers and returns h_out [B, T, D], before the final norm.

  Args:
    layers: one module whose leaves carry a leading axis of transformer blocks.
    residual: the scheme.
    embedding_BTD: h_1 = v_0.
    segment_ids_BT: document numbers that attention stays inside of, or None.
    scan: scan over transformer blocks where the scheme allows it.
    remat: a key of `REMAT`.
  """
  around_segment, around_sublayer = config_lib.choose(
    "model.remat", remat, REMAT
  )
  segments = residual.segments()
  # Whole transformer blocks: no segment begins or ends between two sublayers.
  whole = all(start % 2 == stop % 2 == 0 for start, stop in segments)
  scanned = scan and residual.scannable and whole
  state = residual.init(embedding_BTD)
  for (start, stop), (part, take) in zip(
    segments, _parts(layers, segments, scanned, remat), strict=True
  ):
    inside = functools.partial(
      _scanned if scanned and stop - start > 2 else _unrolled,
      take=take,
      residual=residual,
      start=start,
      stop=stop,
      segment_ids_BT=segment_ids_BT,
      around_sublayer=around_sublayer,
    )
    carry = around_segment(inside)(part, state)
    state = residual.close(state, carry, stop)
  return residual.readout(state)


def trace(
  layers: layer_lib.Layer,
  residual: base.Residual,
  embedding_BTD: jax.Array,
  segment_ids_BT: jax.Array | None,
) -> Trace:
  """Runs the trunk like `run`; returns what every sublayer read and wrote."""
  values, reads = [embedding_BTD], []
  singles = _unstack(layers, (residual.num_sublayers + 1) // 2)
  state = residual.init(embedding_BTD)
  for start, stop in residual.segments():
    carry, slots = residual.open(state, start, stop)
    for l, slot in enumerate(_unstack(slots, stop - start), start):
      layer, kind = singles[l // 2], layer_lib.SUBLAYERS[l % 2]
      h_BTD = residual.read(carry, slot)
      y_BTD = layer.core(kind, layer.norm(kind)(h_BTD), segment_ids_BT)
      carry = residual.write(carry, slot, y_BTD)
      reads.append(h_BTD)
      values.append(y_BTD)
    state = residual.close(state, carry, stop)
  return Trace(tuple(values), (*reads, residual.readout(state)))


def _unrolled(
  part: Any,
  state: Any,
  *,
  take: Callable[[Any], Any],
  residual: base.Residual,
  start: int,
  stop: int,
  segment_ids_BT: jax.Array | None,
  around_sublayer: Callable[..., Any],
) -> Any:
  layers = _unstack(take(part), (stop + 1) // 2 - start // 2)
  carry, slots = residual.open(state, start, stop)
  for l, slot in enumerate(_unstack(slots, stop - start), start):
    layer, kind = layers[l // 2 - start // 2], layer_lib.SUBLAYERS[l % 2]
    sublayer = functools.partial(_sublayer, residual, kind)
    y_BTD = around_sublayer(sublayer)(layer, carry, slot, segment_ids_BT)
    carry = residual.write(carry, slot, y_BTD)
  return carry


def _scanned(
  part: Any,
  state: Any,
  *,
  take: Callable[[Any], Any],
  residual: base.Residual,
  start: int,
  stop: int,
  segment_ids_BT: jax.Array | None,
  around_sublayer: Callable[..., Any],
) -> Any:
  carry, slots = residual.open(state, start, stop)
  pair = (stop - start) // 2, 2
  slots = jax.tree.map(lambda a: a.reshape(*pair, *a.shape[1:]), slots)

  def transformer_block(carry, xs):
    layer, layer_slots = xs
    for kind, slot in zip(layer_lib.SUBLAYERS, _unstack(layer_slots, 2)):
      sublayer = functools.partial(_sublayer, residual, kind)
      y_BTD = around_sublayer(sublayer)(layer, carry, slot, segment_ids_BT)
      carry = residual.write(carry, slot, y_BTD)
    return carry, None

  carry, _ = jax.lax.scan(transformer_block, carry, (take(part), slots))
  return carry


def _sublayer(
  residual: base.Residual,
  kind: str,
  layer: layer_lib.Layer,
  carry: Any,
  slot: Any,
  segment_ids_BT: jax.Array | None,
) -> jax.Array:
  x_BTD = residual.read_normed(carry, slot, layer.norm(kind))
  return layer.core(kind, x_BTD, segment_ids_BT)


def _parts(
  layers: layer_lib.Layer,
  segments: tuple[tuple[int, int], ...],
  scanned: bool,
  remat: str,
) -> list[tuple[Any, Callable[[Any], Any]]]:
  """For each segment (part, take): take(part) are its transformer blocks.

  The parts come from one split, whose gradient is one concatenation. Under
  activation checkpointing each part is everything, cut inside of the
  checkpoint, which would keep a copy of whatever was cut outside.
  """
  blocks = [slice(start // 2, (stop + 1) // 2) for start, stop in segments]
  if remat != "none":
    return [(layers, functools.partial(_cut, block)) for block in blocks]
  if scanned:
    parts = _split(layers, [block.stop - block.start for block in blocks])
    return [(part, _same) for part in parts]
  singles = _unstack(layers, blocks[-1].stop)
  return [(singles[block], _same) for block in blocks]


def _same(part: Any) -> Any:
  return part


def _cut(block: slice, tree: Any) -> Any:
  return jax.tree.map(lambda a: a[block], tree)


def _split(tree: Any, sizes: list[int]) -> list[Any]:
  """Cuts every leaf along its leading axis into parts of these sizes."""
  leaves, structure = jax.tree.flatten(tree)
  split = [jax.lax.split(leaf, sizes, axis=0) for leaf in leaves]
  return [
    jax.tree.unflatten(structure, [s[i] for s in split])
    for i in range(len(sizes))
  ]


def _unstack(tree: Any, count: int) -> list[Any]:
  """One tree for each of the `count` indices of the leading axis."""
  if isinstance(tree, list):
    return tree
  parts = _split(tree, [1] * count)
  return [jax.tree.map(lambda a: jnp.squeeze(a, 0), part) for part in parts]

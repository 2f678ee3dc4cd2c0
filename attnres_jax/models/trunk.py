# SPDX-License-Identifier: Apache-2.0
"""The trunk: runs sublayers under a residual scheme, for any scheme.

Depth segments (the blocks of Block AttnRes) run in a Python loop, since each
has more sources than the last. Inside a segment, sublayers that repeat a
pattern run as one `lax.scan` if the scheme's carry allows it, and the others in
a Python loop. With `depth_loop="scan"`, blocks that repeat kinds of sublayers
are one scan (`block_scan`).

The parameters are one stacked module per kind of sublayer, in the order of
depth; `kinds` lists the kind of each of the L sublayers.

Activation checkpointing follows the paper's section 4: it keeps the running
state of each sublayer and, per segment, only references to the completed
blocks. It uses two nested checkpoints. The outer one, around a segment, saves
the running states by name and recomputes phase 1 from the blocks. The inner
one, around a sublayer, ensures that only one sublayer's intermediates are live
at a time.
"""

from collections.abc import Callable, Mapping, Sequence, Set
import functools
import itertools
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.common import scopes
from attnres_jax.common import sharding
from attnres_jax.models import block_scan
from attnres_jax.models import layer_stacks
from attnres_jax.models import linear
from attnres_jax.models import moe
from attnres_jax.models import sublayer as sublayer_lib
from attnres_jax.models import value_residual as value_lib
from attnres_jax.models.mixers import causal_attention
from attnres_jax.models.residuals import base
from attnres_kernels import platforms

Trace = base.Trace
Sublayers = Mapping[str, sublayer_lib.Sublayer]
# `apply_sublayer` of one kind, by kind.
_Calls = Mapping[str, Callable[..., tuple[jax.Array, Any, Any]]]


def _remat(*names: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
  names = base.DEPTH_STATE, moe.ROUTING, *names
  policy = jax.checkpoint_policies.save_only_these_names(*names)
  return functools.partial(jax.checkpoint, policy=policy), jax.checkpoint


# Name -> (around a segment, around a sublayer).
REMAT: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
  "none": (lambda function: function, lambda function: function),
  "full": _remat(),
  "attention": _remat(causal_attention.ATTENTION),
  "dots": _remat(causal_attention.ATTENTION, linear.PRODUCT),
}


def run(
  sublayers: Sublayers,
  kinds: Sequence[str],
  residual: base.Residual,
  embedding_BTD: jax.Array,
  segment_ids_BT: jax.Array | None,
  *,
  value_residual: bool = False,
  scan: bool,
  remat: str,
  depth_loop: str = "unrolled",
) -> jax.Array:
  """Runs all sublayers and returns h_out [B, T, D], before the final norm.

  Args:
    sublayers: one module per kind, whose leaves have a leading axis over the
      sublayers of that kind; or `layer_stacks.separated`.
    kinds: of the L sublayers.
    residual: the scheme.
    embedding_BTD: h_1 = v_0.
    segment_ids_BT: document numbers, which mixers do not cross, or None.
    value_residual: whether later mixers use the first one's values.
    scan: scan over repeated sublayers, if the scheme allows it.
    remat: a key of `REMAT`.
    depth_loop: as in `config.ModelConfig`.

  Raises:
    ConfigError: a scan over depth is asked for, and there is none.
  """
  if depth_loop == "scan":
    block_scan.check(kinds, (len(kinds),), residual)
  with scopes.part(scopes.RESIDUAL):
    state = residual.init(embedding_BTD)
  state = run_part(
    sublayers,
    kinds,
    residual,
    state,
    segment_ids_BT,
    value_residual=value_residual,
    scan=scan,
    remat=remat,
    depth_loop=depth_loop,
  )
  with scopes.part(scopes.RESIDUAL):
    return residual.readout(state)


def run_part(
  sublayers: Sublayers,
  kinds: Sequence[str],
  residual: base.Residual,
  state: Any,
  segment_ids_BT: jax.Array | None,
  *,
  value_residual: bool = False,
  start: int = 0,
  scan: bool,
  remat: str,
  depth_loop: str = "unrolled",
) -> Any:
  """The scheme's state after part of a network, which runs as `run` does.

  Sublayers and kinds are of this part, and `start` sublayers are before it,
  which left the given state. With value residuals, it is the whole network.
  """
  around_segment, around_sublayer = config_lib.choose(
    "model.remat", remat, REMAT
  )
  calls = {
    kind: around_sublayer(functools.partial(apply_sublayer, residual, kind))
    for kind in sublayers
  }
  first: value_lib.First = {} if value_residual else None
  apart = {
    kinds.index(kind)
    for kind, stack in sublayers.items()
    if value_residual and value_lib.mixes(layer_stacks.first(stack).core)
  }
  segments = _plan(kinds, residual, start, scan, depth_loop, apart)
  for segment, (source, take) in zip(
    segments, _sources(sublayers, segments, remat), strict=True
  ):
    if segment.blocks is not None:
      state = _scan_blocks(
        segment, residual, take(source)[0], state, calls, around_segment,
        segment_ids_BT,
      )  # fmt: skip
      continue
    inside = functools.partial(
      _run_segment, segment, residual, take, calls, segment_ids_BT
    )
    carry, first = around_segment(inside)(source, state, first)
    with scopes.part(scopes.RESIDUAL):
      state = residual.close(state, carry, segment.stop)
  return state


def run_singly(
  kinds: Sequence[str], residual: base.Residual, embedding_BTD: jax.Array,
  segment_ids_BT: jax.Array | None, value_residual: bool,
  layer: Callable[[int], Any],
  see: Callable[[Any, Any, jax.Array], None] = lambda carry, slot, y_BTD: None,
  written: bool = False,
) -> Any:  # fmt: skip
  """Runs all sublayers one by one; returns the last state of the scheme.

  Arguments are as in `run`; `layer` returns sublayer l, from 0, and
  `see` gets the carry and the slot that a sublayer reads, and its output.
  With `written`, a carry is in memory when a sublayer reads it. Otherwise
  compilers add up all outputs for every read, and so keep them all.
  """
  first: value_lib.First = {} if value_residual else None

  def sublayer(l: int, carry: Any, slot: Any) -> Any:
    if written:
      carry = jax.lax.optimization_barrier(carry)
    with scopes.part(kinds[l]):
      y_BTD, new, after = apply_sublayer(
        residual, kinds[l], layer(l), carry, slot, segment_ids_BT, first
      )
    if first is not None:
      first.update(new)
    see(carry, slot, y_BTD)
    return y_BTD, carry if after is None else after

  return base.run_through(residual, embedding_BTD, sublayer)


def trace(
  sublayers: Sublayers,
  kinds: Sequence[str],
  residual: base.Residual,
  embedding_BTD: jax.Array,
  segment_ids_BT: jax.Array | None,
  *,
  value_residual: bool = False,
) -> Trace:
  """Runs the trunk like `run`; returns what every sublayer read and wrote."""
  values, reads = [embedding_BTD], []

  def see(carry: Any, slot: Any, y_BTD: jax.Array) -> None:
    reads.append(base.query_input(base.before_norm(residual, carry, slot)))
    values.append(y_BTD)

  singles = layer_stacks.in_order(sublayers, kinds)
  state = run_singly(
    kinds, residual, embedding_BTD, segment_ids_BT, value_residual,
    singles.__getitem__, see,
  )  # fmt: skip
  return Trace(tuple(values), (*reads, residual.readout(state)))


def layer_norms(sublayers: Sublayers, kinds: Sequence[str]) -> jax.Array:
  """Euclidean norm of all leaves of each transformer block: [num_layers]."""

  def square(leaf: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(leaf), axis=tuple(range(1, leaf.ndim)))

  # A frozen kind has no leaves.
  squares = [
    sum(map(square, jax.tree.leaves(s)), jnp.zeros(kinds.count(k), jnp.float32))
    for k, s in sublayers.items()
  ]
  # One gather: a slice per sublayer would let the program grow with depth.
  by_kind = [l for k in sublayers for l, kind in enumerate(kinds) if kind == k]
  squares_L = jnp.concatenate(squares)[np.argsort(by_kind)]
  return jnp.sqrt(jnp.sum(squares_L.reshape(-1, 2), axis=1))


class _Segment(NamedTuple):
  """Sublayers start..stop-1, which the scheme opens together, as runs.

  Attributes:
    start: the first sublayer.
    stop: the sublayer after the last one.
    runs: the sublayers.
    blocks: the same as one scan over blocks, or None.
  """

  start: int
  stop: int
  runs: tuple[layer_stacks.Run, ...]
  blocks: layer_stacks.Run | None = None


def _plan(
  kinds: Sequence[str], residual: base.Residual, start: int, scan: bool,
  depth_loop: str = "unrolled", apart: Set[int] = frozenset(),
) -> list[_Segment]:  # fmt: skip
  """The segments, or parts of segments, from sublayer `start` on.

  With a scan over depth, blocks that repeat are one. Sublayers `apart` are
  like no other.
  """
  cut = layer_stacks.no_runs
  if scan and residual.scannable:
    cut = layer_stacks.find_runs
  end = start + len(kinds)
  labels = [(kind, i if i in apart else None) for i, kind in enumerate(kinds)]

  def runs(first: int, stop: int) -> tuple[layer_stacks.Run, ...]:
    return tuple(
      layer_stacks.Run(tuple(kind for kind, _ in run.kinds), run.repeats)
      for run in cut(labels[first - start : stop - start])
    )

  parts = [(max(a, start), min(b, end)) for a, b in residual.segments()]
  segments = [_Segment(a, b, runs(a, b)) for a, b in parts if a < b]
  if depth_loop != "scan":
    return segments
  joined, remaining = [], iter(segments)
  for blocks in block_scan.find(kinds, residual, start):
    parts = list(itertools.islice(remaining, blocks.length))
    if blocks.repeats > 1:
      run = block_scan.sublayers_of(blocks)
      parts = [_Segment(parts[0].start, parts[-1].stop, (run,), blocks)]
    joined += parts
  return joined


def _scan_blocks(
  segment: _Segment, residual: Any, sublayers: Sublayers,
  state: Any, calls: _Calls,
  around: Callable[[Callable[..., Any]], Callable[..., Any]],
  segment_ids_BT: jax.Array | None,
) -> Any:  # fmt: skip
  """The state after blocks that repeat, of a scheme that `scans_blocks`."""
  rows = block_scan.RowsOfScan(residual.options, residual.eps, residual.dtype)

  def run_block(
    kinds: Sequence[str], weights: Any, bank: Any, segment_ids_BT: Any
  ) -> jax.Array:
    layers, reads = weights
    with scopes.part(scopes.RESIDUAL):
      carry, slots = residual.open_by(rows, reads, bank)
      slots = layer_stacks.unstack(slots, len(kinds))
    for kind, layer, slot in zip(kinds, layers, slots):
      with scopes.part(kind):
        y_BTD, *_ = calls[kind](layer, carry, slot, segment_ids_BT, None)
      with scopes.part(scopes.RESIDUAL):
        carry = residual.write(carry, slot, y_BTD)
    closed = residual.close(carry, carry, residual.block_size)
    return residual.take_apart(closed)[0][-1]

  assert segment.blocks is not None
  with scopes.part(scopes.RESIDUAL):
    reads = residual.queries.reads(segment.start, segment.stop)
    sources, rest = residual.take_apart(state)
  sources = block_scan.scan(
    lambda kinds, *args: around(functools.partial(run_block, kinds))(*args),
    segment.blocks,
    sublayers,
    reads,
    sources,
    segment_ids_BT,
  )
  return residual.put_together(sources, rest)


def repeats(
  kinds: Sequence[str], residual: base.Residual, scan: bool, depth_loop: str
) -> bool:
  """Whether `run` has any scan over sublayers or blocks."""
  segments = _plan(kinds, residual, 0, scan, depth_loop)
  return any(run.repeats > 1 for segment in segments for run in segment.runs)


def _run_segment(
  segment: _Segment, residual: base.Residual,
  take: Callable[[Any], list[Sublayers]], calls: _Calls,
  segment_ids_BT: jax.Array | None, source: Any, state: Any,
  first: value_lib.First,
) -> tuple[Any, value_lib.First]:  # fmt: skip
  """The carry after a segment, and the first values."""
  parts = take(source)
  with scopes.part(scopes.RESIDUAL):
    carry, slots = residual.open(state, segment.start, segment.stop)
    slots = layer_stacks.split(slots, [run.length for run in segment.runs])
  both = carry, first
  for run, part, run_slots in zip(segment.runs, parts, slots):

    def period(both, xs, run=run):
      part, slots = xs
      with scopes.part(scopes.RESIDUAL):
        slots = layer_stacks.unstack(slots, len(run.kinds))
      sublayers = layer_stacks.in_order(part, run.kinds)
      if run.repeats == 1 and not platforms.is_for_gpu():
        # Autodiff of a scan would stack the copies again, and keep them.
        sublayers = layer_stacks.unsliced(sublayers)
      for kind, sublayer, slot in zip(run.kinds, sublayers, slots):
        with scopes.part(kind):
          y_BTD, new, carry = calls[kind](
            sublayer, both[0], slot, segment_ids_BT, both[1]
          )
        with scopes.part(scopes.RESIDUAL):
          carry = both[0] if carry is None else carry
          carry = residual.write(carry, slot, y_BTD)
        first = both[1]
        if new:
          first = {**first, **jax.tree.map(base.save, new)}
        both = carry, first
      return both, None

    xs = part, run_slots
    if run.repeats == 1:
      both, _ = period(both, xs)
    else:
      xs = layer_stacks.fold(xs, run.repeats)
      both, _ = jax.lax.scan(period, both, xs)
  return both


def apply_sublayer(
  residual: Any,
  kind: str,
  sublayer: Any,
  before: Any,
  slot: Any,
  segment_ids_BT: jax.Array | None,
  first: value_lib.First,
) -> tuple[jax.Array, Any, Any]:
  """Runs one sublayer.

  `residual` is anything with `read` of a scheme, `sublayer` anything with a
  `norm` and a `core`. `before` is the carry of the scheme.

  Returns:
    The output, what `first` does not have yet, and the carry for `write` unless
    it is the one given.
  """
  with scopes.part(scopes.RESIDUAL):
    x, carry = residual.read(before, slot, sublayer.norm)
    # An unchanged carry would be copied by `jax.checkpoint`.
    carry = None if carry is before else carry
  if not value_lib.mixes(sublayer.core):
    x = base.query_input(x)
  y_BTD, new = value_lib.call(sublayer.core, kind, x, segment_ids_BT, first)
  y_BTD = _with_one_gradient(sharding.keep_tokens(y_BTD))
  return y_BTD, new, carry


@jax.custom_jvp
def _with_one_gradient(y_BTD: jax.Array) -> jax.Array:
  """Returns y; its gradient becomes one array of y's dtype.

  What the rest of the network returns is wider, such as the float32 gradient of
  a stream, or a sum. Compilers would make the conversion or the sum a part of
  every matrix product that reads the gradient, which then takes longer.
  """
  return y_BTD


@_with_one_gradient.defjvp
def _with_one_gradient_jvp(
  primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
  ((y_BTD,), (tangent_BTD,)) = primals, tangents
  return y_BTD, jax.lax.optimization_barrier(tangent_BTD)


def _sources(
  sublayers: Sublayers, segments: list[_Segment], remat: str
) -> list[tuple[Any, Callable[[Any], list[Sublayers]]]]:
  """For each segment (source, take); take(source) gives the parts of its runs.

  The parts come from one split, whose gradient is one concatenation. With
  activation checkpointing, each source is the whole stack, split inside the
  checkpoint, which would keep a copy of anything split outside; but layers that
  are separate are not copied.
  """
  sizes = {
    kind: [run.count(kind) for segment in segments for run in segment.runs]
    for kind in sublayers
  }
  ends = {kind: np.cumsum([0, *counts]) for kind, counts in sizes.items()}

  def cut(runs: Sequence[layer_stacks.Run], first: int, source: Any) -> Any:
    """Parts of runs, of which the first one has this number."""
    parts = []
    for i, run in enumerate(runs, first):
      parts.append({})
      for kind in dict.fromkeys(run.kinds):
        begin, end = ends[kind][i : i + 2]
        with scopes.part(kind):
          parts[-1][kind] = jax.tree.map(
            lambda a, b=begin, e=end: a[b:e], source[kind]
          )
    return parts

  before = itertools.accumulate((len(s.runs) for s in segments), initial=0)
  if remat != "none" and not _separate(sublayers):
    return [
      (sublayers, functools.partial(cut, segment.runs, first))
      for segment, first in zip(segments, before)
    ]
  split = {k: layer_stacks.split(sublayers[k], sizes[k]) for k in sublayers}
  return [
    (
      [
        {kind: split[kind][i] for kind in dict.fromkeys(run.kinds)}
        for i, run in enumerate(segment.runs, first)
      ],
      lambda parts: list(map(layer_stacks.joined, parts)),
    )
    for segment, first in zip(segments, before)
  ]


def _separate(sublayers: Sublayers) -> bool:
  return any(isinstance(layers, nnx.List) for layers in sublayers.values())

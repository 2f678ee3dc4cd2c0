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

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.common import scopes
from attnres_jax.common import sharding
from attnres_jax.models import block_scan
from attnres_jax.models import layer_stacks
from attnres_jax.models import linear
from attnres_jax.models import memory as memory_lib
from attnres_jax.models import sublayer as sublayer_lib
from attnres_jax.models.mixers import causal_attention
from attnres_jax.models.residuals import base

Trace = base.Trace
Sublayers = Mapping[str, sublayer_lib.Sublayer]


def _remat(*names: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
  names = base.DEPTH_STATE, *names
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
  memory: memory_lib.DepthMemory | None = None,
  scan: bool,
  remat: str,
  depth_loop: str = "unrolled",
) -> jax.Array:
  """Runs all sublayers and returns h_out [B, T, D], before the final norm.

  Args:
    sublayers: one module per kind, whose leaves have a leading axis over the
      sublayers of that kind.
    kinds: of the L sublayers.
    residual: the scheme.
    embedding_BTD: h_1 = v_0.
    segment_ids_BT: document numbers, which mixers do not cross, or None.
    memory: what mixers keep for later mixers; None for nothing.
    scan: scan over repeated sublayers, if the scheme allows it.
    remat: a key of `REMAT`.
    depth_loop: as in `config.ModelConfig`.

  Raises:
    ConfigError: a scan over depth is asked for, and there is none.
  """
  memory = memory or memory_lib.NoMemory()
  if depth_loop == "scan":
    block_scan.check(kinds, (len(kinds),), residual, memory)
  with scopes.part(scopes.RESIDUAL):
    state = residual.init(embedding_BTD)
  (state, _), _ = run_part(
    sublayers,
    kinds,
    residual,
    (state, memory.init()),
    segment_ids_BT,
    memory=memory,
    scan=scan,
    remat=remat,
    depth_loop=depth_loop,
  )
  with scopes.part(scopes.RESIDUAL):
    return residual.readout(state)


def run_part(
  sublayers: Mapping[str, Any],
  kinds: Sequence[str],
  residual: base.Residual,
  state: tuple[Any, Any],
  segment_ids_BT: jax.Array | None,
  *,
  memory: memory_lib.DepthMemory | None = None,
  start: int = 0,
  scan: bool,
  remat: str,
  depth_loop: str = "unrolled",
  apply: Callable[..., tuple[jax.Array, Any, Any, Any]] | None = None,
) -> tuple[tuple[Any, Any], list[tuple[layer_stacks.Run, list[Any]]]]:
  """Runs consecutive sublayers, which may be part of a network.

  Args:
    sublayers: of this part; trees of any kind, stacked, of which `apply` gets
      one.
    kinds: of the sublayers of this part.
    residual: the scheme, of the network.
    state: of the scheme and of the memory, before the part.
    segment_ids_BT: as in `run`.
    memory: as in `run`.
    start: number of sublayers of the network before this part.
    scan: as in `run`.
    remat: as in `run`.
    depth_loop: as in `run`.
    apply: runs a sublayer, `apply_sublayer` by default.

  Returns:
    Both states after the part, and what `apply` returned last: for each run,
    and each of its kinds, stacked over repeats.
  """
  memory = memory or memory_lib.NoMemory()
  around_segment, around_sublayer = config_lib.choose(
    "model.remat", remat, REMAT
  )
  calls = {
    kind: around_sublayer(
      functools.partial(apply or apply_sublayer, residual, memory, kind)
    )
    for kind in sublayers
  }
  outputs = []
  segments = _plan(kinds, residual, memory, start, scan)
  if depth_loop == "scan":
    segments = _joined(segments, kinds, residual, start)
  for segment, (source, take) in zip(
    segments, _sources(sublayers, segments, remat), strict=True
  ):
    if segment.blocks is not None:
      stacks = take(source)[0]
      state = _scan_blocks(
        segment, residual, stacks, state, calls, around_segment, segment_ids_BT
      )
      continue
    inside = functools.partial(
      _run_segment, segment, residual, memory, take, calls, segment_ids_BT
    )
    (carry, remembered), outs = around_segment(inside)(source, state)
    outputs += zip(segment.runs, outs)
    with scopes.part(scopes.RESIDUAL):
      state = residual.close(state[0], carry, segment.stop), remembered
  return state, outputs


def trace(
  sublayers: Sublayers,
  kinds: Sequence[str],
  residual: base.Residual,
  embedding_BTD: jax.Array,
  segment_ids_BT: jax.Array | None,
  *,
  memory: memory_lib.DepthMemory | None = None,
) -> Trace:
  """Runs the trunk like `run`; returns what every sublayer read and wrote."""
  memory = memory or memory_lib.NoMemory()
  remembered = memory.init()
  values, reads = [embedding_BTD], []
  singles = layer_stacks.in_order(sublayers, kinds)

  def sublayer(l: int, carry: Any, slot: Any) -> jax.Array:
    nonlocal remembered
    h = base.before_norm(residual, carry, slot)
    reads.append(base.query_input(h))
    (memory_slot,) = layer_stacks.unstack(memory.open(l, l + 1), 1)
    y_BTD, new, *_ = apply_sublayer(
      residual,
      memory,
      kinds[l],
      singles[l],
      (carry, remembered),
      (slot, memory_slot),
      segment_ids_BT,
    )
    remembered = memory.write(remembered, new)
    values.append(y_BTD)
    return y_BTD

  state = base.run_through(residual, embedding_BTD, sublayer)
  return Trace(tuple(values), (*reads, residual.readout(state)))


def layer_norms(sublayers: Sublayers, kinds: Sequence[str]) -> jax.Array:
  """Euclidean norm of all leaves of each transformer block: [num_layers]."""
  squares = [
    sum(
      jnp.sum(jnp.square(leaf), axis=tuple(range(1, leaf.ndim)))
      for leaf in jax.tree.leaves(stack)
    )
    for stack in sublayers.values()
  ]
  # One gather: a slice per sublayer would let the program grow with depth.
  by_kind = [
    l
    for stacked in sublayers
    for l, kind in enumerate(kinds)
    if kind == stacked
  ]
  squares_L = jnp.concatenate(squares)[np.argsort(by_kind)]
  return jnp.sqrt(jnp.sum(squares_L.reshape(-1, 2), axis=1))


@dataclasses.dataclass(frozen=True)
class _Segment:
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
  blocks: block_scan.Blocks | None = None


def _plan(
  kinds: Sequence[str],
  residual: base.Residual,
  memory: memory_lib.DepthMemory,
  start: int,
  scan: bool,
) -> list[_Segment]:
  """The segments, or parts of segments, from sublayer `start` on."""
  find = scan and residual.scannable
  cut = layer_stacks.find_runs if find else layer_stacks.no_runs
  end = start + len(kinds)
  # Sublayers that change the structure of the memory are like no other.
  labels = [
    (kind, l if memory.changes(l) else None)
    for l, kind in enumerate(kinds, start)
  ]
  parts = [(max(a, start), min(b, end)) for a, b in residual.segments()]
  return [
    _Segment(a, b, tuple(map(_of_kinds, cut(labels[a - start : b - start]))))
    for a, b in parts
    if a < b
  ]


def _joined(
  segments: list[_Segment],
  kinds: Sequence[str],
  residual: base.Residual,
  start: int,
) -> list[_Segment]:
  """The segments, with blocks that repeat as one."""
  joined, remaining = [], iter(segments)
  for blocks in block_scan.find(kinds, residual, start):
    count = len(blocks.kinds) * blocks.repeats
    parts = list(itertools.islice(remaining, count))
    if blocks.repeats > 1:
      parts = [_Segment(parts[0].start, parts[-1].stop, (blocks.run,), blocks)]
    joined += parts
  return joined


def _scan_blocks(
  segment: _Segment,
  residual: Any,
  sublayers: Sublayers,
  state: tuple[Any, Any],
  apply: Mapping[str, Callable[..., tuple[jax.Array, Any, Any, Any]]],
  around: Callable[[Callable[..., Any]], Callable[..., Any]],
  segment_ids_BT: jax.Array | None,
) -> tuple[Any, Any]:
  """The states after blocks that repeat, of a scheme that `scans_blocks`."""

  def run_block(
    kinds: Sequence[str], weights: Any, bank: Any, segment_ids_BT: Any
  ) -> jax.Array:
    layers, reads = weights
    with scopes.part(scopes.RESIDUAL):
      slots = residual.phase_1(reads, bank)
      slots = layer_stacks.unstack(slots, len(kinds))
    carry: Any = None
    for kind, layer, slot in zip(kinds, layers, slots):
      with scopes.part(kind):
        y_BTD, *_ = apply[kind](
          layer, (carry, memory), (slot, None), segment_ids_BT
        )
      with scopes.part(scopes.RESIDUAL):
        carry = residual.write(carry, slot, y_BTD)
    return carry.astype(bank.rows_MBTD.dtype)

  assert segment.blocks is not None
  state, memory = state
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
  return residual.put_together(sources, rest), memory


def _of_kinds(run: layer_stacks.Run) -> layer_stacks.Run:
  return layer_stacks.Run(tuple(kind for kind, _ in run.kinds), run.repeats)


def _run_segment(
  segment: _Segment,
  residual: base.Residual,
  memory: memory_lib.DepthMemory,
  take: Callable[[Any], list[Sublayers]],
  apply: Mapping[str, Callable[..., tuple[jax.Array, Any, Any, Any]]],
  segment_ids_BT: jax.Array | None,
  source: Any,
  state: tuple[Any, Any],
) -> tuple[tuple[Any, Any], list[Any]]:
  state, remembered = state
  parts = take(source)
  with scopes.part(scopes.RESIDUAL):
    carry, slots = residual.open(state, segment.start, segment.stop)
    slots = slots, memory.open(segment.start, segment.stop)
    slots = layer_stacks.split(slots, [run.length for run in segment.runs])
  both, outputs = (carry, remembered), []
  for run, part, run_slots in zip(segment.runs, parts, slots):

    def period(both, xs, run=run):
      part, slots = xs
      with scopes.part(scopes.RESIDUAL):
        slots = layer_stacks.unstack(slots, len(run.kinds))
      sublayers = layer_stacks.in_order(part, run.kinds)
      if run.repeats == 1:
        # Autodiff of a scan would stack the copies again, and keep them.
        sublayers = layer_stacks.unsliced(sublayers)
      outs = []
      for kind, sublayer, slot in zip(run.kinds, sublayers, slots):
        with scopes.part(kind):
          y_BTD, new, carry, out = apply[kind](
            sublayer, both, slot, segment_ids_BT
          )
        outs.append(out)
        new = jax.tree.map(base.save, new)
        with scopes.part(scopes.RESIDUAL):
          carry = both[0] if carry is None else carry
          carry = residual.write(carry, slot[0], y_BTD)
        both = carry, memory.write(both[1], new)
      return both, outs

    xs = part, run_slots
    if run.repeats == 1:
      both, outs = period(both, xs)
      outs = jax.tree.map(lambda a: a[None], outs)
    else:
      both, outs = jax.lax.scan(
        period, both, layer_stacks.fold(xs, run.repeats)
      )
    outputs.append(outs)
  return both, outputs


def apply_sublayer(
  residual: Any,
  memory: memory_lib.DepthMemory,
  kind: str,
  sublayer: Any,
  both: tuple[Any, Any],
  slots: tuple[Any, Any],
  segment_ids_BT: jax.Array | None,
) -> tuple[jax.Array, Any, Any, None]:
  """Runs one sublayer.

  Args:
    residual: anything with `read` of a scheme.
    memory: as in `run`.
    kind: of the sublayer.
    sublayer: anything with its `norm` and its `core`.
    both: the carry of the scheme, and what the memory has.
    slots: of the scheme and of the memory.
    segment_ids_BT: as in `run`.

  Returns:
    The output, what is new in the memory, the carry for `write` unless it is
    the one given, and nothing: other functions in its place may return more.
  """
  (before, remembered), (slot, memory_slot) = both, slots
  with scopes.part(scopes.RESIDUAL):
    x, carry = residual.read(before, slot, sublayer.norm)
    # An unchanged one would be copied by `jax.checkpoint`.
    carry = None if carry is before else carry
  if not getattr(sublayer.core, "reads_qkv", False):
    x = base.query_input(x)
  y_BTD, new = memory.call(
    kind, sublayer.core, x, segment_ids_BT, remembered, memory_slot
  )
  y_BTD = _with_one_gradient(sharding.keep_tokens(y_BTD))
  return y_BTD, new, carry, None


@jax.custom_jvp
def _with_one_gradient(y_BTD: jax.Array) -> jax.Array:
  """The same output, whose gradient is one array of its dtype.

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
  checkpoint, which would keep a copy of anything split outside.
  """
  if remat == "none":
    runs = [run for segment in segments for run in segment.runs]
    parts: list[dict[str, Any]] = [{} for _ in runs]
    for kind, stack in sublayers.items():
      having = [i for i, run in enumerate(runs) if run.count(kind)]
      sizes = [runs[i].count(kind) for i in having]
      for i, part in zip(having, layer_stacks.split(stack, sizes), strict=True):
        parts[i][kind] = part
    remaining = iter(parts)
    return [([next(remaining) for _ in s.runs], _same) for s in segments]

  sources, begin = [], dict.fromkeys(sublayers, 0)
  for segment in segments:
    cuts = []
    for run in segment.runs:
      end = {kind: begin[kind] + run.count(kind) for kind in begin}
      cuts.append({k: slice(begin[k], end[k]) for k in set(run.kinds)})
      begin = end
    sources.append((sublayers, functools.partial(_cut, cuts)))
  return sources


def _same(source: Any) -> Any:
  return source


def _cut(cuts: list[dict[str, slice]], sublayers: Sublayers) -> list[Sublayers]:
  def cut_one(kind: str, where: slice) -> sublayer_lib.Sublayer:
    with scopes.part(kind):
      return jax.tree.map(lambda a: a[where], sublayers[kind])

  return [
    {kind: cut_one(kind, where) for kind, where in cut.items()} for cut in cuts
  ]

# SPDX-License-Identifier: Apache-2.0
"""The trunk: runs sublayers under a residual scheme, for any scheme.

Depth segments (the blocks of Block AttnRes) run in a Python loop, since each
has more sources than the last. Inside a segment, sublayers that repeat a
pattern run as one `lax.scan` if the scheme's carry allows it, and the others in
a Python loop. With `depth_loop="scan"`, blocks that repeat kinds of sublayers
are one scan (`block_scan`). `segments` says which sublayers run together.

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
from typing import Any, Self

import jax

from attnres_jax import config as config_lib
from attnres_jax.common import scopes
from attnres_jax.models import block_scan
from attnres_jax.models import layer_stacks
from attnres_jax.models import linear
from attnres_jax.models import moe
from attnres_jax.models import segments as segments_lib
from attnres_jax.models import sublayer as sublayer_lib
from attnres_jax.models.mixers import causal_attention
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import tools
from attnres_kernels import platforms

Trace = base.Trace
Sublayers = Mapping[str, sublayer_lib.Sublayer]
# `sublayer.apply` of one kind, by kind.
_Calls = Mapping[str, Callable[..., tuple[jax.Array, Any, Any]]]


def _remat(*names: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
  names = tools.DEPTH_STATE, moe.ROUTING, *names
  policy = jax.checkpoint_policies.save_only_these_names(*names)
  return functools.partial(jax.checkpoint, policy=policy), jax.checkpoint


# Name -> (around a segment, around a sublayer).
REMAT: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
  "none": (lambda function: function, lambda function: function),
  "full": _remat(),
  "attention": _remat(causal_attention.ATTENTION),
  "dots": _remat(causal_attention.ATTENTION, linear.PRODUCT),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Trunk:
  """Sublayers under a residual scheme, or a part of a network.

  Attributes:
    kinds: of the sublayers.
    residual: the scheme.
    scan: scan over repeated sublayers, if the scheme allows it.
    remat: a key of `REMAT`.
    depth_loop: as in `config.ModelConfig`.
    value_residual: whether later mixers use the first one's values. Then the
      trunk is the whole network.
    start: sublayers of the network before this part.
  """

  kinds: Sequence[str]
  residual: Any
  scan: bool = True
  remat: str = "none"
  depth_loop: str = "unrolled"
  value_residual: bool = False
  start: int = 0

  @classmethod
  def of(
    cls, config: config_lib.ModelConfig, residual: Any, **part: Any
  ) -> Self:
    """The trunk of a network, or a `part` of it (kinds, start)."""
    fields: dict[str, Any] = dict(
      kinds=config.sublayer_kinds, scan=config.scan_layers, remat=config.remat,
      depth_loop=config.depth_loop, value_residual=config.value_residual,
    )  # fmt: skip
    return cls(residual=residual, **(fields | part))

  @property
  def repeats(self) -> bool:
    """Whether it has any scan over sublayers or blocks."""
    return any(run.repeats > 1 for part in self._plan() for run in part.runs)

  def run(
    self, sublayers: Sublayers, embedding_BTD: jax.Array,
    segment_ids_BT: jax.Array | None = None,
  ) -> jax.Array:  # fmt: skip
    """Runs all sublayers and returns h_out [B, T, D], before the final norm.

    Args:
      sublayers: one module per kind, whose leaves have a leading axis over the
        sublayers of that kind; or `layer_stacks.separated`.
      embedding_BTD: h_1 = v_0.
      segment_ids_BT: document numbers, which mixers do not cross, or None.

    Raises:
      ConfigError: a scan over depth is asked for, and there is none.
    """
    if self.depth_loop == "scan":
      ends = (len(self.kinds),)
      segments_lib.check(self.kinds, ends, self.residual)
    with scopes.part(scopes.RESIDUAL):
      state = self.residual.init(embedding_BTD)
    state = self.run_part(sublayers, state, segment_ids_BT)
    with scopes.part(scopes.RESIDUAL):
      return self.residual.readout(state)

  def run_part(
    self, sublayers: Sublayers, state: Any, segment_ids_BT: jax.Array | None
  ) -> Any:
    """The scheme's state after this part, given the one before it."""
    around_segment, around_sublayer = config_lib.choose(
      "model.remat", self.remat, REMAT
    )
    calls = {
      kind: around_sublayer(
        functools.partial(sublayer_lib.apply, self.residual, kind)
      )
      for kind in sublayers
    }
    first: sublayer_lib.First = {} if self.value_residual else None
    segments = self._plan(sublayers)
    sources = segments_lib.sources(sublayers, segments, self.remat)
    in_turn = lambda state, weights: (state, weights)
    if self.remat != "none" and segments_lib.are_separate(sublayers):
      in_turn = layer_stacks.gradients_in_turn  # Where memory is short.
    for segment, (source, take) in zip(segments, sources, strict=True):
      state, source = in_turn(state, source)
      if segment.blocks is not None:
        state = self._scan_blocks(
          segment, take(source)[0], state, calls, around_segment,
          segment_ids_BT,
        )  # fmt: skip
        continue
      inside = functools.partial(
        self._run_segment, segment, take, calls, segment_ids_BT, in_turn
      )
      carry, first = around_segment(inside)(source, state, first)
      with scopes.part(scopes.RESIDUAL):
        state = self.residual.close(state, carry, segment.stop)
    return state

  def run_singly(
    self, embedding_BTD: jax.Array, segment_ids_BT: jax.Array | None,
    layer: Callable[[int], Any],
    see: Callable[[Any, Any, jax.Array], None] = lambda *_: None,
    written: bool = False,
  ) -> Any:  # fmt: skip
    """Runs all sublayers one by one; returns the last state of the scheme.

    `layer` returns sublayer l, from 0, and `see` gets the carry and the slot
    that a sublayer reads, and its output. With `written`, a carry is in memory
    when a sublayer reads it. Otherwise compilers add up all outputs for every
    read, and so keep them all.
    """
    first: sublayer_lib.First = {} if self.value_residual else None

    def sublayer(l: int, carry: Any, slot: Any) -> Any:
      if written:
        carry = jax.lax.optimization_barrier(carry)
      with scopes.part(self.kinds[l]):
        y_BTD, new, after = sublayer_lib.apply(
          self.residual, self.kinds[l], layer(l), carry, slot, segment_ids_BT,
          first,
        )  # fmt: skip
      if first is not None:
        first.update(new)
      see(carry, slot, y_BTD)
      return y_BTD, carry if after is None else after

    return base.run_through(self.residual, embedding_BTD, sublayer)

  def trace(
    self, sublayers: Sublayers, embedding_BTD: jax.Array,
    segment_ids_BT: jax.Array | None = None,
  ) -> Trace:  # fmt: skip
    """Runs like `run`; returns what every sublayer read and wrote."""
    values, reads = [embedding_BTD], []

    def see(carry: Any, slot: Any, y_BTD: jax.Array) -> None:
      h = base.before_norm(self.residual, carry, slot)
      reads.append(base.query_input(h))
      values.append(y_BTD)

    singles = layer_stacks.in_order(sublayers, self.kinds)
    state = self.run_singly(
      embedding_BTD, segment_ids_BT, singles.__getitem__, see
    )
    return Trace(tuple(values), (*reads, self.residual.readout(state)))

  def _plan(
    self, sublayers: Sublayers | None = None
  ) -> list[segments_lib.Segment]:
    """The segments; the first mixer of each kind is apart if others read it."""
    apart = {
      self.kinds.index(kind)
      for kind, stack in (sublayers or {}).items()
      if self.value_residual
      and sublayer_lib.mixes(layer_stacks.first(stack).core)
    }
    return segments_lib.plan(
      self.kinds, self.residual, self.start, self.scan, self.depth_loop, apart
    )

  def _scan_blocks(
    self, segment: segments_lib.Segment, sublayers: Sublayers, state: Any,
    calls: _Calls, around: Callable[[Callable[..., Any]], Callable[..., Any]],
    segment_ids_BT: jax.Array | None,
  ) -> Any:  # fmt: skip
    """The state after blocks that repeat, of a scheme that `scans_blocks`."""
    residual = self.residual
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

  def _run_segment(
    self, segment: segments_lib.Segment,
    take: Callable[[Any], list[Sublayers]], calls: _Calls,
    segment_ids_BT: jax.Array | None, in_turn: Callable[..., Any],
    source: Any, state: Any, first: sublayer_lib.First,
  ) -> tuple[Any, sublayer_lib.First]:  # fmt: skip
    """The carry after a segment, and the first values."""
    residual, parts = self.residual, take(source)
    with scopes.part(scopes.RESIDUAL):
      carry, slots = residual.open(state, segment.start, segment.stop)
      slots = layer_stacks.split(slots, [run.length for run in segment.runs])
    both = carry, first
    for i, (run, run_slots) in enumerate(zip(segment.runs, slots)):
      # The run in between hides what is sent.
      def period(both, xs, run=run, later=i + 2):
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
            if run.repeats == 1 and later < len(parts):
              y_BTD, parts[later] = in_turn(y_BTD, parts[later])
          with scopes.part(scopes.RESIDUAL):
            carry = both[0] if carry is None else carry
            carry = residual.write(carry, slot, y_BTD)
          first = both[1]
          if new:
            first = {**first, **jax.tree.map(tools.save, new)}
          both = carry, first
        return both, None

      xs = parts[i], run_slots
      if run.repeats == 1:
        both, _ = period(both, xs)
      else:
        xs = layer_stacks.fold(xs, run.repeats)
        both, _ = jax.lax.scan(period, both, xs)
    return both

# SPDX-License-Identifier: Apache-2.0
"""Sublayers as loops over depth: a program whose size does not grow with it.

Every block of Block AttnRes has one more source than the last, and a block may
end anywhere in the pattern that sublayers repeat. Neither is part of the
program here. The sources are rows of one array, the bank [M, B, T, D], of which
a block reads as many as there are; and where blocks begin, and how many sources
there are, are numbers known at run time (`depth_places`). So a `lax.scan` runs
any sublayers that repeat a pattern, just as for PreNorm. In front of a sublayer
that may begin a block is a loop of one step or none: it appends what the last
block has left, its open rows, to the bank, and computes the mixtures of all
sublayers of the new block. Full AttnRes is the same with segments that leave
one open row per sublayer.

Autodiff of such a loop would save the bank once per step. So the loop has a
gradient rule of its own. Rows are written once, and therefore the last bank
serves the whole backward pass. Gradients of sources add up in a second bank,
and those of parameters in arrays like the parameters; a reverse scan carries
both and updates them in place. A sublayer keeps the results of costly
operations that its backward pass needs (`traced`). Mixtures and sums are in
arrays of the whole network. With activation checkpointing, a sublayer keeps
what its policy names, and the mixtures of a block are computed again.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attnres_jax import precision
from attnres_jax import scopes
from attnres_jax.models import depth_loops
from attnres_jax.models import depth_places
from attnres_jax.models import stacks
from attnres_jax.models import traced
from attnres_jax.models.residuals import depth_attention
from attnres_jax.models.residuals import depth_operators
import attnres_kernels


class _Carry(NamedTuple):
  """The carry of the forward pass.

  Attributes:
    bank_MBTD: the sources.
    open_RBTD: what will be sources after the segment.
    mixtures: [V, Q, B, T, D] and their log-normalisers, for V queries of each
      sublayer; Q is that of a segment, or of the part if they are kept.
    sums: [K, 1, B, T, D], open rows in front of sublayers, and the last one, in
      the model's dtype; None if they are not sums or not kept. In front of a
      segment there is none, so its first sublayer has the row that the second
      one overwrites.
  """

  bank_MBTD: jax.Array
  open_RBTD: jax.Array
  mixtures: tuple[jax.Array, ...]
  sums: jax.Array | None


class _Kept(NamedTuple):
  """What the forward pass keeps for the whole backward pass.

  Attributes:
    weights: see `Part._forward`.
    bank_MBTD: the last bank.
    mixtures: of all sublayers; None if they are computed again.
    sums: as in `_Carry`.
    segment_ids_BT: documents.
  """

  weights: Any
  bank_MBTD: jax.Array
  mixtures: tuple[jax.Array, ...] | None
  sums: jax.Array | None
  segment_ids_BT: jax.Array | None


class _Gradients(NamedTuple):
  """The carry of the backward pass: gradients, and what is found again.

  Attributes:
    sublayers: by kind.
    reads: as in `weights`.
    bank_MBTD: complete for rows that are not read any more.
    open_RBTD: of the open rows after a sublayer; of a sum in two parts, see
      `precision.split`.
    mixtures: of a segment.
    again: the mixtures of the segment, if they are not kept.
    rows_RBTD: its open rows, unless they are sums.
  """

  sublayers: dict[str, Any]
  reads: Any
  bank_MBTD: jax.Array
  open_RBTD: Any
  mixtures: tuple[jax.Array, ...]
  again: tuple[jax.Array, ...] | None
  rows_RBTD: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Part:
  """Consecutive sublayers of a network.

  Attributes:
    kinds: of the sublayers.
    start: number of sublayers of the network before them.
    residual: a banked scheme, of the whole network. Its parameters are not
      used, only its reads are.
    apply: runs a sublayer: maps its kind, itself, what `read_normed` of the
      scheme gets (a carry and a slot), and the documents to its output.
    around: activation checkpointing of a sublayer.
    recompute: whether mixtures are computed again in the backward pass.
  """

  kinds: tuple[str, ...]
  start: int
  residual: Any
  apply: Callable[..., jax.Array]
  around: Callable[..., Any]
  recompute: bool

  def __call__(
    self,
    sublayers: Mapping[str, Any],
    state: Any,
    segment_ids_BT: jax.Array | None,
  ) -> Any:
    """Maps the state before the part to that after it.

    Args:
      sublayers: one stack per kind, in the order of depth.
      state: of the scheme.
      segment_ids_BT: document numbers, or None.

    Returns:
      The state, whose sources are a `depth_operators.Bank`.
    """
    residual, stop = self.residual, self.start + len(self.kinds)
    sources, rest = residual.take_apart(state)
    with scopes.part(scopes.RESIDUAL):
      # The mixtures of a segment that ends early are computed for more reads.
      reads = jax.tree.map(
        lambda a: jnp.pad(a, [(0, self.size - 1)] + [(0, 0)] * (a.ndim - 1)),
        residual.queries.reads(self.start, stop),
      )
      open_RBTD = residual.open_rows(rest, sources[0].shape, self.size)
    dtypes = [source.dtype for source in sources]

    @jax.custom_vjp
    def run(sublayers, reads, sources, open_RBTD, segment_ids_BT):
      weights = sublayers, reads
      carry = self._forward(weights, sources, open_RBTD, segment_ids_BT, None)
      return carry.bank_MBTD, carry.open_RBTD

    def forward(sublayers, reads, sources, open_RBTD, segment_ids_BT):
      weights, saved = (sublayers, reads), []
      carry = self._forward(weights, sources, open_RBTD, segment_ids_BT, saved)
      mixtures = None if self.recompute else carry.mixtures
      kept = _Kept(
        weights, carry.bank_MBTD, mixtures, carry.sums, segment_ids_BT
      )
      programs, arrays = zip(*saved)
      programs = tuple(map(traced.Static, programs))
      return (carry.bank_MBTD, carry.open_RBTD), (kept, programs, arrays)

    def backward(residuals, gradients):
      kept, programs, arrays = residuals
      found = self._backward(
        kept, [program.value for program in programs], arrays, *gradients
      )
      dsources = [found.bank_MBTD[i].astype(d) for i, d in enumerate(dtypes)]
      dopen_RBTD = found.open_RBTD
      if residual.sums_open:
        dopen_RBTD = precision.join(dopen_RBTD, gradients[1].dtype)
      return found.sublayers, found.reads, dsources, dopen_RBTD, None

    run.defvjp(forward, backward)
    bank_MBTD, open_RBTD = run(
      dict(sublayers), reads, list(sources), open_RBTD, segment_ids_BT
    )
    last = self.places[-1]
    if not self.ends_whole:
      bank, rest = depth_operators.Bank(bank_MBTD, last.sources), open_RBTD[0]
    else:
      added = 1 if residual.sums_open else last.place + 1
      bank, rest = depth_operators.Bank(bank_MBTD, last.sources + added), None
    return residual.put_together(bank, rest)

  @functools.cached_property
  def places(self) -> tuple[depth_places.At, ...]:
    return depth_places.places(self.kinds, self.residual, self.start)

  @functools.cached_property
  def patterns(self) -> tuple[depth_places.Pattern, ...]:
    return depth_places.patterns(self.kinds, self.places)

  @functools.cached_property
  def size(self) -> int:
    """The most sublayers of a segment in this part."""
    return 1 + max(at.place for at in self.places)

  @functools.cached_property
  def _even(self) -> bool:
    """Whether all segments in this part are of one size."""
    return sum(at.closes for at in self.places) * self.size == len(self.places)

  @functools.cached_property
  def ends_whole(self) -> bool:
    """Whether the open rows are sources at the end."""
    stop = self.start + len(self.kinds)
    ends = [end for _, end in self.residual.segments()]
    return stop in ends or not self.residual.sums_open

  def _forward(self, weights, sources, open_RBTD, segment_ids_BT, saved):
    """The last `_Carry`.

    Args:
      weights: (sublayers, reads with `size` - 1 more rows).
      sources: before this part.
      open_RBTD: open rows before this part.
      segment_ids_BT: documents.
      saved: gets, for each pattern, its programs and what they keep. If it is
        None, there is no backward pass, and nothing is kept.
    """
    rows, dtype = self.places[-1].sources + len(open_RBTD), self.residual.dtype
    bank_MBTD = jax.lax.empty((rows, *sources[0].shape), dtype)
    for i, source_BTD in enumerate(sources):
      bank_MBTD = bank_MBTD.at[i].set(source_BTD.astype(dtype))
    whole, sums = saved is not None and not self.recompute, None
    if saved is not None and self.residual.sums_open:
      count = 1 + max(at.kept_next for at in self.places)
      sums = jax.lax.empty((count, *open_RBTD.shape), dtype)
      sums = depth_loops.put(sums, open_RBTD[None], 0)
    mixtures = self._no_mixtures(weights, bank_MBTD, whole)
    carry = _Carry(bank_MBTD, open_RBTD, mixtures, sums)

    for pattern in self.patterns:
      programs = []

      def step(carry, xs, pattern=pattern, programs=programs):
        programs.clear()  # A scan may trace its step more than once.
        arrays = []
        for kind, at, others in zip(pattern.kinds, xs[0], pattern.positions):
          open_RBTD = carry.open_RBTD.astype(dtype)
          carry = self._open(carry, weights, at, others, whole)
          with scopes.part(scopes.RESIDUAL):
            index = at.l if whole else at.place
            mixtures = depth_loops.one(carry.mixtures, index, axis=1)
            rows = _rows(carry.mixtures, index, carry.sums, at)
          sinks = self._sinks(weights, carry.bank_MBTD)
          own = *self._own(weights, kind, at), mixtures, open_RBTD, sinks
          given = _numbers(at), segment_ids_BT, rows
          run = functools.partial(self._step, kind)
          if saved is None:
            y_BTD, _ = run(*own, *given)
          else:
            program = traced.Traced(run, own, given)
            (y_BTD, _), kept = program.forward(own, given)
            programs.append(program)
            arrays.append(kept)
          with scopes.part(scopes.RESIDUAL):
            carry = carry._replace(open_RBTD=self._written(carry, y_BTD, at))
            if sums is not None:
              row = carry.open_RBTD[None]
              carry = carry._replace(
                sums=depth_loops.put(carry.sums, row, at.kept_next)
              )
        return carry, arrays

      carry, arrays = depth_loops.over(step, carry, pattern)
      if saved is not None:
        saved.append((programs, arrays))
    if self.ends_whole:
      with scopes.part(scopes.RESIDUAL):
        bank_MBTD = depth_loops.put(
          carry.bank_MBTD, carry.open_RBTD, self.places[-1].sources
        )
      carry = carry._replace(bank_MBTD=bank_MBTD)
    return carry

  def _open(self, carry, weights, at, others, whole):
    """Opens a segment, if the sublayer is its first one."""

    def run(bank_and_mixtures, turn):
      bank_MBTD, mixtures = bank_and_mixtures
      open_RBTD = carry.open_RBTD
      if carry.sums is not None:
        open_RBTD = depth_loops.one(carry.sums, at.kept + turn)
      # In front of the whole part, this writes a row that is written later.
      bank_MBTD = depth_loops.put(bank_MBTD, open_RBTD, at.before)
      new = self._attend(weights, bank_MBTD, at)
      return bank_MBTD, depth_loops.put(
        mixtures, new, at.l if whole else 0, axis=1
      )

    with scopes.part(scopes.RESIDUAL):
      bank_MBTD, mixtures = depth_loops.when(
        at.opens,
        [other.opens for other in others],
        run,
        (carry.bank_MBTD, carry.mixtures),
      )
    return carry._replace(bank_MBTD=bank_MBTD, mixtures=mixtures)

  def _backward(self, kept, programs, arrays, dbank_MBTD, dopen_RBTD):
    """The first `_Gradients`.

    Sources read by a later part or by the readout already have gradients.

    Args:
      kept: by the forward pass.
      programs: of each pattern.
      arrays: that they keep.
      dbank_MBTD: gradient of the bank.
      dopen_RBTD: gradient of the open rows at the end.
    """
    again = self._no_mixtures(kept.weights, kept.bank_MBTD, False)
    reads = jax.tree.map(jnp.zeros_like, kept.weights[1])
    room = depth_loops.empty_like if self._even else jnp.zeros_like
    mixtures = jax.tree.map(room, again)
    sublayers = {
      # A gradient is written for each sublayer of the part.
      kind: jax.tree.map(
        lambda a, count=self.kinds.count(kind): (
          depth_loops.empty_like(a) if len(a) == count else jnp.zeros_like(a)
        ),
        stack,
      )
      for kind, stack in kept.weights[0].items()
    }
    rows_RBTD = None
    if not self.residual.sums_open:
      rows_RBTD = depth_loops.empty_like(dopen_RBTD)
    elif self.ends_whole:
      last_RBTD = depth_loops.cut(dbank_MBTD, self.places[-1].sources, 1)
      dopen_RBTD = last_RBTD, jnp.zeros_like(last_RBTD)
    else:
      dopen_RBTD = precision.split(dopen_RBTD, self.residual.dtype)
    carry = _Gradients(
      sublayers,
      reads,
      dbank_MBTD,
      dopen_RBTD,
      mixtures,
      again=again if self.recompute else None,
      rows_RBTD=rows_RBTD,
    )
    for pattern, own_programs, xs in reversed(
      list(zip(self.patterns, programs, arrays))
    ):

      def step(carry, xs, pattern=pattern, programs=own_programs):
        sublayers = pattern.kinds, xs[0], pattern.positions, programs, xs[1]
        for kind, at, others, program, arrays in reversed(
          list(zip(*sublayers))
        ):
          carry = self._leave(carry, kept, at, others)
          carry = self._back(carry, kept, kind, at, program, arrays)
          carry = self._close(carry, kept, at, others)
        return carry, None

      carry, _ = depth_loops.over(step, carry, pattern, xs, reverse=True)
    return carry

  def _leave(self, carry, kept, at, others):
    """Enters a segment from behind, if the sublayer is its last one.

    But for the gradient of a sum, which is there already (see `_close`).
    """
    count, sums = self.size, self.residual.sums_open

    def run(found, turn):
      dopen_RBTD, mixtures, again, rows_RBTD = found
      # What is the same in every turn, compilers would compute in every step.
      here = at._replace(sources=at.sources + turn)
      if not sums:
        dopen_RBTD = depth_loops.cut(carry.bank_MBTD, here.sources, count)
      if not (self._even or self.places[0].first):
        # Its segment may have fewer mixtures than the one after it.
        mixtures = jax.tree.map(jnp.zeros_like, mixtures)
      if again is not None:
        again = self._attend(kept.weights, kept.bank_MBTD, here)
      if rows_RBTD is not None:
        rows_RBTD = depth_loops.cut(kept.bank_MBTD, here.sources, count)
      return dopen_RBTD, mixtures, again, rows_RBTD

    with scopes.part(scopes.RESIDUAL):
      open_RBTD, mixtures, again, rows_RBTD = depth_loops.when(
        at.closes,
        [other.closes for other in others],
        run,
        (carry.open_RBTD, carry.mixtures, carry.again, carry.rows_RBTD),
      )
    return carry._replace(
      open_RBTD=open_RBTD, mixtures=mixtures, again=again, rows_RBTD=rows_RBTD
    )

  def _back(self, carry, kept, kind, at, program, arrays):
    """The backward pass of a sublayer."""
    sums = kept.sums is not None
    with scopes.part(scopes.RESIDUAL):
      found, index = kept.mixtures, at.l
      if self.recompute:
        found, index = carry.again, at.place
      mixtures = depth_loops.one(found, index, axis=1)
      rows = _rows(found, index, kept.sums, at)
      open_RBTD = (
        depth_loops.one(kept.sums, at.kept) if sums else carry.rows_RBTD
      )
      dsum_RBTD = through = carry.open_RBTD
      if sums:
        # Rounded once, not in each product that reads it.
        dsum_RBTD, through = jax.lax.optimization_barrier(dsum_RBTD), None
        dy_BTD = dsum_RBTD[0][0]
      else:
        dy_BTD = depth_loops.one(carry.open_RBTD, at.place)
      sinks = self._sinks(kept.weights, kept.bank_MBTD)
      if sinks is not None:
        through = carry.mixtures[0][0], *(part[0] for part in dsum_RBTD)
    own = *self._own(kept.weights, kind, at), mixtures, open_RBTD, sinks
    dsublayer, dreads, dmixtures, dopen_RBTD, found = program.backward(
      own,
      (_numbers(at), kept.segment_ids_BT, rows),
      arrays,
      (dy_BTD, through),
    )
    with scopes.part(kind):
      one = jax.tree.map(lambda a: a[None], dsublayer)
      one = depth_loops.put(carry.sublayers[kind], one, at.index)
    with scopes.part(scopes.RESIDUAL):
      dmixtures = tuple(a[:, None] for a in dmixtures)
      put = functools.partial(depth_loops.put, first=at.place, axis=1)
      if sinks is None:
        mixtures = put(carry.mixtures, dmixtures)
        if sums:
          dopen_RBTD = precision.add(dsum_RBTD, dopen_RBTD)
      else:
        dout_QBTD, *dopen_RBTD = found
        dopen_RBTD = tuple(part[None] for part in dopen_RBTD)
        mixtures = dout_QBTD[None], put(carry.mixtures[1], dmixtures[1])
      return carry._replace(
        sublayers=carry.sublayers | {kind: one},
        reads=depth_loops.put(carry.reads, dreads, at.l),
        open_RBTD=dopen_RBTD,
        mixtures=mixtures,
      )

  def _close(self, carry, kept, at, others):
    """Leaves a segment at its front, if the sublayer is its first one.

    Then goes on with the sum of the segment before, if there is one.
    """

    def run(found, turn):
      del turn
      reads, dbank_MBTD, dopen_RBTD = found
      own = depth_loops.cut(kept.weights[1], at.begin, self.size)
      query_QD, pull = jax.vjp(depth_attention.queries_of, own)
      if self.recompute:
        _, lses = carry.again
      else:
        _, lses = depth_loops.cut(kept.mixtures, at.begin, self.size, axis=1)
      lse, dout, dlse = (
        a.reshape(-1, *a.shape[2:]) for a in (lses, *carry.mixtures)
      )
      dquery_QD, dbank_MBTD = depth_operators.depth_attention_vjp(
        query_QD, kept.bank_MBTD, at.sources, lse, dout, dlse, dbank_MBTD,
        **self.residual.how,
      )  # fmt: skip
      more = depth_loops.cut(reads, at.begin, self.size)
      more = jax.tree.map(jnp.add, more, *pull(dquery_QD))
      if self.residual.sums_open:
        high_RBTD = depth_loops.cut(dbank_MBTD, at.before, 1)
        dsum = high_RBTD, jnp.zeros_like(high_RBTD)
        if not self.places[0].first:
          dsum = jax.tree.map(
            lambda a, b: jnp.where(at.l > 0, a, b), dsum, dopen_RBTD
          )
        dopen_RBTD = dsum
      return depth_loops.put(reads, more, at.begin), dbank_MBTD, dopen_RBTD

    with scopes.part(scopes.RESIDUAL):
      reads, bank_MBTD, open_RBTD = depth_loops.when(
        at.opens,
        [other.opens for other in others],
        run,
        (carry.reads, carry.bank_MBTD, carry.open_RBTD),
      )
    return carry._replace(reads=reads, bank_MBTD=bank_MBTD, open_RBTD=open_RBTD)

  def _step(
    self,
    kind,
    sublayer,
    reads,
    mixtures,
    open_RBTD,
    sinks,
    numbers,
    segment_ids_BT,
    rows,
  ):
    """`step` of the scheme; sinks are floating-point arrays only."""

    def run(
      sublayer, reads, mixtures, open_RBTD, sinks, numbers, segment_ids_BT, rows
    ):
      def apply(read):
        with scopes.part(kind):
          return self.apply(kind, sublayer, read, segment_ids_BT)

      place, first = numbers
      if sinks is not None:
        row = attnres_kernels.Row(sinks[0], place)
        sinks = attnres_kernels.Sinks(row, *sinks[1:])
      with scopes.part(scopes.RESIDUAL):
        y_BTD, through = self.residual.step(
          reads, mixtures, open_RBTD, place, first != 0, apply, rows,
          sublayer.norm, sinks,
        )  # fmt: skip
      if sinks is not None:
        through = through.out.stack, through.high, through.low
      return y_BTD, through

    return self.around(run)(
      sublayer, reads, mixtures, open_RBTD, sinks, numbers, segment_ids_BT, rows
    )

  def _written(self, carry, y_BTD, at):
    """The open rows after a sublayer."""
    if not self.residual.sums_open:
      return depth_loops.put(carry.open_RBTD, y_BTD[None], at.place)
    sum_RBTD = jnp.where(at.first != 0, 0, carry.open_RBTD)
    return sum_RBTD + y_BTD[None].astype(sum_RBTD.dtype)

  def _attend(self, weights, bank_MBTD, at):
    """[V, Q, ...] mixtures of a segment, and their log-normalisers."""
    reads = depth_loops.cut(weights[1], at.begin, self.size)
    found = depth_operators.depth_attention(
      depth_attention.queries_of(reads),
      depth_operators.Bank(bank_MBTD, at.sources),
      **self.residual.how,
    )
    return tuple(a.reshape(-1, self.size, *a.shape[1:]) for a in found)

  def _no_mixtures(self, weights, bank_MBTD, whole):
    """Room for the mixtures of a segment, or of the whole part."""
    shapes = jax.eval_shape(self._attend, weights, bank_MBTD, self.places[0])
    more = len(self.places) - 1 if whole else 0
    return tuple(
      jax.lax.empty((s.shape[0], s.shape[1] + more, *s.shape[2:]), s.dtype)
      for s in shapes
    )

  def _sinks(self, weights, bank_MBTD):
    """Room for gradients of a sublayer's mixture and sum, if it takes any."""
    if not (self.residual.sums_open and self.residual.can_sink(weights[1])):
      return None
    one = bank_MBTD.shape[1:]
    shapes = (self.size, *one), one, one
    return tuple(jax.lax.empty(shape, bank_MBTD.dtype) for shape in shapes)

  def _own(self, weights, kind, at):
    """(sublayer, reads) of a sublayer; the reads have a leading axis."""
    sublayers, reads = weights
    with scopes.part(scopes.RESIDUAL):
      reads = depth_loops.cut(reads, at.l, 1)
    with scopes.part(kind):
      return stacks.apart(stacks.one_of(sublayers[kind], at.index)), reads


def _numbers(at):
  """What `step` of a scheme gets of them."""
  return jnp.asarray(at.place, jnp.int32), jnp.asarray(at.first, jnp.int32)


def _rows(mixtures, index, sums, at):
  """Where a sublayer's mixtures and the open row before it lie."""
  row = lambda stack, i: attnres_kernels.Row(stack, jnp.asarray(i, jnp.int32))
  return (
    row(mixtures[0], index),
    None if sums is None else row(sums[:, 0], at.kept),
  )

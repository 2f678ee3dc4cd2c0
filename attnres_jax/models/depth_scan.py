# SPDX-License-Identifier: Apache-2.0
"""Depth blocks as one loop: a program whose size does not grow with depth.

Every block of Block AttnRes has one more source than the last, so blocks seem
to differ. Here they are alike: the sources are rows of one array, the bank
[M, B, T, D], and a block reads as many of them as there are so far, a number
known at run time. Blocks that repeat a pattern of sublayers run as one
`lax.scan`; those before and after it run one by one, on the same bank.

Autodiff of such a loop would save the bank once per step. So the loop has a
gradient rule of its own. Rows are written once, and therefore the last bank
serves the backward pass of every block. Gradients of sources add up in a second
bank, and those of parameters in arrays like the parameters; a reverse scan
carries both and updates them in place. What a block saves for its backward pass
is what autodiff of the block saves, without parameters, the bank, and what
follows from either at little cost; activation checkpointing decides the rest,
as in the unrolled form.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
from jax.extend import core
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax import scopes
from attnres_jax.models import memory as memory_lib
from attnres_jax.models import stacks
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import depth_attention

# Names of primitives that are not computed a second time in the backward pass.
_COSTLY = ("dot", "pallas", "conv", "scan", "while", "cond", "remat", "custom")

# Maps the kinds of a block's sublayers, its reads, these sublayers, the sources
# and the documents to the new sources.
RunBlock = Callable[..., tuple[jax.Array, ...]]


class Block(NamedTuple):
  """Sublayers start..stop-1, which a scheme opens together.

  Attributes:
    start: of its sublayers.
    kinds: of its sublayers.
    sources: how many sources there are before it.
    added: how many it adds.
  """

  start: int
  kinds: tuple[str, ...]
  sources: int
  added: int


class Period(NamedTuple):
  """Consecutive blocks, and how often their pattern is repeated."""

  blocks: tuple[Block, ...]
  repeats: int


def check(
  kinds: Sequence[str],
  ends: Sequence[int],
  residual: base.Residual,
  memory: memory_lib.DepthMemory,
  *,
  scan: bool,
) -> None:
  """Refuses networks whose depth blocks are no loop.

  Args:
    kinds: of all sublayers.
    ends: of the parts that are run apart, such as the chunks of a pipeline.
    residual: the scheme.
    memory: what mixers keep for later mixers.
    scan: `model.scan_layers`.

  Raises:
    ConfigError: names the reason: the scheme or an option, a part that is not
      whole blocks, or that no part repeats anything.
  """
  for wrong, reason in (
    (not residual.banked, f"with {type(residual).__name__}"),
    (not isinstance(memory, memory_lib.NoMemory), "with model.depth_memory"),
    (not scan, "with model.scan_layers=False"),
  ):
    if wrong:
      _refuse(reason)
  periods = [
    period
    for start, end in zip((0, *ends), ends)
    for period in periods_of(kinds[start:end], residual, start=start)
  ]
  if all(period.repeats == 1 for period in periods):
    _refuse("where no pattern of depth blocks repeats")


def periods_of(
  kinds: Sequence[str],
  residual: base.Residual,
  *,
  start: int = 0,
  sources: int = 1,
) -> tuple[Period, ...]:
  """The segments of consecutive sublayers, as repeated patterns.

  Sublayers of the blocks are counted from the first one of this part.

  Args:
    kinds: of the sublayers of this part.
    residual: a banked scheme, of the whole network.
    start: number of sublayers of the network before this part.
    sources: how many sources there are before this part.

  Raises:
    ConfigError: the part begins or ends within a segment.
  """
  end = start + len(kinds)
  segments = [(a, b) for a, b in residual.segments() if a < end and b > start]
  if segments[0][0] < start or segments[-1][1] > end:
    _refuse(f"where sublayers {start + 1} to {end} are not whole depth blocks")
  runs = stacks.find_runs(
    [tuple(kinds[a - start : b - start]) for a, b in segments]
  )
  assert residual.block_size is not None
  periods, first = [], 0
  for run in runs:
    blocks, before = [], sources
    for a, b in segments[first : first + len(run.kinds)]:
      added = -(-(b - a) // residual.block_size)
      own = tuple(kinds[a - start : b - start])
      blocks.append(Block(a - start, own, before, added))
      before += added
    periods.append(Period(tuple(blocks), run.repeats))
    sources += (before - sources) * run.repeats
    first += run.length
  return tuple(periods)


def _refuse(reason: str) -> None:
  config_lib.fail("model.depth_loop", "scan", f"'unrolled' {reason}")


@dataclasses.dataclass(frozen=True)
class Loop:
  """Runs the blocks of a network on a bank.

  Attributes:
    periods: all blocks, in order.
    residual: the scheme. Its parameters are not used, only its reads are.
    run_block: see `RunBlock`.
    around_block: activation checkpointing.
  """

  periods: tuple[Period, ...]
  residual: Any
  run_block: RunBlock
  around_block: Callable[..., Any]

  def __call__(
    self,
    sublayers: Mapping[str, Any],
    reads: Any,
    sources: Sequence[jax.Array],
    segment_ids_BT: jax.Array | None,
  ) -> jax.Array:
    """The bank [M, B, T, D] after the last block.

    Args:
      sublayers: one stack per kind, in the order of depth.
      reads: the parameters of the reads of all sublayers, stacked.
      sources: [B, T, D] each, those before the first block.
      segment_ids_BT: document numbers, or None.
    """
    dtypes = [source.dtype for source in sources]

    @jax.custom_vjp
    def run(sublayers, reads, sources, segment_ids_BT):
      weights = sublayers, reads
      return self._forward(weights, sources, segment_ids_BT, None)

    def forward(sublayers, reads, sources, segment_ids_BT):
      weights, saved = (sublayers, reads), []
      bank_MBTD = self._forward(weights, sources, segment_ids_BT, saved)
      programs = [_Static(program) for program, _ in saved]
      arrays = [array for _, array in saved]
      return bank_MBTD, (weights, bank_MBTD, segment_ids_BT, programs, arrays)

    def backward(kept, dbank_MBTD):
      weights, bank_MBTD, segment_ids_BT, programs, arrays = kept
      saved = [(p.value, array) for p, array in zip(programs, arrays)]
      dweights, dbank_MBTD = self._backward(
        weights, bank_MBTD, segment_ids_BT, saved, dbank_MBTD
      )
      dsources = [dbank_MBTD[i].astype(d) for i, d in enumerate(dtypes)]
      return *dweights, dsources, None

    run.defvjp(forward, backward)
    return run(sublayers, reads, list(sources), segment_ids_BT)

  def _forward(self, weights, sources, segment_ids_BT, saved):
    """The last bank; appends to `saved`, for each period, unless it is None."""
    last = self.periods[-1]
    rows = last.blocks[-1].sources + last.blocks[-1].added
    rows += (last.repeats - 1) * _added(last)
    dtype = self.residual.dtype
    bank_MBTD = jnp.zeros((rows, *sources[0].shape), dtype)
    for i, source_BTD in enumerate(sources):
      bank_MBTD = bank_MBTD.at[i].set(source_BTD.astype(dtype))
    for period in self.periods:
      programs = []

      def step(bank_MBTD, g, period=period, programs=programs):
        programs.clear()  # A scan may trace its step more than once.
        arrays = []
        for block in period.blocks:
          own = self._own(period, block, weights, g)
          count = block.sources + g * _added(period)
          if saved is None:
            new, _ = self._block(block, *own, None, bank_MBTD, count,
                                 segment_ids_BT)  # fmt: skip
          else:
            program = _Program(self, block, own, bank_MBTD, count,
                               segment_ids_BT)  # fmt: skip
            new, kept = program.forward(own, bank_MBTD, count, segment_ids_BT)
            programs.append(program)
            arrays.append(kept)
          with scopes.part(scopes.RESIDUAL):
            bank_MBTD = jax.lax.dynamic_update_slice_in_dim(
              bank_MBTD, jnp.stack(new), count, 0
            )
        return bank_MBTD, arrays

      bank_MBTD, arrays = _loop(step, bank_MBTD, period.repeats)
      if saved is not None:
        saved.append((programs, arrays))
    return bank_MBTD

  def _backward(self, weights, bank_MBTD, segment_ids_BT, saved, dbank_MBTD):
    """The gradients of the weights and of the sources, given those at the end.

    Sources read by a later block or by the readout already have gradients.
    """
    carry = jax.tree.map(jnp.zeros_like, weights), dbank_MBTD
    for period, (programs, arrays) in zip(
      reversed(self.periods), reversed(saved)
    ):

      def step(carry, xs, period=period, programs=programs):
        (dweights, dbank_MBTD), (g, arrays) = carry, xs
        for block, program, kept in reversed(
          list(zip(period.blocks, programs, arrays))
        ):
          own = self._own(period, block, weights, g)
          count = block.sources + g * _added(period)
          with scopes.part(scopes.RESIDUAL):
            dnew = jax.lax.dynamic_slice_in_dim(
              dbank_MBTD, count, block.added, 0
            )
            dnew = [jnp.squeeze(d, 0) for d in jnp.split(dnew, block.added)]
          down, (dout_QBTD, dlse_QBT), lse_QBT = program.backward(
            own, bank_MBTD, count, segment_ids_BT, kept, tuple(dnew)
          )
          reads = own[0]
          with scopes.part(scopes.RESIDUAL):
            query_QD, pull = jax.vjp(depth_attention.queries_of, reads)
            dquery_QD, dbank_MBTD = self.residual.phase_1_vjp(
              query_QD, bank_MBTD, count, lse_QBT, dout_QBTD, dlse_QBT,
              dbank_MBTD,
            )  # fmt: skip
            dreads = jax.tree.map(jnp.add, down[0], *pull(dquery_QD))
          dweights = self._write(period, block, dweights, (dreads, down[1]), g)
        return (dweights, dbank_MBTD), None

      carry, _ = _loop(step, carry, period.repeats, arrays, reverse=True)
    return carry

  def _block(self, block, reads, parts, taps, bank_MBTD, count, segment_ids_BT):
    """(The new sources, the log-normalisers) of a block."""

    def run(reads, parts, taps, bank_MBTD, count, segment_ids_BT):
      lses: list[jax.Array] = []
      sources = depth_attention.Bank(bank_MBTD, count, taps, lses)
      new = self.run_block(block.kinds, reads, parts, sources, segment_ids_BT)
      (lse_QBT,) = lses
      return new, lse_QBT

    return self.around_block(run)(
      reads, parts, taps, bank_MBTD, count, segment_ids_BT
    )

  def _own(self, period, block, weights, g):
    """(Reads, sublayers) of a block in repeat g of its period."""
    sublayers, reads = weights
    first = block.start + g * _length(period)
    with scopes.part(scopes.RESIDUAL):
      reads = _cut(reads, first, len(block.kinds))
    parts = []
    for kind, place in self._places(period, block, g):
      with scopes.part(kind):
        parts.append(stacks.one_of(sublayers[kind], place))
    return reads, parts

  def _write(self, period, block, dweights, down, g):
    """Gradients like the weights, with those of a block."""
    (dsublayers, dreads), (own_reads, own_parts) = dweights, down
    first = block.start + g * _length(period)
    with scopes.part(scopes.RESIDUAL):
      dreads = _replace(dreads, own_reads, first)
    dsublayers = dict(dsublayers)
    places = self._places(period, block, g)
    for (kind, place), part in zip(places, own_parts, strict=True):
      with scopes.part(kind):
        one = jax.tree.map(lambda a: a[None], part)
        dsublayers[kind] = _replace(dsublayers[kind], one, place)
    return dsublayers, dreads

  def _places(self, period, block, g):
    """(kind, place in the stack of its kind) of each sublayer of a block."""
    met = {}
    for kind in block.kinds:
      before = met.setdefault(kind, self._first(block, kind))
      yield kind, before + g * _count(period, kind)
      met[kind] = before + 1

  def _first(self, block, kind):
    """How many sublayers of a kind there are before a block, in repeat 0."""
    before = 0
    for period in self.periods:
      for other in period.blocks:
        if other.start < block.start:
          before += other.kinds.count(kind)
      if period.blocks[0].start < block.start and block not in period.blocks:
        before += (period.repeats - 1) * _count(period, kind)
    return before


class _Static:
  """Something that is no array, as a leafless tree."""

  def __init__(self, value: Any):
    self.value = value


jax.tree_util.register_pytree_node(
  _Static, lambda static: ((), static.value), lambda value, _: _Static(value)
)


class _Program:
  """A block, traced once for its forward and its backward pass.

  What the backward pass needs is either given to it again (weights, the bank,
  documents), computed from what is given, if neither the bank nor a costly
  operation is involved (a slice of a weight, zeros), or kept.
  """

  def __init__(self, loop, block, own, bank_MBTD, count, segment_ids_BT):
    self._given = lambda own, bank, count, segments: jax.tree.leaves(
      (own, bank, jnp.asarray(count, jnp.int32), segments)
    )

    def run(own, bank_MBTD, count, segment_ids_BT):
      shapes = jax.eval_shape(
        lambda *a: loop.residual.phase_1_shapes(*a), own[0], bank_MBTD
      )
      taps = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
      new, pull, lse_QBT = jax.vjp(
        lambda reads, parts, taps: loop._block(
          block, reads, parts, taps, bank_MBTD, count, segment_ids_BT
        ),
        *own,
        taps,
        has_aux=True,
      )
      leaves, self._pull = jax.tree.flatten(pull)
      self._new = len(new)
      return [*new, lse_QBT, *leaves]

    closed = jax.make_jaxpr(run)(
      own, bank_MBTD, jnp.asarray(count, jnp.int32), segment_ids_BT
    )
    self._constants = closed.consts
    self._jaxpr = closed.jaxpr
    # New sources become rows of the bank, where the backward pass finds them.
    self._rows = self._jaxpr.outvars[: self._new]
    wanted = [
      v
      for v in self._jaxpr.outvars[self._new :]
      if not isinstance(v, core.Literal) and v not in self._rows
    ]
    self._kept, self._cheap, self._cheap_outs = _sort(
      self._jaxpr, wanted, len(jax.tree.leaves(own))
    )

  def forward(self, own, bank_MBTD, count, segment_ids_BT):
    """(The new sources, what to keep)."""
    given = self._given(own, bank_MBTD, count, segment_ids_BT)
    wanted = [*self._rows, *self._kept]
    outs = _evaluate(self._jaxpr, self._constants, given, None, wanted)
    return tuple(outs[: self._new]), outs[self._new :]

  def backward(self, own, bank_MBTD, count, segment_ids_BT, kept, dnew):
    """Gradients of (reads, parts) and of the mixtures; the log-normalisers."""
    given = self._given(own, bank_MBTD, count, segment_ids_BT)
    cheap = _evaluate(
      self._jaxpr, self._constants, given, self._cheap, self._cheap_outs
    )
    values = dict(zip(self._kept, kept)) | dict(zip(self._cheap_outs, cheap))
    values |= dict(zip(self._jaxpr.invars, given))
    for i, row in enumerate(self._rows):
      if not isinstance(row, core.Literal) and row not in values:
        values[row] = jax.lax.dynamic_index_in_dim(
          bank_MBTD, count + i, 0, keepdims=False
        )
    lse_QBT, *leaves = (
      v.val if isinstance(v, core.Literal) else values[v]
      for v in self._jaxpr.outvars[self._new :]
    )
    dreads, dparts, dtaps = jax.tree.unflatten(self._pull, leaves)(dnew)
    return (dreads, dparts), dtaps, lse_QBT


def _sort(jaxpr, wanted, num_weights):
  """Which results to keep, and which equations give the others again.

  Args:
    jaxpr: of a block.
    wanted: variables that its backward pass needs.
    num_weights: how many of its arguments are weights; then comes the bank.
  """
  bank, costly, made = jaxpr.invars[num_weights], set(), {}
  costly.add(bank)
  for equation in jaxpr.eqns:
    name = equation.primitive.name
    inputs = [v for v in equation.invars if not isinstance(v, core.Literal)]
    dear = any(v in costly for v in inputs)
    dear |= any(part in name for part in _COSTLY)
    for v in equation.outvars:
      made[v] = equation
      if dear:
        costly.add(v)
  wanted = dict.fromkeys(wanted)
  kept = [v for v in wanted if v in costly and v is not bank]
  again = [v for v in wanted if v in made and v not in costly]
  needed, reached = set(again), []
  for equation in reversed(jaxpr.eqns):
    if any(v in needed for v in equation.outvars):
      reached.append(equation)
      needed |= {v for v in equation.invars if not isinstance(v, core.Literal)}
  return kept, reached[::-1], again


def _evaluate(jaxpr, constants, given, equations, wanted):
  """Values of variables of a jaxpr, by some of its equations (None: by all)."""
  if not wanted:
    return []
  part = jaxpr.replace(
    outvars=list(wanted),
    eqns=jaxpr.eqns if equations is None else equations,
    debug_info=jaxpr.debug_info.with_unknown_names(),
  )
  return core.jaxpr_as_fun(core.ClosedJaxpr(part, constants))(*given)


def _loop(step, carry, repeats, xs=None, *, reverse=False):
  """A scan over (g, xs), or one step; g counts from 0."""
  if repeats == 1:
    return step(carry, 0 if xs is None else (0, xs))
  numbers = jnp.arange(repeats, dtype=jnp.int32)
  xs = numbers if xs is None else (numbers, xs)
  return jax.lax.scan(step, carry, xs, reverse=reverse)


def _added(period: Period) -> int:
  return sum(block.added for block in period.blocks)


def _length(period: Period) -> int:
  return sum(len(block.kinds) for block in period.blocks)


def _count(period: Period, kind: str) -> int:
  return sum(block.kinds.count(kind) for block in period.blocks)


def _cut(tree: Any, first: Any, size: int) -> Any:
  return jax.tree.map(
    lambda a: jax.lax.dynamic_slice_in_dim(a, first, size, 0), tree
  )


def _replace(tree: Any, part: Any, first: Any) -> Any:
  return jax.tree.map(
    lambda a, b: jax.lax.dynamic_update_slice_in_dim(
      a, b.astype(a.dtype), first, 0
    ),
    tree,
    part,
  )

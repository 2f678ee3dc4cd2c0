# SPDX-License-Identifier: Apache-2.0
"""Sublayers as loops over depth: a program whose size does not grow with it.

Every block of Block AttnRes has one more source than the last, and a block may
end anywhere in the pattern that sublayers repeat. Neither is part of the
program here. The sources are rows of one array, the bank [M, B, T, D], of which
a block reads as many as there are; and where blocks begin, and how many sources
there are, are numbers known at run time (`At`). So a `lax.scan` runs any
sublayers that repeat a pattern, just as for PreNorm. In front of a sublayer
that may begin a block is a loop of one step or none: it appends what the last
block has left, its open rows, to the bank, and computes the mixtures of all
sublayers of the new block. Full AttnRes is the same with segments that leave
several open rows, one per sublayer.

Autodiff of such a loop would save the bank once per step. So the loop has a
gradient rule of its own. Rows are written once, and therefore the last bank
serves the whole backward pass. Gradients of sources add up in a second bank,
and those of parameters in arrays like the parameters; a reverse scan carries
both and updates them in place. What a sublayer saves for its backward pass is
what autodiff of the sublayer saves, without parameters, mixtures and open rows,
which are arrays of the whole network, and without what follows from parameters
at little cost. With activation checkpointing, the mixtures are computed again.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import scopes
from attnres_jax.models import memory as memory_lib
from attnres_jax.models import stacks
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import depth_attention

# Names of primitives that are not computed a second time in the backward pass.
_COSTLY = ("dot", "pallas", "conv_", "scan", "while", "cond", "remat", "custom")
# Those that only name parts of what is given.
_VIEWS = ("squeeze", "reshape", "slice")


class At(NamedTuple):
  """Where a sublayer is; in a loop, numbers known at run time.

  Attributes:
    l: the sublayer, counted from the first one of this part.
    index: in the stack of its kind.
    opens: whether it is the first of its segment in this part, 0 or 1.
    closes: whether it is the last one.
    first: whether it is the first of its segment in the network.
    place: how many sublayers of the segment have run in this part.
    sources: how many there are when the segment opens; its own come next.
    before: the same for the last segment; for the first one, its own.
    kept: how many sublayers of this part before it are not the first of a
      segment.
  """

  l: Any
  index: Any
  opens: Any
  closes: Any
  first: Any
  place: Any
  sources: Any
  before: Any
  kept: Any

  @property
  def begin(self) -> Any:
    """The sublayer that opens the segment."""
    return self.l - self.place


def check(
  kinds: Sequence[str],
  ends: Sequence[int],
  residual: base.Residual,
  memory: memory_lib.DepthMemory,
  *,
  scan: bool,
) -> None:
  """Refuses networks that are no loop over depth.

  Args:
    kinds: of all sublayers.
    ends: of the parts that are run apart, such as the chunks of a pipeline.
    residual: the scheme.
    memory: what mixers keep for later mixers.
    scan: `model.scan_layers`.

  Raises:
    ConfigError: names the reason: the scheme or an option, or that no part
      repeats anything.
  """
  parts = [kinds[start:end] for start, end in zip((0, *ends), ends)]
  repeats = [run.repeats for part in parts for run in stacks.find_runs(part)]
  for wrong, reason in (
    (not residual.banked, f"with {type(residual).__name__}"),
    (not isinstance(memory, memory_lib.NoMemory), "with model.depth_memory"),
    (not scan, "with model.scan_layers=False"),
    (max(repeats) == 1, "where no pattern of sublayers repeats"),
  ):
    if wrong:
      config_lib.fail("model.depth_loop", "scan", f"'unrolled' {reason}")


@dataclasses.dataclass(frozen=True)
class Part:
  """Consecutive sublayers of a network.

  Attributes:
    kinds: of the sublayers.
    start: number of sublayers of the network before them.
    residual: a banked scheme, of the whole network. Its parameters are not
      used, only its reads are.
    apply: runs a sublayer: maps its kind, itself, a carry, a slot and the
      documents to its output.
    around: activation checkpointing.
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
      The state, whose sources are a `depth_attention.Bank`.
    """
    sources, rest = self.residual.take_apart(state)
    with scopes.part(scopes.RESIDUAL):
      reads = self.residual.queries.reads(
        self.start, self.start + len(self.kinds)
      )
      # The mixtures of a segment that ends early are computed for more reads.
      reads = jax.tree.map(
        lambda a: jnp.pad(a, [(0, self.size - 1)] + [(0, 0)] * (a.ndim - 1)),
        reads,
      )
      open_RBTD = self.residual.open_rows(rest, sources[0].shape, self.size)
    dtypes = [source.dtype for source in sources]

    @jax.custom_vjp
    def run(sublayers, reads, sources, open_RBTD, segment_ids_BT):
      weights = sublayers, reads
      bank_MBTD, open_RBTD, *_ = self._forward(
        weights, sources, open_RBTD, segment_ids_BT, None
      )
      return bank_MBTD, open_RBTD

    def forward(sublayers, reads, sources, open_RBTD, segment_ids_BT):
      weights, saved = (sublayers, reads), []
      bank_MBTD, open_RBTD, *arrays = self._forward(
        weights, sources, open_RBTD, segment_ids_BT, saved
      )
      programs = [_Static(programs) for programs, _ in saved]
      kept = [kept for _, kept in saved]
      return (bank_MBTD, open_RBTD), (
        weights, bank_MBTD, arrays, segment_ids_BT, programs, kept,
      )  # fmt: skip

    def backward(residuals, gradients):
      weights, bank_MBTD, arrays, segment_ids_BT, programs, kept = residuals
      saved = [(program.value, one) for program, one in zip(programs, kept)]
      dweights, dbank_MBTD, dopen_RBTD = self._backward(
        weights, bank_MBTD, arrays, segment_ids_BT, saved, *gradients
      )
      dsources = [dbank_MBTD[i].astype(d) for i, d in enumerate(dtypes)]
      return *dweights, dsources, dopen_RBTD, None

    run.defvjp(forward, backward)
    bank_MBTD, open_RBTD = run(
      dict(sublayers), reads, list(sources), open_RBTD, segment_ids_BT
    )
    last, count = self.at[-1], self.at[-1].sources
    rest = None
    if not self.commits:
      rest = jnp.squeeze(open_RBTD, 0)
    elif self.residual.keeps_open:
      count += 1
    else:
      count += last.place + 1
    bank = depth_attention.Bank(bank_MBTD, count)
    return self.residual.put_together(bank, rest)

  @functools.cached_property
  def at(self) -> tuple[At, ...]:
    """Where each sublayer is."""
    found, stop = [], self.start + len(self.kinds)
    for begin, end in self.residual.segments():
      begin, end, first = max(begin, self.start), min(end, stop), begin
      for l in range(begin, end):
        sources = self.residual.num_sources(begin)
        own = l - self.start
        last = found[-1] if found else None
        found.append(
          At(
            l=own,
            index=self.kinds[:own].count(self.kinds[own]),
            opens=int(l == begin),
            closes=int(l == end - 1),
            first=int(l == first),
            place=l - begin,
            sources=sources,
            before=found[own - (l - begin) - 1].sources
            if begin > self.start
            else sources,
            kept=last.kept + 1 - last.first if last else 0,
          )
        )
    return tuple(found)

  @functools.cached_property
  def size(self) -> int:
    """The most sublayers of a segment in this part."""
    return 1 + max(at.place for at in self.at)

  @functools.cached_property
  def commits(self) -> bool:
    """Whether the open rows are sources at the end."""
    stop = self.start + len(self.kinds)
    ends = [end for _, end in self.residual.segments()]
    return stop in ends or not self.residual.keeps_open

  @functools.cached_property
  def runs(
    self,
  ) -> tuple[tuple[tuple[str, ...], tuple[tuple[At, ...], ...]], ...]:
    """Of each pattern, its kinds and where the sublayers of each repeat are."""
    found, first = [], 0
    for run in stacks.find_runs(self.kinds):
      period = len(run.kinds)
      starts = range(first, first + run.length, period)
      places = tuple(self.at[l : l + period] for l in starts)
      found.append((run.kinds, places))
      first += run.length
    return tuple(found)

  def _forward(self, weights, sources, open_RBTD, segment_ids_BT, saved):
    """(bank, open rows, mixtures, open rows in front of sublayers).

    Args:
      weights: sublayers, and reads with `size` - 1 more rows.
      sources: before this part.
      open_RBTD: open rows before this part.
      segment_ids_BT: documents.
      saved: gets, of each run, its programs and what they keep. If it is None,
        there is no backward pass, and nothing is kept.
    """
    rows = self.at[-1].sources + len(open_RBTD)
    dtype = self.residual.dtype
    bank_MBTD = jnp.zeros((rows, *sources[0].shape), dtype)
    for i, source_BTD in enumerate(sources):
      bank_MBTD = bank_MBTD.at[i].set(source_BTD.astype(dtype))
    whole = saved is not None and not self.recompute
    mixtures = self._no_mixtures(weights, bank_MBTD, whole)
    states = None
    if saved is not None and self.residual.keeps_open:
      count = 1 + max(at.kept for at in self.at)
      states = jnp.zeros((count, *open_RBTD.shape), open_RBTD.dtype)
    carry = bank_MBTD, open_RBTD, mixtures, states

    def one(carry, kind, at, of_position, kept):
      bank_MBTD, open_RBTD, mixtures, states = carry

      def begin(carry):
        bank_MBTD, open_RBTD, mixtures = carry
        # In front of all sublayers, this writes a row that is written later.
        bank_MBTD = _put(bank_MBTD, open_RBTD, at.before)
        new = self._attend(weights, bank_MBTD, at)
        mixtures = _put(mixtures, new, at.l if whole else 0, axis=1)
        if self.residual.keeps_open:
          open_RBTD = jnp.where(at.first != 0, 0, open_RBTD)
        return bank_MBTD, open_RBTD, mixtures

      with scopes.part(scopes.RESIDUAL):
        bank_MBTD, open_RBTD, mixtures = _when(
          at.opens, [a.opens for a in of_position], begin,
          (bank_MBTD, open_RBTD, mixtures),
        )  # fmt: skip
        own = _one(mixtures, at.l if whole else at.place, axis=1)
        if states is not None:
          states = _put(states, open_RBTD[None], at.kept)
      own = self._own(weights, kind, at), own, open_RBTD
      if saved is None:
        new_BTD, _ = self._step(kind, *own, at.place, at.first, segment_ids_BT)
      else:
        program = _Program(
          functools.partial(self._step, kind), own, at, segment_ids_BT
        )
        new_BTD, one = program.forward(own, at, segment_ids_BT)
        kept.append((program, one))
      open_RBTD = _put(open_RBTD, new_BTD[None], self._row(at))
      return bank_MBTD, open_RBTD, mixtures, states

    for kinds, places in self.runs:
      programs = []

      def step(carry, at, kinds=kinds, places=places, programs=programs):
        kept = []
        for kind, at, of_position in zip(kinds, at, zip(*places)):
          carry = one(carry, kind, at, of_position, kept)
        programs[:] = [program for program, _ in kept]
        return carry, [array for _, array in kept]

      carry, kept = _loop(step, carry, places)
      if saved is not None:
        saved.append((programs, kept))
    bank_MBTD, open_RBTD, mixtures, states = carry
    if self.commits:
      with scopes.part(scopes.RESIDUAL):
        bank_MBTD = _put(bank_MBTD, open_RBTD, self.at[-1].sources)
    return bank_MBTD, open_RBTD, mixtures if whole else None, states

  def _backward(
    self, weights, bank_MBTD, arrays, segment_ids_BT, saved, dbank_MBTD,
    dopen_RBTD,
  ):  # fmt: skip
    """The gradients of the weights, of the bank and of the open rows.

    Sources read by a later part or by the readout already have gradients.
    """
    all_mixtures, states = arrays
    last, count = self.at[-1], len(dopen_RBTD)
    mixtures = self._no_mixtures(weights, bank_MBTD, False)
    open_RBTD = None
    if states is None:
      open_RBTD = jnp.zeros_like(dopen_RBTD)
    carry = (
      jax.tree.map(jnp.zeros_like, weights), dbank_MBTD, dopen_RBTD, mixtures,
      mixtures if self.recompute else None, open_RBTD,
    )  # fmt: skip

    def one(carry, kind, at, of_position, program, kept):
      dweights, dbank_MBTD, dopen_RBTD, dmixtures, again, open_RBTD = carry

      def end(carry):
        """The open rows have become sources."""
        dopen_RBTD, dmixtures, again, open_RBTD = carry
        dnew_RBTD = _cut(dbank_MBTD, at.sources, count)
        dnew_RBTD = dnew_RBTD.astype(dopen_RBTD.dtype)
        if not self.commits:
          dnew_RBTD = jnp.where(at.l == last.l, dopen_RBTD, dnew_RBTD)
        if self.at[0].first == 0:
          # That segment may have fewer mixtures than the one before it.
          dmixtures = jax.tree.map(jnp.zeros_like, dmixtures)
        if again is not None:
          again = self._attend(weights, bank_MBTD, at)
        if open_RBTD is not None:
          open_RBTD = _cut(bank_MBTD, at.sources, count)
        return dnew_RBTD, dmixtures, again, open_RBTD

      with scopes.part(scopes.RESIDUAL):
        dopen_RBTD, dmixtures, again, open_RBTD = _when(
          at.closes, [a.closes for a in of_position], end,
          (dopen_RBTD, dmixtures, again, open_RBTD),
        )  # fmt: skip
        if again is None:
          own = _one(all_mixtures, at.l, axis=1)
        else:
          own = _one(again, at.place, axis=1)
        before = open_RBTD if states is None else _one(states, at.kept)
        dnew_BTD = _one(dopen_RBTD, self._row(at))
        if states is not None:
          dopen_RBTD = None
      own = self._own(weights, kind, at), own, before
      (dreads, dsublayer), down, dopen_RBTD = program.backward(
        own, at, segment_ids_BT, kept, (dnew_BTD, dopen_RBTD)
      )
      dsublayers, all_dreads = dweights
      with scopes.part(kind):
        dsublayer = jax.tree.map(lambda a: a[None], dsublayer)
        dsublayer = _put(dsublayers[kind], dsublayer, at.index)
        dsublayers = dsublayers | {kind: dsublayer}
      with scopes.part(scopes.RESIDUAL):
        all_dreads = _put(all_dreads, dreads, at.l)
        dmixtures = jax.tree.map(
          lambda a, b: _put(a, b[:, None], at.place, axis=1), dmixtures, down
        )

      def begin(carry):
        """All gradients of the mixtures are known."""
        all_dreads, dbank_MBTD = carry
        reads = _cut(weights[1], at.begin, self.size)
        query_QD, pull = jax.vjp(depth_attention.queries_of, reads)
        if again is None:
          _, lses = _cut(all_mixtures, at.begin, self.size, axis=1)
        else:
          _, lses = again
        flat = [a.reshape(-1, *a.shape[2:]) for a in (lses, *dmixtures)]
        dquery_QD, dbank_MBTD = depth_attention.depth_attention_vjp(
          query_QD, bank_MBTD, at.sources, *flat, dbank_MBTD,
          **self.residual.how,
        )  # fmt: skip
        dreads = _cut(all_dreads, at.begin, self.size)
        dreads = jax.tree.map(jnp.add, dreads, *pull(dquery_QD))
        return _put(all_dreads, dreads, at.begin), dbank_MBTD

      with scopes.part(scopes.RESIDUAL):
        all_dreads, dbank_MBTD = _when(
          at.opens, [a.opens for a in of_position], begin,
          (all_dreads, dbank_MBTD),
        )  # fmt: skip
      dweights = dsublayers, all_dreads
      return dweights, dbank_MBTD, dopen_RBTD, dmixtures, again, open_RBTD

    for (kinds, places), (programs, arrays) in zip(
      reversed(self.runs), reversed(saved)
    ):

      def step(carry, xs, kinds=kinds, places=places, programs=programs):
        for of_sublayer in reversed(
          list(zip(kinds, xs[0], zip(*places), programs, xs[1]))
        ):
          carry = one(carry, *of_sublayer)
        return carry, None

      carry, _ = _loop(step, carry, places, arrays, reverse=True)
    return carry[:3]

  def _step(self, kind, own, mixtures, open_RBTD, place, first, segment_ids_BT):
    """`step` of the scheme."""

    def run(own, mixtures, open_RBTD, place, first, segment_ids_BT):
      reads, sublayer = own

      def apply(carry, slot):
        with scopes.part(kind):
          return self.apply(kind, sublayer, carry, slot, segment_ids_BT)

      with scopes.part(scopes.RESIDUAL):
        return self.residual.step(
          reads, mixtures, open_RBTD, place, first != 0, apply
        )

    return self.around(run)(
      own, mixtures, open_RBTD, place, first, segment_ids_BT
    )

  def _row(self, at):
    """Of the open rows, the one that a sublayer writes."""
    return 0 if self.residual.keeps_open else at.place

  def _attend(self, weights, bank_MBTD, at):
    """[V, Q, ...] mixtures of a segment, and their log-normalisers."""
    reads = _cut(weights[1], at.begin, self.size)
    found = depth_attention.depth_attention(
      depth_attention.queries_of(reads),
      depth_attention.Bank(bank_MBTD, at.sources),
      **self.residual.how,
    )
    return tuple(a.reshape(-1, self.size, *a.shape[1:]) for a in found)

  def _no_mixtures(self, weights, bank_MBTD, whole):
    """Zeros [V, Q, ...], for V queries per sublayer, or for all sublayers."""
    shapes = jax.eval_shape(self._attend, weights, bank_MBTD, self.at[0])
    extra = len(self.at) - 1 if whole else 0
    return tuple(
      jnp.zeros((s.shape[0], s.shape[1] + extra, *s.shape[2:]), s.dtype)
      for s in shapes
    )

  def _own(self, weights, kind, at):
    """(reads, sublayer) of a sublayer; the reads have a leading axis."""
    sublayers, reads = weights
    with scopes.part(scopes.RESIDUAL):
      reads = _cut(reads, at.l, 1)
    with scopes.part(kind):
      return reads, stacks.one_of(sublayers[kind], at.index)


class _Static:
  """Something that is no array, as a leafless tree."""

  def __init__(self, value: Any):
    self.value = value


jax.tree_util.register_pytree_node(
  _Static, lambda static: ((), static.value), lambda value, _: _Static(value)
)


class _Program:
  """A sublayer, traced once for its forward and its backward pass.

  What the backward pass needs is either given to it again, computed from what
  is given, if neither mixtures, nor open rows, nor a costly operation are
  involved (a slice of a weight, zeros), or kept.
  """

  def __init__(self, step, own, at, segment_ids_BT):
    def run(own, place, first, segment_ids_BT):
      new, pull = jax.vjp(
        lambda *own: step(*own, place, first, segment_ids_BT), *own
      )
      leaves, self._pull = jax.tree.flatten(pull)
      return [new[0], *leaves]

    arguments = own, *_numbers(at), segment_ids_BT
    closed = jax.make_jaxpr(run)(*arguments)
    self._constants, self._jaxpr = closed.consts, closed.jaxpr
    self._new, *self._leaves = closed.jaxpr.outvars
    num_weights = len(jax.tree.leaves(own[0]))
    dear = closed.jaxpr.invars[num_weights : len(jax.tree.leaves(own))]
    self._kept, self._cheap, self._again = _sort(
      closed.jaxpr, self._leaves, dear
    )

  def forward(self, own, at, segment_ids_BT):
    """(The row that the sublayer writes, what to keep)."""
    given = jax.tree.leaves((own, *_numbers(at), segment_ids_BT))
    new, *kept = self._evaluate(given, None, [self._new, *self._kept])
    return new, kept

  def backward(self, own, at, segment_ids_BT, kept, dnew):
    """The gradients of `own`, given those of both results."""
    given = jax.tree.leaves((own, *_numbers(at), segment_ids_BT))
    again = self._evaluate(given, self._cheap, self._again)
    values = dict(zip(self._jaxpr.invars, given))
    values |= dict(zip(self._kept, kept)) | dict(zip(self._again, again))
    leaves = [
      v.val if isinstance(v, core.Literal) else values[v] for v in self._leaves
    ]
    return jax.tree.unflatten(self._pull, leaves)(dnew)

  def _evaluate(self, given, equations, wanted):
    """Values of variables, by some of the equations (None: by all)."""
    if not wanted:
      return []
    part = self._jaxpr.replace(
      outvars=list(wanted),
      eqns=self._jaxpr.eqns if equations is None else equations,
      debug_info=self._jaxpr.debug_info.with_unknown_names(),
    )
    return core.jaxpr_as_fun(core.ClosedJaxpr(part, self._constants))(*given)


def _numbers(at):
  return jnp.asarray(at.place, jnp.int32), jnp.asarray(at.first, jnp.int32)


def _sort(jaxpr, wanted, dear):
  """Which results to keep, and which equations give the others again.

  Args:
    jaxpr: of a sublayer.
    wanted: what its backward pass needs.
    dear: arguments from which nothing is computed again.
  """
  dear, given, made = set(dear), set(jaxpr.invars), set()
  for equation in jaxpr.eqns:
    name = equation.primitive.name
    inputs = [v for v in equation.invars if not isinstance(v, core.Literal)]
    costly = any(v in dear for v in inputs)
    costly |= any(part in name for part in _COSTLY)
    made.update(equation.outvars)
    dear.update(equation.outvars if costly else ())
    if name in _VIEWS and given.issuperset(inputs):
      given.update(equation.outvars)
  wanted = [v for v in wanted if not isinstance(v, core.Literal) and v in made]
  kept = [v for v in dict.fromkeys(wanted) if v in dear - given]
  again = [v for v in dict.fromkeys(wanted) if v not in dear - given]
  needed, reached = set(again), []
  for equation in reversed(jaxpr.eqns):
    if any(v in needed for v in equation.outvars):
      reached.append(equation)
      needed |= {v for v in equation.invars if not isinstance(v, core.Literal)}
  return kept, reached[::-1], again


def _loop(step, carry, places, xs=None, *, reverse=False):
  """A scan over (places, xs), or one step; its first argument is the carry.

  Args:
    step: maps a carry and places, or (places, xs), to a carry and what to
      stack.
    carry: the first one.
    places: of the sublayers of each step.
    xs: arrays stacked over the steps, if there are several.
    reverse: whether the last step comes first.
  """
  if len(places) == 1:
    return step(carry, places[0] if xs is None else (places[0], xs))

  def run(carry, both):
    table_PN, xs_of_step = both
    own = [At(*table_PN[p]) for p in range(len(places[0]))]
    return step(carry, own if xs is None else (own, xs_of_step))

  table_GPN = jnp.asarray(np.asarray(places, np.int32))
  return jax.lax.scan(run, carry, (table_GPN, xs), reverse=reverse)


def _when(wanted, of_all_steps, function, carry):
  """`function(carry)` if wanted, else the carry.

  As a loop, since a conditional would copy what it leaves as it is.

  Args:
    wanted: 0 or 1, possibly known at run time only.
    of_all_steps: its values in all steps.
    function: see above.
    carry: a tree of arrays.
  """
  mean = sum(of_all_steps) / len(of_all_steps)
  if mean in (0, 1):
    return function(carry) if mean else carry
  with scopes.mean_trips(mean):
    return jax.lax.fori_loop(0, wanted, lambda _, c: function(c), carry)


def _cut(tree: Any, first: Any, size: int, *, axis: int = 0) -> Any:
  return jax.tree.map(
    lambda a: jax.lax.dynamic_slice_in_dim(a, first, size, axis), tree
  )


def _one(tree: Any, index: Any, *, axis: int = 0) -> Any:
  return jax.tree.map(
    lambda a: jax.lax.dynamic_index_in_dim(a, index, axis, keepdims=False), tree
  )


def _put(tree: Any, part: Any, first: Any, *, axis: int = 0) -> Any:
  return jax.tree.map(
    lambda a, b: jax.lax.dynamic_update_slice_in_dim(
      a, b.astype(a.dtype), first, axis
    ),
    tree,
    part,
  )

# SPDX-License-Identifier: Apache-2.0
"""The trunk: runs sublayers under a residual scheme, for any scheme.

Depth segments (the blocks of Block AttnRes) run in a Python loop, since each
has more sources than the last. Inside a segment, sublayers that repeat a
pattern run as one `lax.scan` if the scheme's carry allows it, and the others in
a Python loop.

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
import contextlib
import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax import scopes
from attnres_jax import sharding
from attnres_jax.models import depth_scan
from attnres_jax.models import linear
from attnres_jax.models import memory as memory_lib
from attnres_jax.models import sublayer as sublayer_lib
from attnres_jax.models.mixers import cache as cache_lib
from attnres_jax.models.mixers import softmax
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import depth_attention

Trace = base.Trace
Sublayers = Mapping[str, sublayer_lib.Sublayer]

# The key of what a residual scheme keeps of earlier tokens, in a cache.
RESIDUAL = "residual"


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
  "attention": (
    _remat_by(_keep(base.DEPTH_STATE, softmax.ATTENTION)),
    _remat_by(None),
  ),
  "dots": (
    _remat_by(_keep(base.DEPTH_STATE, softmax.ATTENTION, linear.PRODUCT)),
    _remat_by(None),
  ),
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
    ConfigError: a scan over depth blocks is asked for, and there is none.
  """
  memory = memory or memory_lib.NoMemory()
  if depth_loop == "scan":
    periods = _periods(kinds, residual, memory, scan)
    return _run_on_bank(
      sublayers, residual, embedding_BTD, segment_ids_BT, periods, remat
    )
  with scopes.part(scopes.RESIDUAL):
    state = residual.init(embedding_BTD)
  (state, _), _ = _run_part(
    sublayers,
    kinds,
    residual,
    memory,
    (state, memory.init()),
    segment_ids_BT,
    start=0,
    scan=scan,
    remat=remat,
  )
  with scopes.part(scopes.RESIDUAL):
    return residual.readout(state)


def extend(
  sublayers: Sublayers,
  kinds: Sequence[str],
  residual: base.Residual,
  embedding_BTD: jax.Array,
  caches: Mapping[str, Any],
  chunk: cache_lib.Chunk,
  *,
  memory: memory_lib.DepthMemory,
  scan: bool,
  context: int | None = None,
  with_reads: bool = False,
) -> tuple[jax.Array, dict[str, Any], jax.Array | None]:
  """`run`, for new tokens of rows whose earlier tokens are in caches.

  Args:
    sublayers: as in `run`.
    kinds: as in `run`.
    residual: as in `run`.
    embedding_BTD: of the new tokens.
    caches: of mixers by kind, stacked like the sublayers, or `cache.Layers`;
      and of the scheme, if it looks back.
    chunk: the new tokens.
    memory: as in `run`.
    scan: as in `run`.
    context: at least as many tokens as any row has before the chunk; by default
      as many as there is room for.
    with_reads: whether the reads of all sublayers are wanted.

  Returns:
    h_out [B, T, D]; by kind, what the caches should add (`cache.append`); the
    reads h_1..h_L [L, B, T, D] before their norms, or None.
  """
  scan &= RESIDUAL not in caches  # What is looked back at leaves the loop.
  # So do layers in arrays of their own.
  scan &= not any(map(_is_separate, [*sublayers.values(), *caches.values()]))
  places = {kind: itertools.count() for kind in sublayers}
  if not scan and embedding_BTD.shape[1] == 1:
    residual = residual.for_few_tokens()

  def apply(residual, memory, kind, l, both, slots, segment_ids_BT):
    if not scan:
      l = next(places[kind])
    layers: Any = sublayers[kind]
    if isinstance(layers, nnx.List):
      (single,) = _unstack(layers[l], 1)
    else:
      # Out of the whole stack: a loop over part of it would copy that part.
      single = cache_lib.one_of(layers, l)
    core: Any = _OfWholeRows(single.core)
    if kind in caches:
      cache = cache_lib.layer(caches[kind], l, context)
      core = _WithCache(core, cache, chunk)
    reader = _Watched(residual) if with_reads else residual
    y_BTD, new, _ = _apply(
      reader,
      memory,
      kind,
      _Single(single.norm, core),
      both,
      slots,
      segment_ids_BT,
    )
    read_BTD = reader.read_BTD if with_reads else None
    added = core.added if kind in caches else None
    return y_BTD, new, (added, read_BTD)

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
    (state, _), kept = _run_part(
      {kind: jnp.arange(count) for kind, count in counts.items()},
      kinds,
      residual,
      memory,
      (state, memory.init()),
      None,
      start=0,
      scan=scan,
      remat="none",
      apply=apply,
    )
    with scopes.part(scopes.RESIDUAL):
      h_BTD = residual.readout(state)
  added: dict[str, Any] = {}
  for kind in caches.keys() & set(kinds):
    found = [
      _interleave([out for k, (out, _) in zip(run.kinds, outs) if k == kind])
      for run, outs in kept
      if kind in run.kinds
    ]
    is_separate = _is_separate(caches[kind])
    join = _as_layers if is_separate else _concatenate
    added[kind] = join(found)
  if history is not None:
    later = tuple(a[None] for a in history.later)
    if _is_separate(caches[RESIDUAL]):
      later = cache_lib.Layers((later,))
    added[RESIDUAL] = later
  reads_LBTD = None
  if with_reads:
    reads_LBTD = _concatenate(
      [_interleave([read for _, read in outs]) for _, outs in kept]
    )
  return h_BTD, added, reads_LBTD


def _is_separate(layers: Any) -> bool:
  return isinstance(layers, nnx.List | cache_lib.Layers)


def _as_layers(found: list[Any]) -> cache_lib.Layers:
  return cache_lib.Layers(tuple(found))


def separated(sublayers: Sublayers) -> Any:
  """Sublayers that `extend` takes, each in arrays of its own.

  Slices of a stack are copied before a product reads them, by compilers for
  CPUs.
  """
  return nnx.Dict(
    {
      kind: nnx.List(cache_lib.unstacked(stack))
      for kind, stack in sublayers.items()
    }
  )


def stacked(sublayers: Any) -> Sublayers:
  """The inverse of `separated`; stacks stay as they are."""
  return {
    kind: _concatenate(list(layers)) if _is_separate(layers) else layers
    for kind, layers in sublayers.items()
  }


class _Watched:
  """A scheme, as `_apply` sees it, that remembers its read."""

  def __init__(self, residual: base.Residual):
    self.read_BTD: jax.Array | None = None
    self._residual = residual

  def read_normed(self, carry: Any, slot: Any, norm: Any) -> Any:
    h = self._residual.read(carry, slot)
    self.read_BTD = base.main(h)
    return jax.tree.map(norm, h)


class _OfWholeRows:
  """A core, as `_apply` and `_WithCache` see it, after `gather_tokens`."""

  def __init__(self, core: Any):
    self.reads_qkv = getattr(core, "reads_qkv", False)
    self._core = core

  def __call__(self, x: Any, *rest: Any) -> jax.Array:
    return self._core(_gathered(x), *rest)

  def __getattr__(self, name: str) -> Any:
    method = getattr(self._core, name)
    return lambda x, *rest: method(_gathered(x), *rest)


def _gathered(x: Any) -> Any:
  return jax.tree.map(sharding.gather_tokens, x)


class _Single(NamedTuple):
  """A sublayer, as `_apply` sees it."""

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


def run_part(
  sublayers: Sublayers,
  kinds: Sequence[str],
  residual: base.Residual,
  state: Any,
  segment_ids_BT: jax.Array | None,
  *,
  start: int = 0,
  scan: bool,
  remat: str,
) -> Any:
  """Runs consecutive sublayers: maps the state before them to that after.

  Args:
    sublayers: as in `run`, but only those of this part.
    kinds: of the sublayers of this part.
    residual: the scheme, of the whole network.
    state: of the scheme.
    segment_ids_BT: as in `run`.
    start: number of sublayers of the network before this part.
    scan: as in `run`.
    remat: as in `run`.
  """
  memory = memory_lib.NoMemory()
  (state, _), _ = _run_part(
    sublayers,
    kinds,
    residual,
    memory,
    (state, memory.init()),
    segment_ids_BT,
    start=start,
    scan=scan,
    remat=remat,
  )
  return state


def _run_part(
  sublayers: Mapping[str, Any],
  kinds: Sequence[str],
  residual: base.Residual,
  memory: memory_lib.DepthMemory,
  state: tuple[Any, Any],
  segment_ids_BT: jax.Array | None,
  *,
  start: int,
  scan: bool,
  remat: str,
  apply: Callable[..., tuple[jax.Array, Any, Any]] | None = None,
) -> tuple[tuple[Any, Any], list[tuple["Run", list[Any]]]]:
  """`run_part` for states of the scheme and of the memory.

  Args:
    sublayers: trees of any kind, stacked, of which `apply` gets one.
    kinds: as in `run_part`.
    residual: as in `run_part`.
    memory: as in `run`.
    state: before the part.
    segment_ids_BT: as in `run_part`.
    start: as in `run_part`.
    scan: as in `run_part`.
    remat: as in `run_part`.
    apply: runs a sublayer, `_apply` by default.

  Returns:
    The state after the part, and what `apply` returned last: for each run, and
    each of its kinds, stacked over repeats.
  """
  around_segment, around_sublayer = config_lib.choose(
    "model.remat", remat, REMAT
  )
  calls = {
    kind: around_sublayer(
      functools.partial(apply or _apply, residual, memory, kind)
    )
    for kind in sublayers
  }
  kept = []
  segments = _plan(kinds, residual, memory, start, scan)
  for segment, (source, take) in zip(
    segments, _sources(sublayers, segments, remat), strict=True
  ):
    inside = functools.partial(
      _run_segment, segment, residual, memory, take, calls, segment_ids_BT
    )
    (carry, remembered), outs = around_segment(inside)(source, state)
    kept += zip(segment.runs, outs)
    with scopes.part(scopes.RESIDUAL):
      state = residual.close(state[0], carry, segment.stop), remembered
  return state, kept


def _periods(
  kinds: Sequence[str],
  residual: base.Residual,
  memory: memory_lib.DepthMemory,
  scan: bool,
) -> tuple[depth_scan.Period, ...]:
  """The segments of all sublayers, as repeated patterns."""
  segments = residual.segments()
  runs = find_runs([tuple(kinds[a:b]) for a, b in segments])
  for wrong, reason in (
    (not residual.banked, f"with {type(residual).__name__}"),
    (not isinstance(memory, memory_lib.NoMemory), "with model.depth_memory"),
    (not scan, "with model.scan_layers=False"),
    (
      max(run.repeats for run in runs) == 1,
      "where no pattern of depth blocks repeats",
    ),
  ):
    if wrong:
      config_lib.fail("model.depth_loop", "scan", f"'unrolled' {reason}")
  assert residual.block_size is not None
  periods, first, sources = [], 0, 1
  for run in runs:
    blocks, before = [], sources
    for start, stop in segments[first : first + len(run.kinds)]:
      added = -(-(stop - start) // residual.block_size)
      own = tuple(kinds[start:stop])
      blocks.append(depth_scan.Block(start, own, before, added))
      before += added
    periods.append(depth_scan.Period(tuple(blocks), run.repeats))
    sources += (before - sources) * run.repeats
    first += run.length
  return tuple(periods)


def _run_on_bank(
  sublayers: Sublayers,
  residual: Any,
  embedding_BTD: jax.Array,
  segment_ids_BT: jax.Array | None,
  periods: tuple[depth_scan.Period, ...],
  remat: str,
) -> jax.Array:
  """`run` of a banked scheme, with one scan over depth blocks."""
  around_segment, around_sublayer = config_lib.choose(
    "model.remat", remat, REMAT
  )
  memory = memory_lib.NoMemory()
  calls = {
    kind: around_sublayer(functools.partial(_apply, residual, memory, kind))
    for kind in sublayers
  }

  def run_block(kinds, reads, parts, sources, segment_ids_BT):
    # A loop inside the loop would copy what its steps read and write.
    runs = no_runs(kinds)
    opened: Any = _Opened(residual, reads)
    (carry, _), _ = _run_segment(
      _Segment(0, len(kinds), runs),
      opened,
      memory,
      _same,
      calls,
      segment_ids_BT,
      [(part,) for part in parts],
      (sources, memory.init()),
    )
    with scopes.part(scopes.RESIDUAL):
      return residual.end(carry)

  loop = depth_scan.Loop(periods, residual, run_block, around_segment)
  with scopes.part(scopes.RESIDUAL):
    reads = residual.queries.reads(0, residual.num_sublayers)
  bank_MBTD = loop(dict(sublayers), reads, embedding_BTD, segment_ids_BT)
  with scopes.part(scopes.RESIDUAL):
    return residual.attend_last_of(
      depth_attention.Bank(bank_MBTD, len(bank_MBTD))
    )


class _Opened:
  """A scheme, as `_run_segment` sees it, with the reads of one segment."""

  def __init__(self, residual: base.Residual, reads: Any):
    self.write = residual.write
    self._residual = residual
    self._reads = reads

  def open(self, state: Any, start: int, stop: int) -> tuple[Any, Any]:
    del start, stop
    return self._residual.begin(self._reads, state)


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
  singles = _in_order(sublayers, kinds)

  def sublayer(l: int, carry: Any, slot: Any) -> jax.Array:
    nonlocal remembered
    reads.append(base.main(residual.read(carry, slot)))
    (memory_slot,) = _unstack(memory.open(l, l + 1), 1)
    y_BTD, new, _ = _apply(
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
  squares = {
    kind: sum(
      jnp.sum(jnp.square(leaf), axis=tuple(range(1, leaf.ndim)))
      for leaf in jax.tree.leaves(stack)
    )
    for kind, stack in sublayers.items()
  }
  squares_L = jnp.stack(_in_order(squares, kinds))
  return jnp.sqrt(jnp.sum(squares_L.reshape(-1, 2), axis=1))


class Run(NamedTuple):
  """Consecutive sublayers: `kinds`, repeated `repeats` times."""

  kinds: tuple[Any, ...]
  repeats: int

  @property
  def length(self) -> int:
    return len(self.kinds) * self.repeats

  def count(self, kind: str) -> int:
    """Number of sublayers of this kind, over all repeats."""
    return self.kinds.count(kind) * self.repeats


def find_runs(kinds: Sequence[Any]) -> tuple[Run, ...]:
  """Cuts a sequence of kinds into runs, greedily the longest repetition first.

  Of two repetitions of equal length, the one with the shorter period is chosen.
  Sublayers that repeat nothing become runs of length one.

    a b a b c   ->   (a b) x 2, (c) x 1
  """
  kinds, runs, start = tuple(kinds), [], 0
  while start < len(kinds):
    rest = kinds[start:]
    found = [
      Run(rest[:period], _repeats(rest, period))
      for period in range(1, len(rest) // 2 + 1)
    ]
    found = [run for run in found if run.repeats > 1]
    longest = max(found, key=lambda run: run.length, default=Run(rest[:1], 1))
    runs.append(longest)
    start += longest.length
  return tuple(runs)


def no_runs(kinds: Sequence[Any]) -> tuple[Run, ...]:
  """Every sublayer as a separate run."""
  return tuple(Run((kind,), 1) for kind in kinds)


def _repeats(kinds: tuple[Any, ...], period: int) -> int:
  """How often the first `period` kinds are repeated from the start."""
  count = 1
  while kinds[count * period : (count + 1) * period] == kinds[:period]:
    count += 1
  return count


@dataclasses.dataclass(frozen=True)
class _Segment:
  """Sublayers start..stop-1, which the scheme opens together, as runs."""

  start: int
  stop: int
  runs: tuple[Run, ...]


def _plan(
  kinds: Sequence[str],
  residual: base.Residual,
  memory: memory_lib.DepthMemory,
  start: int,
  scan: bool,
) -> list[_Segment]:
  """The segments, or parts of segments, from sublayer `start` on."""
  cut = find_runs if scan and residual.scannable else no_runs
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


def _of_kinds(run: Run) -> Run:
  return Run(tuple(kind for kind, _ in run.kinds), run.repeats)


def _run_segment(
  segment: _Segment,
  residual: base.Residual,
  memory: memory_lib.DepthMemory,
  take: Callable[[Any], list[Sublayers]],
  apply: Mapping[str, Callable[..., tuple[jax.Array, Any, Any]]],
  segment_ids_BT: jax.Array | None,
  source: Any,
  state: tuple[Any, Any],
) -> tuple[tuple[Any, Any], list[Any]]:
  state, remembered = state
  with scopes.part(scopes.RESIDUAL):
    carry, slots = residual.open(state, segment.start, segment.stop)
    slots = slots, memory.open(segment.start, segment.stop)
    slots = base.split(slots, [run.length for run in segment.runs])
  both, kept = (carry, remembered), []
  for run, part, run_slots in zip(segment.runs, take(source), slots):

    def period(both, xs, run=run):
      part, slots = xs
      with scopes.part(scopes.RESIDUAL):
        slots = _unstack(slots, len(run.kinds))
      sublayers = _in_order(part, run.kinds)
      outs = []
      for kind, sublayer, slot in zip(run.kinds, sublayers, slots):
        with scopes.part(kind):
          y_BTD, new, out = apply[kind](sublayer, both, slot, segment_ids_BT)
        outs.append(out)
        new = jax.tree.map(base.keep, new)
        with scopes.part(scopes.RESIDUAL):
          carry = residual.write(both[0], slot[0], y_BTD)
        both = carry, memory.write(both[1], new)
      return both, outs

    xs = part, run_slots
    if run.repeats == 1:
      both, outs = period(both, xs)
      outs = jax.tree.map(lambda a: a[None], outs)
    else:
      both, outs = jax.lax.scan(period, both, _fold(xs, run.repeats))
    kept.append(outs)
  return both, kept


def _apply(
  residual: "base.Residual | _Watched",
  memory: memory_lib.DepthMemory,
  kind: str,
  sublayer: "sublayer_lib.Sublayer | _Single",
  both: tuple[Any, Any],
  slots: tuple[Any, Any],
  segment_ids_BT: jax.Array | None,
) -> tuple[jax.Array, Any, None]:
  """The output, and what is new in the memory."""
  (carry, remembered), (slot, memory_slot) = both, slots
  with scopes.part(scopes.RESIDUAL):
    x = residual.read_normed(carry, slot, sublayer.norm)
  if not getattr(sublayer.core, "reads_qkv", False):
    x = base.main(x)
  y_BTD, new = memory.call(
    kind, sublayer.core, x, segment_ids_BT, remembered, memory_slot
  )
  return sharding.keep_tokens(y_BTD), new, None


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
      for i, part in zip(having, base.split(stack, sizes), strict=True):
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


def _in_order(
  stacks: Mapping[str, Any] | tuple[Any, ...], kinds: Sequence[str]
) -> Sequence[Any]:
  """Unstacks the modules of all kinds, in the order of `kinds`.

  A tuple is in this order already.
  """
  if isinstance(stacks, tuple):
    return stacks
  singles = {}
  for kind in dict.fromkeys(kinds):
    with scopes.part(kind):
      singles[kind] = iter(_unstack(stacks[kind], kinds.count(kind)))
  return [next(singles[kind]) for kind in kinds]


def _fold(tree: Any, repeats: int) -> Any:
  """Splits leading axes of repeats * n into repeats and n."""
  return jax.tree.map(
    lambda a: a.reshape(repeats, a.shape[0] // repeats, *a.shape[1:]), tree
  )


def _interleave(trees: list[Any]) -> Any:
  """[n, ...] arrays of every tree as [n * number of trees, ...] arrays."""
  return jax.tree.map(
    lambda *a: jnp.stack(a, 1).reshape(-1, *a[0].shape[1:]), *trees
  )


def _concatenate(trees: list[Any]) -> Any:
  return jax.tree.map(lambda *a: jnp.concatenate(a), *trees)


def _unstack(tree: Any, count: int) -> list[Any]:
  """One tree for each of the `count` indices of the leading axis."""
  return [
    jax.tree.map(lambda a: jnp.squeeze(a, 0), part)
    for part in base.split(tree, [1] * count)
  ]

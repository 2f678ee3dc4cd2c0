# SPDX-License-Identifier: Apache-2.0
"""What the kernels of `pallas_gpu_cluster` share.

Copies between memory and shared memory, the first pass over the sources, and
the sums over the thread blocks of a cluster.
"""

import functools
import importlib
import operator
from typing import Any

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from attnres_kernels import warpgroup
from attnres_kernels.depth_attention import pallas_gpu_cluster_plan as plans

_plgpu = warpgroup._plgpu
TOKENS, ROWS, COLUMNS = plans.TOKENS, plans.ROWS, plans.COLUMNS


class Kernel:
  """What both directions share: copies, sums over columns, the exchange."""

  def __init__(self, call, plan, eps):
    self.call, self.plan, self.eps = call, plan, eps
    self.groups = call.num_tokens // TOKENS
    blocks = 2 if plan.shared_bytes <= plans.SHARED_OF_TWO else 1
    multiprocessors = warpgroup.PROGRAMS // 3
    self.clusters = min(
      self.groups, max(1, blocks * multiprocessors // plan.parts)
    )

  def exchanged(self, *names):
    """Shares of sums, by group and thread block."""
    windows = (self.groups, self.plan.parts, len(self.plan.starts), ROWS)
    shapes = {
      "scores": (*windows, self.plan.queries),
      "products": (*windows, self.plan.queries),
      "squares": windows,
    }
    return {name: struct(shapes[name]) for name in names}

  def backward(self, query_terms, lse, dlse, dout):
    """(inputs, source gradients, exchanged sums) of a backward pass."""
    call = self.call
    padding = ((0, 0), (0, self.plan.queries - call.num_queries))
    inputs = {
      "query_terms": query_terms,
      "lse": jnp.pad(lse, padding),
      "dlse": jnp.pad(dlse, padding),
      "dout_in": dout,
    } | call.inputs
    gradients = {
      f"d{name}": struct(x.shape, x.dtype)
      for name, x in call.inputs.items()
      if name != "count"
    }
    return inputs, gradients, self.exchanged("scores", "squares", "products")

  def run(
    self,
    name,
    inputs,
    outputs,
    one_group,
    *,
    start=None,
    finish=None,
    interpret,
  ):
    """Runs the kernel; returns its outputs by name."""
    plan, call = self.plan, self.call
    resident = plan.backward and not plan.streamed
    copies = plan.slots + call.num_queries * resident
    scratch = {
      name: self._tiles(shape) if tiled else warpgroup.shared(shape)
      for name, (shape, tiled) in plan.scratch.items()
    } | {
      "arrived": _plgpu.Barrier(num_arrivals=copies, num_barriers=plan.chunks),
      # A span of queries, and of output gradients; or all queries.
      "queries": _plgpu.Barrier(num_arrivals=9, num_barriers=2)
      if plan.streamed
      else _plgpu.Barrier(num_arrivals=plan.chunks),
      "exchange": _plgpu.ClusterBarrier(collective_axes=("part",)),
    }

    def body(*refs):
      ref = dict(zip((*inputs, *outputs, *scratch), refs, strict=True))
      cluster = jax.lax.axis_index("program")
      self.each_chunk(lambda i: self._clear(ref, i))
      if start is not None:
        start(ref)
      _plgpu.commit_smem()
      if not plan.streamed:
        self.each_chunk(lambda i: self._copy_query(ref, i))
      self.each_chunk(lambda i: self._copy(ref, cluster, i))
      if not plan.streamed:
        _plgpu.barrier_wait(ref["queries"])

      def turn(k, carry):
        group = cluster + k * self.clusters

        def following(i):
          @pl.when(group + self.clusters < self.groups)
          def _():
            self._copy(ref, group + self.clusters, i)

        one_group(ref, group, following)
        return carry

      mine = (self.groups - cluster + self.clusters - 1) // self.clusters
      jax.lax.fori_loop(0, mine, turn, None)
      one_warp(lambda: _plgpu.wait_smem_to_gmem(0))
      if finish is not None:
        finish(ref)

    body.__name__ = name
    options = {} if interpret is None else {"interpret": interpret}
    results = _plgpu.kernel(
      body,
      out_type=list(outputs.values()),
      scratch_types=list(scratch.values()),
      grid=(self.clusters,),
      grid_names=("program",),
      cluster=(plan.parts,),
      cluster_names=("part",),
      # No sum crosses warps.
      compiler_params=_plgpu.CompilerParams(reduction_scratch_bytes=0),
      **options,
    )(*inputs.values())
    return dict(zip(outputs, results, strict=True))

  def part(self):
    return jax.lax.axis_index("part")

  def at(self, i):
    """The columns of a chunk of this block."""
    start = (self.part() * self.plan.chunks + i) * COLUMNS
    return pl.ds(start, COLUMNS)

  def tokens(self, group):
    return pl.ds(group * TOKENS, TOKENS)

  def slots_of(self, window):
    slots = range(self.plan.slots)
    return [slot for slot in slots if self.plan.place(slot)[0] == window]

  def each_chunk(self, body):
    def one(i, carry):
      body(i)
      return carry

    jax.lax.fori_loop(0, self.plan.chunks, one, None)

  def _tiles(self, shape):
    transforms = (
      _plgpu.TilingTransform((TOKENS, self.plan.tile)),
      _plgpu.SwizzleTransform(2 * self.plan.tile),
    )
    return _plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)

  def _clear(self, ref, i):
    """Zero rows that no copy writes: they are factors, of zero weight."""
    plan = self.plan
    names = []
    if "count" in ref or plan.slots * TOKENS < plan.rows:
      names.append("source")
    if plan.backward and self.call.num_queries < 8:
      names.append("dout")
    for name in names:
      for start in plan.starts if name == "source" else (0,):
        none = zeros(COLUMNS).astype(jnp.bfloat16)
        _plgpu.store(ref[name].at[i, pl.ds(start, ROWS)], none)

  def _copy_query(self, ref, i):
    source = ref["query_terms"].at[:, self.at(i)]
    _plgpu.copy_gmem_to_smem(source, ref["query"].at[i], ref["queries"])

  def _copy(self, ref, group, i):
    """Starts copies of a chunk of the sources (and output gradients)."""
    barrier = ref["arrived"].at[i]

    def copy(source, name, index):
      to = ref[name].at[i, pl.ds(index * TOKENS, TOKENS)]
      _plgpu.copy_gmem_to_smem(source, to, barrier)

    def copy_slot(slot):
      source = self.call.source(ref, slot, self.tokens(group), self.at(i))
      copy(source, "source", slot)

    count = ref["count"][0] if "count" in ref else self.plan.slots
    # The content of an unused slot must not matter.
    unused = [slot >= count for slot in range(self.plan.slots)]
    used = [slot < count for slot in range(self.plan.slots)]

    def copies():
      for slot in range(self.plan.slots):
        if "count" not in ref:
          copy_slot(slot)
          continue
        pl.when(used[slot])(functools.partial(copy_slot, slot))
        pl.when(unused[slot])(lambda: _plgpu.barrier_arrive(barrier))
      if self.plan.backward and not self.plan.streamed:
        for q in range(self.call.num_queries):
          copy(ref["dout_in"].at[q, self.tokens(group), self.at(i)], "dout", q)

    one_warp(copies)

  def sums(self, ref, group, other=None):
    """The first pass: shares of scores, squares and products with `other`."""
    plan = self.plan
    windows = len(plan.starts)
    queries = plan.queries

    def body(scores, products, i, squares):
      _plgpu.barrier_wait(ref["arrived"].at[i])
      factors = ref["query"].at[i, pl.ds(0, plan.terms * queries)]
      sources = [
        ref["source"].at[i, pl.ds(start, ROWS)] for start in plan.starts
      ]
      for window, source in enumerate(sources):
        _plgpu.wgmma(scores[window], source, factors.T)
        if products:
          _plgpu.wgmma(products[window], source, ref[other].at[i].T)
      totals = [
        add_squares(total, source)
        for source, total in zip(sources, squares, strict=True)
      ]
      _plgpu.wgmma_wait(0)
      return tuple(totals)

    def run(*totals):
      scores, products = totals[:windows], totals[windows:]
      squares = jax.lax.fori_loop(
        0,
        plan.chunks,
        functools.partial(body, scores, products),
        tuple(zeros(8) for _ in plan.starts),
      )
      for window in range(windows):
        at = group, self.part(), window
        store(ref["scores"].at[at], self.sum_of_terms(scores[window][...]))
        store(ref["squares"].at[at], jnp.sum(squares[window], axis=1))
        if products:
          self.store_products(ref, at, products[window][...], 0)

    totals = [accumulator(plan.terms * queries)] * windows
    totals += [accumulator(ROWS)] * (windows if other else 0)
    pl.run_scoped(run, *totals)
    self.exchange(ref)

  def sum_of_terms(self, dots):
    """Products with queries, of those with their terms."""
    step = dots.shape[1] // self.plan.terms
    terms = [dots[:, i * step : (i + 1) * step] for i in range(self.plan.terms)]
    return functools.reduce(operator.add, terms)

  def store_products(self, ref, at, full, span):
    """Stores the products of sources with their tokens' output gradients."""
    for q in range(8):
      own = jnp.where(diagonal(), full[:, 8 * q : 8 * q + 8], 0.0)
      to = ref["products"].at[(*at, slice(None), 8 * span + q)]
      store(to, jnp.sum(own, axis=1))

  def exchange(self, ref):
    """Waits until all blocks of the cluster have written their shares."""
    _plgpu.barrier_arrive(ref["exchange"])
    _plgpu.barrier_wait(ref["exchange"])
    # That barrier, all that the interpreter knows, orders shared memory only.
    barrier_of_cluster()

  def total(self, ref, group, window, columns=None):
    """Sums over thread blocks, in order, of a window: all rows, or [64, 8]."""
    shares = [
      ref.at[group, part, window]
      if columns is None
      else ref.at[group, part, window, :, columns]
      for part in range(self.plan.parts)
    ]
    layout = rows() if columns is None else matrix()
    return functools.reduce(operator.add, [load(at, layout) for at in shares])

  def inverse_rms(self, ref, group):
    """[64] for each window."""
    squares = [
      self.total(ref["squares"], group, window)
      for window in range(len(self.plan.starts))
    ]
    return [
      jax.lax.rsqrt(x * (1.0 / self.plan.width) + self.eps) for x in squares
    ]

  def by_slot(self, ref, of_window):
    """[8 tokens, 8 queries] for each slot, of [64, 8] for each window."""
    found = {}
    for window in range(len(self.plan.starts)):
      store(ref["by_slot"], of_window(window))
      for slot in self.slots_of(window):
        at = pl.ds(self.plan.place(slot)[1], TOKENS)
        found[slot] = load(ref["by_slot"].at[at], square())
    return [found[slot] for slot in range(self.plan.slots)]

  def scores(self, ref, group, columns, inverse):
    """Scores by slot; -inf for those that do not count."""

    def of_window(window):
      dots = self.total(ref["scores"], group, window, columns)
      return dots * across(inverse[window], 8)

    scores = self.by_slot(ref, of_window)
    if "count" in ref:
      count = ref["count"][0]
      # A scalar cannot select a vector here, but it can be added.
      scores = [
        score + jnp.where(slot < count, 0.0, -jnp.inf)
        for slot, score in enumerate(scores)
      ]
    return scores

  def factors(self, ref, group, columns, inverse):
    """Factors of the backward pass by slot: (weight, pull, bend).

    Weights and pulls are [8 tokens, 8 queries], bends [8 tokens]; pulls lack a
    factor 1 / rms, bends 1 / (rms^2 D).
    """
    scores = self.scores(ref, group, columns, inverse)
    products = self.by_slot(
      ref, lambda window: self.total(ref["products"], group, window, columns)
    )
    lse = load(ref["lse"].at[self.tokens(group), columns], square())
    dlse = load(ref["dlse"].at[self.tokens(group), columns], square())
    weights = [
      jnp.where(score > -jnp.inf, jnp.exp(score - lse), 0.0) for score in scores
    ]
    total = functools.reduce(operator.add, weights)
    # Normalised again: sums of another order could differ for large scores.
    share = jnp.where(total > 0.0, 1.0 / total, 0.0)
    weights = [weight * share for weight in weights]
    pairs = zip(weights, products, strict=True)
    mean = functools.reduce(operator.add, [w * p for w, p in pairs])
    found = []
    for weight, product, score in zip(weights, products, scores, strict=True):
      pull = weight * (product + dlse - mean)
      bend = pull * jnp.where(weight > 0.0, score, 0.0)
      found.append((weight, pull, jnp.sum(bend, axis=1)))
    return found

  def write(self, ref, result, places):
    """Rounds a result and copies groups of eight rows to memory."""
    # Earlier copies must have read the buffer.
    one_warp(lambda: _plgpu.wait_smem_to_gmem(0, wait_read_only=True))
    _plgpu.store(ref["stage"], result.astype(jnp.bfloat16))
    _plgpu.commit_smem()

    def copies():
      for row, to in places:
        _plgpu.copy_smem_to_gmem(ref["stage"].at[pl.ds(row, TOKENS)], to)

    one_warp(copies)


def terms(query_QD, plan):
  """Terms of the queries; backward the first one again, for low pulls."""
  missing = -query_QD.shape[0] % 8
  rest = jnp.pad(query_QD, ((0, missing), (0, 0)))
  found = []
  for _ in range(plan.terms):
    found.append(rest.astype(jnp.bfloat16))
    rest = rest - found[-1].astype(jnp.float32)
  stacked = jnp.concatenate([*found, *found[: plan.backward]])
  return jnp.pad(stacked, ((0, plan.query_rows - stacked.shape[0]), (0, 0)))


def add_squares(total, ref):
  """Adds the squares of 64 rows in shared memory to sums of [64, 8]."""
  source = _plgpu.load(ref, layout=matrix()).astype(jnp.float32)
  source *= source
  for first in range(0, COLUMNS, 8):
    total += source[:, first : first + 8]
  return total


def high_and_low(x):
  high = x.astype(jnp.bfloat16)
  return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def struct(shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


def accumulator(columns):
  return _plgpu.ACC((ROWS, columns), jnp.float32)


def matrix():
  """Layout of results of the matrix unit: 64 rows, 16 for each warp."""
  return _plgpu.Layout.WGMMA


def rows():
  return matrix().reduce(1)


def square():
  """Layout of [8, 8], the same in all warps."""
  tiling = _plgpu.Tiling(((8, 8), (4, 8), (1,)))
  return _plgpu.Layout.TILED(tiling, (_plgpu.Replicated(4),), (-3, -2), -1)


def zeros(columns):
  none = jnp.zeros((ROWS, columns), jnp.float32)
  return _plgpu.layout_cast(none, matrix())


def across(rows, columns):
  wide = jax.lax.broadcast_in_dim(rows, (ROWS, columns), (0,))
  return _plgpu.layout_cast(wide, matrix())


def diagonal():
  """Whether row and column have the same token."""
  iota = functools.partial(
    _plgpu.broadcasted_iota, jnp.int32, (ROWS, TOKENS), layout=matrix()
  )
  return iota(0) % TOKENS == iota(1)


def on_diagonal(rows):
  return jnp.where(diagonal(), across(rows, TOKENS), 0.0)


def spread_weights(to, weights, queries):
  """Two terms of [(m, t), (q, t')] from [q, (m, t)], zero unless t = t'.

  Zero as well from the row `queries` on.
  """
  blocks = [
    on_diagonal(load(weights.at[q], rows())) * jnp.where(q < queries, 1.0, 0.0)
    for q in range(8)
  ]
  high, low = high_and_low(jnp.concatenate(blocks, axis=1))
  _plgpu.store(to.at[0], high)
  _plgpu.store(to.at[1], low)


def spread_pulls(to, pull):
  """Factors of the three terms of the queries, and of the first once more."""
  high, low = high_and_low(pull)
  none = zeros(8).astype(jnp.bfloat16)
  columns = [high, high, none, low, *[none] * 4]
  _plgpu.store(to, jnp.concatenate(columns, axis=1))


def clear_factors(weights, pulls):
  none = jnp.zeros((8, ROWS), jnp.float32)
  layout = _plgpu.Layout.WG_STRIDED((8, ROWS), 4)
  store(weights, _plgpu.layout_cast(none, layout))
  store(pulls, zeros(8))


def one_warp(body):
  """Runs `body` on one warp, behind a barrier of all four."""

  def on_warp():
    pl.when(jax.lax.axis_index("warp") == 0)(body)

  mesh = _plgpu.WarpMesh(axis_name="warp")
  run: Any = pl.kernel(on_warp, out_type=(), mesh=mesh)
  run()


def load(ref, layout):
  return _plgpu.load(ref, layout=layout, optimized=False)


def store(ref, x):
  _plgpu.store(ref, x, optimized=False)


def barrier_of_cluster():
  """Lets all blocks see what each wrote to memory before; not interpreted."""

  @_plgpu.inline_mgpu()
  def barrier(context):
    del context
    utils = importlib.import_module("jax.experimental.mosaic.gpu.utils")
    for ptx in (
      "barrier.cluster.arrive.release.aligned;",
      "barrier.cluster.wait.acquire.aligned;",
    ):
      utils.inline_ptx(ptx, has_side_effects=True, convergent=True)

  barrier()

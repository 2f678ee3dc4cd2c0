# SPDX-License-Identifier: Apache-2.0
"""Depth attention on Nvidia GPUs (from Hopper on), in Pallas Mosaic GPU.

Several queries over bfloat16 sources run on clusters of thread blocks, if
`pallas_gpu_cluster_plan` has a plan for their shapes. The kernels here take
everything else.

One warpgroup per token reads the token's sources twice, tile by tile. The first
pass sums up scores (and, backward, the products with the output gradients). The
second pass writes mixtures or source gradients. Between the two, M x Q
statistics are kept in shared memory. So neither Q x D nor M x D numbers have to
fit the registers, and any Q, M and D will do. The second pass finds the sources
of its token (M x D x 2 bytes, 41 kB in the 48B model) in a cache: each source
is read from memory once, as long as the tokens that run at the same time (up to
eight thread blocks on each of 132 multiprocessors) fit the 50 MB of the
second-level cache.

Queries are processed up to eight at a time, because their partial sums for
several sources fill the registers. The backward pass loops over tokens: each
thread block keeps its part of the query gradients in shared memory, and the
parts are added up in a fixed order. If Q x D float32 numbers exceed a third of
the shared memory (Kimi K3: 24 x 7168), the pass writes the factors of the
sources instead, [T, M, Q], and the query gradients are one matrix product per
source, which reads the sources a second time.

Never executed on a GPU: values are checked in interpret mode, and the kernels
are lowered for H100 and H200 on a CPU. The automatic choice on GPUs is
therefore plain JAX.
"""

import math

import jax
import jax.numpy as jnp

from attnres_kernels import warpgroup
from attnres_kernels.depth_attention import pallas_gpu_cluster
from attnres_kernels.depth_attention import pallas_gpu_cluster_plan
from attnres_kernels.depth_attention import pallas_gpu_cluster_streamed

_ROWS = 8  # Queries whose partial sums are held at the same time.
# Partial sums of scores per thread; the more there are, the fewer thread blocks
# run at the same time (benchmarks/gpu_static.py).
_REGISTERS = 64
# Separate sources are unrolled, and the time to infer layouts grows with the
# square of the program: half a minute at 24 sources and eight queries.
_SEPARATE = 32


def why_not(
  function,
  query_QD,
  sources,
  *args,
  eps,
  heads=1,
  rank=None,
  apart=False,
  norm_eps=None,
):
  """The reason why these arguments cannot run, or None."""
  del eps
  if norm_eps is not None:
    return "no norm_gain; use rms_norm of the mixture"
  if heads > 1 or rank is not None:
    return f"one head with keys of the full width, got {heads=}, {rank=}"
  num_queries, width = query_QD.shape
  # The backward pass's last argument is what to accumulate into, or None.
  wide = [sources[0], *jax.tree.leaves(args[4:])]
  reason = warpgroup.why_not(width, wide)
  if reason is not None:
    return reason
  if query_QD.dtype != jnp.float32:
    return f"queries must be float32, got {query_QD.dtype}"
  if not sources[0].size:
    return f"there is no token in sources of {sources[0].shape}"
  if isinstance(sources, tuple) and len(sources) > _SEPARATE:
    return (
      f"at most {_SEPARATE} separate sources, got {len(sources)}; a bank may"
      " have more"
    )
  matrices = 1 if function == "forward" else 3
  needed = matrices * len(sources) * num_queries * 4
  if needed > warpgroup.SHARED_BYTES // 2:
    return (
      f"query {query_QD.shape} with {len(sources)} sources needs"
      f" {needed >> 10} KiB of shared memory for statistics"
    )
  return None


def forward(query_QD, sources, count, *, eps, apart=False, interpret=None):
  """Returns the mixtures and their log-normalisers."""
  call = _Call(query_QD, sources, count)
  plan = pallas_gpu_cluster_plan.plan(
    "forward", query_QD, sources, call.num_tokens
  )
  if plan is not None:
    out, lse = pallas_gpu_cluster.forward(
      call, query_QD, plan, eps=eps, interpret=interpret
    )
    return call.mixtures(out, lse)
  tiles, spans, num_queries = call.tiles, call.spans, call.num_queries
  inputs = {"query": query_QD} | call.inputs
  out_shape = (num_queries, call.num_tokens, tiles.width)
  outputs = {
    "out": jax.ShapeDtypeStruct(out_shape, sources[0].dtype),
    "lse": jax.ShapeDtypeStruct((call.num_tokens, num_queries), jnp.float32),
  }
  # Scores first, then weights before they are divided by their sum.
  scratch = {"weight": (call.num_slots, spans[0][1])}

  def kernel(*refs):
    ref = dict(zip((*inputs, *outputs, *scratch), refs, strict=True))
    token = jax.lax.axis_index("program")
    for first, last in spans:
      one_span(ref, token, first, last)

  def one_span(ref, token, first, last):
    rows = last - first

    def score(slots):
      def body(tile, columns, fresh, carry):
        del tile
        query = tiles.load(ref["query"].at[first:last, columns])
        sums = []
        for slot, (dots, squares) in zip(slots, carry, strict=True):
          source = tiles.load(call.source(ref, slot, token, columns))
          source = warpgroup.keep(source, fresh)
          dots += tiles.down(source, rows) * query
          sums.append((dots, squares + source * source))
        return sums

      zeros = (tiles.zeros(rows), tiles.zeros())
      carry = tiles.loop(body, [zeros for _ in slots])
      for slot, (dots, squares) in zip(slots, carry, strict=True):
        dots = jnp.sum(dots, axis=1)
        inverse = _inverse_rms(squares, tiles.width, eps)
        warpgroup.store(ref["weight"].at[slot, :rows], dots * inverse)

    call.each_group(ref, _group(tiles, rows), score)
    load = lambda slot: tiles.load_stats(ref["weight"].at[slot, :rows])
    top = call.each_slot(
      ref,
      lambda slot, top: jnp.maximum(top, load(slot)),
      tiles.full_stats(rows, -jnp.inf),
    )

    def weigh(slot, total):
      weight = jnp.exp(load(slot) - top)
      warpgroup.store(ref["weight"].at[slot, :rows], weight)
      return total + weight

    total = call.each_slot(ref, weigh, tiles.full_stats(rows, 0.0))
    # With no source at all this is -inf, and the mixture zero, as they should
    # be. The sum divides the mixture, not each weight: a division is a dozen
    # instructions, in every thread.
    lse = top + jnp.log(total)
    warpgroup.store(ref["lse"].at[token, first:last], lse)
    share = jnp.where(total > 0.0, 1.0 / total, 0.0)

    def mix(tile, columns, fresh, carry):
      del tile, fresh

      def add(slot, mixed):
        source = tiles.load(call.source(ref, slot, token, columns))
        return mixed + tiles.down(source, rows) * tiles.across(load(slot))

      mixed = call.each_source(ref, add, tiles.zeros(rows))
      mixed = mixed * tiles.across(share)
      warpgroup.store(ref["out"].at[first:last, token, columns], mixed)
      return carry

    tiles.loop(mix, None)

  out, lse = warpgroup.call(
    kernel,
    "depth_attention_forward",
    out_type=list(outputs.values()),
    grid=call.num_tokens,
    scratch_types=[warpgroup.shared(shape) for shape in scratch.values()],
    interpret=interpret,
  )(*inputs.values())
  return call.mixtures(out, lse)


def backward(
  query_QD,
  sources,
  count,
  lse_QT,
  dout_QTD,
  dlse_QT,
  accumulate=None,
  *,
  eps,
  interpret=None,
):
  """Returns the gradients of the queries and of every source.

  With `accumulate`, source gradients are added to those, in their dtype.
  """
  call = _Call(query_QD, sources, count)
  tiles, spans, num_queries = call.tiles, call.spans, call.num_queries
  num_slots, num_tokens = call.num_slots, call.num_tokens
  of_mixtures = {
    "lse": lse_QT.reshape(num_queries, num_tokens).T,
    "dlse": dlse_QT.astype(jnp.float32).reshape(num_queries, num_tokens).T,
    "dout": dout_QTD.reshape(num_queries, num_tokens, tiles.width),
  }
  plan = pallas_gpu_cluster_plan.plan(
    "backward", query_QD, sources, num_tokens, dout_QTD
  )
  if plan is not None and accumulate is None:
    options = of_mixtures | {"eps": eps, "interpret": interpret}
    if plan.streamed:
      pull_TMQ, dsources = pallas_gpu_cluster_streamed.backward(
        call, query_QD, plan, **options
      )
      dquery_QD = _query_gradients(pull_TMQ, call)
    else:
      dquery_QD, dsources = pallas_gpu_cluster.backward(
        call, query_QD, plan, **options
      )
    return dquery_QD, call.gradients(dsources)
  inputs = {"query": query_QD} | of_mixtures | call.inputs
  before = {} if accumulate is None else call.named(accumulate, "before_")
  outputs = {
    f"d{name}": jax.ShapeDtypeStruct(x.shape, x.dtype)
    for name, x in call.named(
      sources if accumulate is None else accumulate
    ).items()
  }
  inputs |= before
  # At first scores, products and inverse norms, then what the names say.
  statistics = (num_slots, num_queries)
  scratch: dict[str, tuple[int, ...]] = {
    "weight": statistics,
    "pull": statistics,
    "bend": statistics,
  }
  sums = (tiles.number, num_queries, tiles.size)
  in_kernel = math.prod(sums) * 4 <= warpgroup.SUMS_BYTES
  if in_kernel:
    scratch["sums"] = sums
    parts = (warpgroup.programs(num_tokens), *sums)
  else:
    parts = (num_tokens, num_slots, num_queries)
  outputs["parts"] = jax.ShapeDtypeStruct(parts, jnp.float32)

  def kernel(*refs):
    ref = dict(zip((*inputs, *outputs, *scratch), refs, strict=True))

    def clear(tile, columns, fresh, carry):
      del columns, fresh
      for first, last in spans:
        at = ref["sums"].at[tile, first:last]
        warpgroup.store(at, tiles.zeros(last - first))
      return carry

    def finish(tile, columns, fresh, carry):
      del columns, fresh
      program = jax.lax.axis_index("program")
      for first, last in spans:
        part = tiles.load(ref["sums"].at[tile, first:last])
        warpgroup.store(ref["parts"].at[program, tile, first:last], part)
      return carry

    if in_kernel:
      tiles.loop(clear, None)
    warpgroup.walk(num_tokens, lambda token: one_token(ref, token))
    if in_kernel:
      tiles.loop(finish, None)

  def one_token(ref, token):
    for first, last in spans:
      visit(ref, token, first, last)
    settle(ref, token)
    write(ref, token)
    call.each_unused(ref, lambda slot: clear_unused(ref, token, slot))

  def visit(ref, token, first, last):
    """Scores, and products of sources and output gradients."""
    rows = last - first

    def group(slots):
      def body(tile, columns, fresh, carry):
        del tile
        query = tiles.load(ref["query"].at[first:last, columns])
        dout = tiles.load(ref["dout"].at[first:last, token, columns])
        totals = []
        for slot, (dots, products, squares) in zip(slots, carry, strict=True):
          source = tiles.load(call.source(ref, slot, token, columns))
          source = warpgroup.keep(source, fresh)
          wide = tiles.down(source, rows)
          totals.append(
            (
              dots + wide * query,
              products + wide * dout,
              squares + source * source,
            )
          )
        return totals

      zeros = (tiles.zeros(rows), tiles.zeros(rows), tiles.zeros())
      carry = tiles.loop(body, [zeros for _ in slots])
      for slot, (dots, products, squares) in zip(slots, carry, strict=True):
        at = (slot, slice(first, last))
        inverse = _inverse_rms(squares, tiles.width, eps)
        score = jnp.sum(dots, axis=1) * inverse
        warpgroup.store(ref["weight"].at[at], score)
        warpgroup.store(ref["pull"].at[at], jnp.sum(products, axis=1))
        inverse = tiles.full_stats(rows, 0.0) + inverse
        warpgroup.store(ref["bend"].at[at], inverse)

    call.each_group(ref, _group(tiles, 2 * rows), group)

  def settle(ref, token):
    """From scores and products to the factors of the second pass."""
    load = lambda name, slot: tiles.load_stats(ref[name].at[slot])
    lse = tiles.load_stats(ref["lse"].at[token])
    dlse = tiles.load_stats(ref["dlse"].at[token])

    def gather(slot, carry):
      total, mean = carry
      weight = jnp.exp(load("weight", slot) - lse)
      return total + weight, mean + weight * load("pull", slot)

    zeros = tiles.full_stats(num_queries, 0.0)
    total, mean = call.each_slot(ref, gather, (zeros, zeros))
    # Large scores may differ from those of the forward pass, which sums in
    # another order: normalise again, so that the weights still sum to one.
    share = 1.0 / total
    shift = dlse - mean * share

    def factors(slot, carry):
      score, inverse = load("weight", slot), load("bend", slot)
      weight = jnp.exp(score - lse) * share
      pull = weight * (load("pull", slot) + shift) * inverse
      bend = pull * score * inverse * (1.0 / tiles.width)
      if num_queries > 1:
        bend = zeros + jnp.sum(bend)
      warpgroup.store(ref["weight"].at[slot], weight)
      warpgroup.store(ref["pull"].at[slot], pull)
      warpgroup.store(ref["bend"].at[slot], bend)
      if not in_kernel:
        warpgroup.store(ref["parts"].at[token, slot], pull)
      return carry

    call.each_slot(ref, factors, None)

  def write(ref, token):
    """The second pass: source gradients, and terms of the query gradients."""

    def body(tile, columns, fresh, carry):
      def group(slots):
        sources, dsources = [], []
        for slot in slots:
          sources.append(tiles.load(call.source(ref, slot, token, columns)))
          bent = sources[-1] * ref["bend"][slot, 0]
          dsources.append(start(ref, token, slot, columns) - bent)
        for first, last in spans:
          rows = last - first
          # Mosaic GPU infers no layout for a sum over one row of a matrix.
          single = rows == 1
          picked = first if single else slice(first, last)
          query = tiles.load(ref["query"].at[picked, columns])
          dout = tiles.load(ref["dout"].at[picked, token, columns])
          dquery = tiles.zeros(rows)
          for i, slot in enumerate(slots):
            at = (slot, slice(first, last))
            pull = tiles.across(tiles.load_stats(ref["pull"].at[at]))
            if single:
              dsources[i] += ref["weight"][slot, first] * dout
              dsources[i] += ref["pull"][slot, first] * query
            else:
              weight = tiles.across(tiles.load_stats(ref["weight"].at[at]))
              dsources[i] += jnp.sum(weight * dout + pull * query, axis=0)
            source = warpgroup.keep(sources[i], fresh)
            dquery += pull * tiles.down(source, rows)
          if in_kernel:
            at = ref["sums"].at[tile, first:last]
            warpgroup.store(at, tiles.load(at) + dquery)
        for slot, dsource in zip(slots, dsources, strict=True):
          at = call.source(ref, slot, token, columns, "d")
          warpgroup.store(at, dsource)

      call.each_group(ref, _ROWS, group)
      return carry

    tiles.loop(body, None)

  def clear_unused(ref, token, slot):
    if not in_kernel:
      zeros = tiles.full_stats(num_queries, 0.0)
      warpgroup.store(ref["parts"].at[token, slot], zeros)

    def body(tile, columns, fresh, carry):
      del tile, fresh
      at = call.source(ref, slot, token, columns, "d")
      warpgroup.store(at, start(ref, token, slot, columns))
      return carry

    tiles.loop(body, None)

  def start(ref, token, slot, columns):
    if not before:
      return tiles.zeros()
    return tiles.load(call.source(ref, slot, token, columns, "before_"))

  *dsources, parts = warpgroup.call(
    kernel,
    "depth_attention_backward",
    out_type=list(outputs.values()),
    grid=warpgroup.programs(num_tokens),
    scratch_types=[warpgroup.shared(shape) for shape in scratch.values()],
    interpret=interpret,
  )(*inputs.values())
  if in_kernel:
    dquery_QD = tiles.join(jnp.moveaxis(parts.sum(axis=0), 1, 0))
  else:
    dquery_QD = _query_gradients(parts, call)
  return dquery_QD, call.gradients(dsources)


def _query_gradients(pull_TMQ, call):
  """Products of the pulls with the sources, one per source."""
  total = jnp.zeros((call.num_queries, call.tiles.width), jnp.float32)
  for slot in range(call.num_slots):
    source_TD = call.array(slot).astype(jnp.float32)
    if "count" in call.inputs:
      # An unused slot may hold NaN, and zero times NaN is not zero.
      source_TD = jnp.where(slot < call.inputs["count"][0], source_TD, 0)
    total += jnp.einsum(
      "tq,td->qd",
      pull_TMQ[:, slot],
      source_TD,
      precision=jax.lax.Precision.HIGHEST,
    )
  return total


class _Call:
  """The sources of one call, as arrays outside and as refs in a kernel."""

  def __init__(self, query_QD, sources, count):
    self.num_queries, width = query_QD.shape
    self.tiles = warpgroup.Tiles(width)
    self.num_slots = len(sources)
    self.tokens_shape = sources[0].shape[:-1]
    self.num_tokens = math.prod(self.tokens_shape)
    self.bank = not isinstance(sources, tuple)
    self.inputs = self.named(sources)
    if count is not None:
      self.inputs["count"] = jnp.reshape(count, (1,))
    # Equal shares of at most `_ROWS` queries.
    rows = -(-self.num_queries // -(-self.num_queries // _ROWS))
    starts = range(0, self.num_queries, rows)
    self.spans = [(i, min(i + rows, self.num_queries)) for i in starts]

  def named(self, sources, prefix=""):
    """The operands of a kernel for arrays like the sources."""
    if self.bank:
      shape = (self.num_slots, self.num_tokens, self.tiles.width)
      return {f"{prefix}bank": sources.reshape(shape)}
    return {
      f"{prefix}source{i}": warpgroup.flatten(x) for i, x in enumerate(sources)
    }

  def mixtures(self, out_QTD, lse_TQ):
    """Results of the forward pass, with the axes of tokens of the sources."""
    return (
      out_QTD.reshape((self.num_queries, *self.tokens_shape, self.tiles.width)),
      lse_TQ.T.reshape((self.num_queries, *self.tokens_shape)),
    )

  def gradients(self, dsources):
    """Source gradients in the structure of the sources."""
    shape = (*self.tokens_shape, self.tiles.width)
    if self.bank:
      return dsources[0].reshape((self.num_slots, *shape))
    return tuple(x.reshape(shape) for x in dsources)

  def array(self, slot):
    if self.bank:
      return self.inputs["bank"][slot]
    return self.inputs[f"source{slot}"]

  def source(self, ref, slot, token, columns, prefix=""):
    """A tile of a source, or of an array that belongs to it under another
    prefix.
    """
    if self.bank:
      return ref[f"{prefix}bank"].at[slot, token, columns]
    return ref[f"{prefix}source{slot}"].at[token, columns]

  def each_group(self, ref, size, body):
    """Calls body(slots) for groups of slots."""
    if not self.bank:
      for start in range(0, self.num_slots, size):
        body(range(start, min(start + size, self.num_slots)))
      return
    stop = self._stop(ref)
    full = stop // size

    def group(i, carry):
      body([i * size + j for j in range(size)])
      return carry

    def single(slot, carry):
      body([slot])
      return carry

    jax.lax.fori_loop(0, full, group, None)
    jax.lax.fori_loop(full * size, stop, single, None)

  def each_source(self, ref, body, carry):
    """Folds body(slot, carry) over slots that may be names of arrays."""
    if self.bank:
      return self.each_slot(ref, body, carry)
    for slot in range(self.num_slots):
      carry = body(slot, carry)
    return carry

  def each_slot(self, ref, body, carry):
    """Folds body(slot, carry) over slots known at run time."""
    return jax.lax.fori_loop(0, self._stop(ref), body, carry)

  def each_unused(self, ref, body):
    """Calls body(slot) for the unused slots of a bank."""
    if "count" in ref:
      jax.lax.fori_loop(
        self._stop(ref), self.num_slots, lambda slot, carry: body(slot), None
      )

  def _stop(self, ref):
    return ref["count"][0] if "count" in ref else self.num_slots


def _group(tiles, rows):
  """Sources whose partial sums fit the registers together."""
  return max(1, _REGISTERS // (rows * tiles.vector))


def _inverse_rms(squares, width, eps):
  return jax.lax.rsqrt(jnp.sum(squares) * (1.0 / width) + eps)

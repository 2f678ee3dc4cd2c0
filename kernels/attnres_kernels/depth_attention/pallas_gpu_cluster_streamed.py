# SPDX-License-Identifier: Apache-2.0
"""The backward pass on clusters, for more than eight queries.

As in `pallas_gpu_cluster`, but there is no room for the output gradients. Only
the sources stay in shared memory. Both passes go through chunks of columns and,
for each, through the queries, eight at a time; their output gradients and terms
come in turns through two buffers. So output gradients are read twice, the
second time from a cache if it keeps those of the tokens in flight (44 MB in
Kimi K3). Source gradients take the place of the sources, chunk by chunk.
"""

import functools

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from attnres_kernels import warpgroup
from attnres_kernels.depth_attention import pallas_gpu_cluster_shared as shared

_plgpu = warpgroup._plgpu
# Rows of the terms of a span that are not zero.
_TERM_ROWS = 32


def backward(call, query_QD, plan, *, lse, dlse, dout, eps, interpret=None):
  """Returns pulls [T, M, Q], and source gradients like `call.inputs`.

  Query gradients are sums over tokens of pull times source. The arguments are
  those of `pallas_gpu_cluster.backward`.
  """
  kernel = shared.Kernel(call, plan, eps)
  spans, chunks, num_queries = plan.spans, plan.chunks, call.num_queries
  inputs, gradients, exchanged = kernel.backward(
    _terms(query_QD, plan), lse, dlse, dout
  )
  factors = (kernel.groups, shared.ROWS, plan.queries)
  outputs = gradients | {"factors": shared.struct(factors)} | exchanged

  def one_group(ref, group, following):
    sums(ref, group)
    settle(ref, group)

    def chunk(i):
      write(ref, group, i)

      # The copies of the chunk before have read it.
      @pl.when(i > 0)
      def _():
        wait(plan.slots)
        following(i - 1)

    kernel.each_chunk(chunk)
    wait(0)
    following(chunks - 1)

  def wait(number):
    shared.one_warp(
      lambda: _plgpu.wait_smem_to_gmem(number, wait_read_only=True)
    )

  def buffer(second, i, span):
    return jax.lax.rem((second * chunks + i) * spans + span, 2)

  def stream(ref, group, second, i, span):
    """Starts the copies of a span of queries."""
    at = buffer(second, i, span)
    barrier = ref["queries"].at[at]

    def copy(q):
      source = ref["dout_in"].at[
        8 * span + q, kernel.tokens(group), kernel.at(i)
      ]
      rows = pl.ds(8 * q, shared.TOKENS)
      _plgpu.copy_gmem_to_smem(source, ref["dout"].at[at, rows], barrier)

    for q in range(8):
      if q < num_queries - 8 * (spans - 1):
        copy(q)
        continue
      # Not in the last span.
      pl.when(span >= spans - 1)(lambda: _plgpu.barrier_arrive(barrier))
      pl.when(span < spans - 1)(functools.partial(copy, q))
    rows = pl.ds(_TERM_ROWS * span, _TERM_ROWS)
    _plgpu.copy_gmem_to_smem(
      ref["query_terms"].at[rows, kernel.at(i)],
      ref["query"].at[at, pl.ds(0, _TERM_ROWS)],
      barrier,
    )

  def next_but_one(ref, group, second, i, span):
    """Refills the buffers that were used just now."""
    step = span + 2
    i, span = i + jax.lax.div(step, spans), jax.lax.rem(step, spans)
    end = i >= chunks
    i = jnp.where(end, i - chunks, i)
    if second:
      group = jnp.where(end, group + kernel.clusters, group)
      second = 1 - end.astype(jnp.int32)
      go = group < kernel.groups
    else:
      second = end.astype(jnp.int32)
      go = True

    def copies():
      pl.when(go)(lambda: stream(ref, group, second, i, span))

    shared.one_warp(copies)

  def each_span(body):
    def one(span, carry):
      body(span)
      return carry

    jax.lax.fori_loop(0, spans, one, None)

  def sums(ref, group):
    """The first pass, as in `Kernel.sums`."""

    def body(scores, products, i, squares):
      _plgpu.barrier_wait(ref["arrived"].at[i])
      source = ref["source"].at[i]
      for span in range(spans):
        at = buffer(0, i, span)
        _plgpu.barrier_wait(ref["queries"].at[at])
        terms = ref["query"].at[at, pl.ds(0, 8 * plan.terms)]
        _plgpu.wgmma(scores[span], source, terms.T)
        _plgpu.wgmma(products[span], source, ref["dout"].at[at].T)
        if span == 0:
          squares = shared.add_squares(squares, source)
        _plgpu.wgmma_wait(0)
        next_but_one(ref, group, 0, i, span)
      return squares

    def run(*totals):
      scores, products = totals[:spans], totals[spans:]
      squares = jax.lax.fori_loop(
        0,
        chunks,
        functools.partial(body, scores, products),
        shared.zeros(8),
      )
      at = group, kernel.part(), 0
      shared.store(ref["squares"].at[at], jnp.sum(squares, axis=1))
      for span in range(spans):
        columns = pl.ds(8 * span, 8)
        dots = kernel.sum_of_terms(scores[span][...])
        shared.store(ref["scores"].at[(*at, slice(None), columns)], dots)
        kernel.store_products(ref, at, products[span][...], span)

    totals = [shared.accumulator(8 * plan.terms)] * spans
    totals += [shared.accumulator(shared.ROWS)] * spans
    pl.run_scoped(run, *totals)
    kernel.exchange(ref)

  def settle(ref, group):
    inverse = kernel.inverse_rms(ref, group)
    none = jnp.zeros((shared.ROWS,), jnp.float32)
    shared.store(ref["bend"], _plgpu.layout_cast(none, shared.rows()))

    def one(span):
      columns = pl.ds(8 * span, 8)
      found = kernel.factors(ref, group, columns, inverse)
      for slot, (weight, pull, bend) in enumerate(found):
        rows = pl.ds(slot * shared.TOKENS, shared.TOKENS)
        shared.store(ref["weights"].at[:, rows].T, weight)
        shared.store(ref["pulls"].at[rows], pull)
        bend += shared.load(ref["bend"].at[rows], shared.square().reduce(1))
        shared.store(ref["bend"].at[rows], bend)
      # A buffer has output gradients of other spans behind the last query.
      shared.spread_weights(
        ref["weight"].at[span], ref["weights"], num_queries - 8 * span
      )
      pull = shared.load(ref["pulls"], shared.matrix())
      pull *= shared.across(inverse[0], 8)
      shared.spread_pulls(ref["pull"].at[span], pull)

      @pl.when(kernel.part() == 0)
      def _():
        shared.store(ref["factors"].at[group, :, columns], pull)

    each_span(one)
    bend = shared.load(ref["bend"], shared.rows())
    bend *= inverse[0] * inverse[0] * (1.0 / plan.width)
    shared.store(ref["bend"], bend)
    _plgpu.commit_smem()

  def write(ref, group, i):
    """Source gradients, in the place of the sources."""

    def product(total):
      def one(span):
        at = buffer(1, i, span)
        _plgpu.barrier_wait(ref["queries"].at[at])
        for term in range(2):
          weight = ref["weight"].at[span, term]
          _plgpu.wgmma(total, weight, ref["dout"].at[at])
        _plgpu.wgmma(total, ref["pull"].at[span], ref["query"].at[at])
        _plgpu.wgmma_wait(0)
        next_but_one(ref, group, 1, i, span)

      each_span(one)
      return total[...]

    result = pl.run_scoped(product, shared.accumulator(shared.COLUMNS))
    source = ref["source"].at[i]
    bend = shared.across(
      shared.load(ref["bend"], shared.rows()), shared.COLUMNS
    )
    held = _plgpu.load(source, layout=shared.matrix()).astype(jnp.float32)
    _plgpu.store(source, (result - bend * held).astype(jnp.bfloat16))
    _plgpu.commit_smem()

    def copies():
      for slot in range(plan.slots):
        rows = pl.ds(slot * shared.TOKENS, shared.TOKENS)
        to = call.source(ref, slot, kernel.tokens(group), kernel.at(i), "d")
        _plgpu.copy_smem_to_gmem(ref["source"].at[i, rows], to)

    shared.one_warp(copies)

  def start(ref):
    shared.clear_factors(ref["weights"], ref["pulls"])
    none = shared.zeros(shared.COLUMNS).astype(jnp.bfloat16)
    for at in range(2):
      _plgpu.store(ref["query"].at[at], none)
      _plgpu.store(ref["dout"].at[at], none)
    _plgpu.commit_smem()
    cluster = jax.lax.axis_index("program")

    def copies():
      for step in range(2):
        stream(ref, cluster, 0, step // spans, step % spans)

    shared.one_warp(copies)

  results = kernel.run(
    "depth_attention_backward",
    inputs,
    outputs,
    one_group,
    start=start,
    interpret=interpret,
  )
  factors = results["factors"].reshape(
    kernel.groups, 8, shared.TOKENS, plan.queries
  )
  pull_TMQ = jnp.swapaxes(factors, 1, 2).reshape(-1, 8, plan.queries)
  return (
    pull_TMQ[:, : plan.slots, :num_queries],
    [results[name] for name in gradients],
  )


def _terms(query_QD, plan):
  """Three terms of each span of queries, and the first once more."""
  missing = plan.queries - query_QD.shape[0]
  query_QD = jnp.pad(query_QD, ((0, missing), (0, 0)))
  spans = query_QD.reshape(plan.spans, 8, -1)
  terms = jax.vmap(lambda span: shared.terms(span, plan)[:_TERM_ROWS])(spans)
  return terms.reshape(plan.spans * _TERM_ROWS, -1)

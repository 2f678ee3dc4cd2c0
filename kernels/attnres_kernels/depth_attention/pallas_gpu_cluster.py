# SPDX-License-Identifier: Apache-2.0
"""Depth attention on the matrix unit of Nvidia GPUs (Hopper), by clusters.

A cluster of thread blocks processes eight tokens at a time. Each block holds a
share of the columns of all their sources in shared memory, where bulk copies
put them; so a source is read from memory once and no cache has to keep it. Both
passes over the sources are matrix products, with one row per source and token:

  scores[(m, t), q]  = sources[(m, t), d] . query[q, d]
  out[(q, t), d]     = weights[(q, t), (m, t')] . sources[(m, t'), d]

The weights of the second are zero off the token diagonal (t = t'): the matrix
unit has throughput to spare, and instructions bind otherwise
(benchmarks/gpu_static.py). Backward, the same holds for products of sources and
output gradients, for source gradients and for query gradients. Float32 factors
are sums of bfloat16 terms: two for weights (16 bits), three for queries, or two
where three do not fit (24 queries of width 7168).

Between the passes the blocks of a cluster add up their shares of the scores:
each writes them to memory (one to eight percent of all bytes), and reads those
of the others after a barrier. Eight rows are the least that a bulk copy can put
where the matrix unit reads them, so the tokens must be a multiple of eight.

Copies for the next eight tokens start as soon as the second pass has finished
with a chunk of columns. Blocks loop over tokens, so that queries are loaded
once, and query gradients are added up in shared memory, in a fixed order. With
more than eight queries, `pallas_gpu_cluster_streamed` has the backward pass.

Never executed on a GPU, like `pallas_gpu`.
"""

import functools
import operator

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from attnres_kernels import warpgroup
from attnres_kernels.depth_attention import pallas_gpu_cluster_shared as shared

_plgpu = warpgroup._plgpu


def forward(call, query_QD, plan, *, eps, interpret=None):
  """Returns mixtures [Q, T, D] and log-normalisers [T, Q]."""
  kernel = shared.Kernel(call, plan, eps)
  num_queries = call.num_queries
  inputs = {"query_terms": shared.terms(query_QD, plan)} | call.inputs
  outputs = {
    "out": shared.struct(
      (num_queries, call.num_tokens, plan.width), jnp.bfloat16
    ),
    "lse": shared.struct((call.num_tokens, plan.queries)),
  } | kernel.exchanged("scores", "squares")

  def one_group(ref, group, following):
    kernel.sums(ref, group)
    inverse = kernel.inverse_rms(ref, group)
    for span in range(plan.spans):
      weigh(ref, group, span, inverse)
      # The next sources replace these behind the last use of a chunk.
      after = following if span == plan.spans - 1 else None
      kernel.each_chunk(functools.partial(mix, ref, group, span, after))

  def weigh(ref, group, span, inverse):
    columns = pl.ds(8 * span, 8)
    scores = kernel.scores(ref, group, columns, inverse)
    top = functools.reduce(jnp.maximum, scores)
    # With no source at all, the log-normaliser is -inf and the mixture zero.
    level = jnp.where(top > -jnp.inf, top, 0.0)
    weights = [jnp.exp(score - level) for score in scores]
    total = functools.reduce(operator.add, weights)

    @pl.when(kernel.part() == 0)
    def _():
      tokens = pl.ds(group * shared.TOKENS, shared.TOKENS)
      shared.store(ref["lse"].at[tokens, columns], level + jnp.log(total))

    share = jnp.where(total > 0.0, 1.0 / total, 0.0)
    for window in range(len(plan.starts)):
      for slot in kernel.slots_of(window):
        at = ref["slots"].at[plan.place(slot)[1] // shared.TOKENS]
        shared.store(at.T, weights[slot] * share)
      # From one row per query to one per query and token.
      layout = _plgpu.Layout.WG_STRIDED((8, 8, shared.TOKENS), 4)
      flat = _plgpu.load(ref["slots"], layout=layout, optimized=False)
      shared.store(ref["flat"], flat.reshape(8, shared.ROWS))
      fresh = {plan.place(slot)[1] // 8 for slot in kernel.slots_of(window)}
      blocks = [
        shared.on_diagonal(shared.load(ref["flat"].at[j], shared.rows()))
        if j in fresh
        else shared.zeros(8)
        for j in range(8)
      ]
      high, low = shared.high_and_low(jnp.concatenate(blocks, axis=1))
      _plgpu.store(ref["weight"].at[window, 0], high)
      _plgpu.store(ref["weight"].at[window, 1], low)
    _plgpu.commit_smem()

  def mix(ref, group, span, following, i):
    def product(total):
      for window, start in enumerate(plan.starts):
        source = ref["source"].at[i, pl.ds(start, shared.ROWS)]
        for term in range(2):
          _plgpu.wgmma(total, ref["weight"].at[window, term], source)
      return total[...]

    mixed = pl.run_scoped(product, shared.accumulator(shared.COLUMNS))
    if following is not None:
      following(i)
    kernel.write(
      ref,
      mixed,
      [
        (8 * q, ref["out"].at[8 * span + q, kernel.tokens(group), kernel.at(i)])
        for q in range(min(8, num_queries - 8 * span))
      ],
    )

  results = kernel.run(
    "depth_attention_forward", inputs, outputs, one_group, interpret=interpret
  )
  return results["out"], results["lse"][:, :num_queries]


def backward(call, query_QD, plan, *, lse, dlse, dout, eps, interpret=None):
  """Returns query gradients and those of the sources, like `call.inputs`.

  Args:
    call: the sources.
    query_QD: queries.
    plan: as `plan` returns it.
    lse: log-normalisers [T, Q].
    dlse: their cotangents [T, Q].
    dout: cotangents of the mixtures [Q, T, D].
    eps: as in `depth_attention`.
    interpret: as in `depth_attention`.
  """
  kernel = shared.Kernel(call, plan, eps)
  num_queries, chunks = call.num_queries, plan.chunks
  clusters = kernel.clusters
  inputs, gradients, exchanged = kernel.backward(
    shared.terms(query_QD, plan), lse, dlse, dout
  )
  parts = (clusters, plan.parts * chunks, shared.COLUMNS, 8)
  outputs = gradients | {"parts": shared.struct(parts)} | exchanged

  def one_group(ref, group, following):
    kernel.sums(ref, group, "dout")
    settle(ref, group)
    kernel.each_chunk(lambda i: write(ref, group, i, following))

  def settle(ref, group):
    """From scores and products to the factors of the second pass."""
    inverse = kernel.inverse_rms(ref, group)
    factors = kernel.factors(ref, group, pl.ds(0, 8), inverse)
    for slot, (weight, pull, bend) in enumerate(factors):
      window, row = plan.place(slot)
      rows = pl.ds(row, shared.TOKENS)
      shared.store(ref["weights"].at[window, :, rows].T, weight)
      shared.store(ref["pulls"].at[window, rows], pull)
      shared.store(ref["bend"].at[window, rows], bend)
    for window in range(len(plan.starts)):
      shared.spread_weights(
        ref["weight"].at[window], ref["weights"].at[window], num_queries
      )
      pull = shared.load(ref["pulls"].at[window], shared.matrix())
      pull *= shared.across(inverse[window], 8)
      shared.spread_pulls(ref["pull"].at[window], pull)
      bend = shared.load(ref["bend"].at[window], shared.rows())
      bend *= inverse[window] * inverse[window] * (1.0 / plan.width)
      shared.store(ref["bend"].at[window], bend)
    _plgpu.commit_smem()

  def write(ref, group, i, following):
    """Source gradients, and terms of the query gradients."""

    def gradient(window):
      source = ref["source"].at[i, pl.ds(plan.starts[window], shared.ROWS)]

      def product(total):
        for term in range(2):
          weight = ref["weight"].at[window, term]
          _plgpu.wgmma(total, weight, ref["dout"].at[i])
        _plgpu.wgmma(total, ref["pull"].at[window], ref["query"].at[i])
        return total[...]

      result = pl.run_scoped(product, shared.accumulator(shared.COLUMNS))
      bend = shared.across(
        shared.load(ref["bend"].at[window], shared.rows()), shared.COLUMNS
      )
      source = _plgpu.load(source, layout=shared.matrix()).astype(jnp.float32)
      kernel.write(
        ref,
        result - bend * source,
        [
          (
            plan.place(slot)[1],
            call.source(ref, slot, kernel.tokens(group), kernel.at(i), "d"),
          )
          for slot in kernel.slots_of(window)
        ],
      )

    for window in range(len(plan.starts)):
      gradient(window)

    def product(total):
      for window, start in enumerate(plan.starts):
        source = ref["source"].at[i, pl.ds(start, shared.ROWS)]
        _plgpu.wgmma(total, source.T, ref["pull"].at[window])
      return total[...]

    dquery = pl.run_scoped(product, shared.accumulator(shared.ROWS))
    following(i)
    # The products with the high and with the low terms.
    dquery = dquery[:, :8] + dquery[:, 24:32]
    at = ref["sums"].at[i]
    shared.store(at, shared.load(at, shared.matrix()) + dquery)

  def clear(ref):
    for window in range(len(plan.starts)):
      # Rows of slots that belong to another window stay zero.
      shared.clear_factors(ref["weights"].at[window], ref["pulls"].at[window])
    kernel.each_chunk(
      lambda i: shared.store(ref["sums"].at[i], shared.zeros(8))
    )

  def finish(ref):
    cluster = jax.lax.axis_index("program")

    def one(i):
      at = ref["parts"].at[cluster, kernel.part() * chunks + i]
      shared.store(at, shared.load(ref["sums"].at[i], shared.matrix()))

    kernel.each_chunk(one)

  results = kernel.run(
    "depth_attention_backward",
    inputs,
    outputs,
    one_group,
    start=clear,
    finish=finish,
    interpret=interpret,
  )
  dquery_DQ = results["parts"].sum(axis=0).reshape(-1, 8)
  dquery_QD = dquery_DQ[: plan.width, :num_queries].T
  return dquery_QD, [results[name] for name in gradients]

# SPDX-License-Identifier: Apache-2.0
"""Attention over depth: queries, both phases, sharding and costs.

Schemes that attend over depth read as in `definition`, one read at a time, or
in two phases (Alg. 1): `phase_1` answers all queries of a block over the
completed sources in one pass, and `merge` adds the open source. These are
operators of `attnres_kernels`, which run on each device's own tokens, since
every token attends over its own depth.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.common import scopes
from attnres_jax.common import sharding
from attnres_jax.models import layer_stacks
from attnres_jax.models import linear
from attnres_jax.models import norm as norm_lib
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import definition
import attnres_kernels


class Bank(NamedTuple):
  """Sources as rows of one array, in a scan over blocks.

  Attributes:
    rows_MBTD: the array.
    count: how many rows are sources, a number known at run time only.
  """

  rows_MBTD: jax.Array
  count: jax.Array


Sources = Sequence[jax.Array] | Bank


class Slot(NamedTuple):
  """The inputs of one sublayer's phase 2: its query and phase-1 results.

  An `lse_BT` of +inf means that the open source has no weight, whatever it
  contains. The first sublayer of a block then reads as in Eq. 6, without a
  special case in the loop. Several heads are a last axis of `lse_BT`.

  Attributes:
    query_D: folded; [R] for low-rank keys.
    out_BTD: the mixture of the sources so far.
    lse_BT: its log-normaliser.
    value: the same for a mixer's values, if their read is another one.
    scale: float32 factor of the mixture, or None.
  """

  query_D: jax.Array
  out_BTD: jax.Array
  lse_BT: jax.Array
  value: "Slot | None" = None
  scale: jax.Array | None = None

  def without_open_source(self) -> "Slot":
    """Slots of several sublayers, of which the first has no open source."""
    value = self.value and self.value.without_open_source()
    return self._replace(lse_BT=self.lse_BT.at[0].set(jnp.inf), value=value)


class DepthQueries(nnx.Module):
  """Pseudo-queries and key-norm gains of the L sublayers and of the readout.

  With zero queries and unit gains, every softmax starts uniform
  (arXiv:2603.15031 section 5: zero is crucial). The first sublayer has one
  source, so its row gets no gradient; it is kept for uniform shapes. Mixers
  are every second sublayer, from the first; only they have value queries.
  """

  def __init__(
    self,
    config: config_lib.ModelConfig,
    options: config_lib.DepthReadConfig,
    *,
    num_reads: int,
    most_sources: int,
    rngs: nnx.Rngs,
    scales: tuple[int, ...] | None = None,
  ):
    """For L reads, or L + 1 with one at the output.

    `most_sources` is of the read that has the most, and `scales` are factors of
    the mixtures, one for each read.
    """
    width = config.width
    key_width, letter = (options.rank, "R") if options.rank else (width, "D")
    axes, shape = {
      "learned": (f"L{letter}", (key_width,)),
      "input": (f"LD{letter}", (width, key_width)),
      "static": ("LM", (most_sources,)),
    }[options.query]
    keyed = options.key_norm and not options.rank and options.query != "static"

    # No decay: it would pull every softmax back to uniform.
    parameter = functools.partial(base.parameter, decays=False)

    def queries(count: int) -> nnx.Param:
      if not options.query_init:
        return parameter(axes, 0, count, *shape)
      drawn = jax.random.normal(rngs.params(), (count, *shape), jnp.float32)
      return parameter(axes, options.query_init * drawn)

    self.width, self.scale = width, options.logit_scale
    self.scales = scales
    self.has_null = options.null != "none"
    self.query = queries(num_reads)
    self.gain = parameter("LD", 1, num_reads, width) if keyed else None
    num_mixers = -(-config.num_sublayers // 2)
    self.value_query = queries(num_mixers) if options.value_query else None
    learned = options.null == "learned"
    self.null = parameter("LD", 0, num_reads, width) if learned else None

  def reads(self, start: int, stop: int) -> definition.Read:
    """The parameters of reads start..stop-1 (from 0), stacked."""
    reads = self._reads(start, stop)
    if self.value_query is None:
      return reads
    # An MLP has its only query twice, for uniform shapes.
    rows = [
      self.query[l] if l % 2 else self.value_query[l // 2]
      for l in range(start, stop)
    ]
    values = self._fold(jnp.stack(rows), start, stop)
    return reads._replace(value=reads._replace(query=values))

  def single(self, l: int) -> definition.Read:
    """The parameters of read l (from 0), for anything but a mixer's values."""
    return layer_stacks.single(self._reads(l, l + 1))

  def _reads(self, start: int, stop: int) -> definition.Read:
    query = self._fold(self.query[start:stop], start, stop)
    reads = definition.Read(query, self._nulls(start, stop))
    if self.scales is None:
      return reads
    return reads._replace(scale=jnp.float32(self.scales[start:stop]))

  def _fold(self, query: jax.Array, start: int, stop: int) -> jax.Array:
    """u_l = w_l * g_l, [Q, D] float32."""
    if self.gain is not None:
      gain_QD = self.gain[start:stop]
      if query.ndim > gain_QD.ndim:
        gain_QD = gain_QD[:, None, :]
      query = query * gain_QD
    return query if self.scale == 1 else query * self.scale

  def _nulls(self, start: int, stop: int) -> jax.Array | None:
    if self.null is not None:
      return self.null[start:stop]
    if not self.has_null:
      return None
    return jnp.zeros((stop - start, self.width), jnp.float32)


class DepthAttention(base.Residual):
  """Shared by schemes that attend over depth: queries, and how they read.

  Attributes:
    eps: added to the mean square of a source before it is scored.
    options: of the reads.
    queries: of the L sublayers and, if it attends, of the readout.
    attends_last: whether the readout does.
  """

  Options = config_lib.DepthAttentionConfig
  attends_last = True

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.eps = config.norm_eps
    self.scannable = False
    options = config.residual.effective_read
    self.options = checked(options, config.width)
    self.form = config.residual.form if options.batched else "one_softmax"
    self.queries = DepthQueries(
      config,
      self.options,
      num_reads=self.num_sublayers + self.attends_last,
      most_sources=1 + -(-self.num_sublayers // (self.block_size or 1)),
      rngs=rngs,
      scales=self._scales(config.residual.name),
    )

  def _scales(self, name: str) -> tuple[int, ...] | None:
    """How many sources each read sees, if that number is its factor."""
    if self.options.scale == "mean":
      return None
    labels = self.source_labels()
    if not self.attends_last or labels is None:
      config_lib.fail(
        "model.residual.read.scale",
        self.options.scale,
        f"'mean' with model.residual.name={name!r}",
      )
    most = 1 + self.options.window if self.options.window else None
    return tuple(len(sources[:most]) for sources in labels)

  @property
  def two_phase(self) -> bool:
    """Whether the queries of a segment are answered together.

    Otherwise each read is computed by itself, as in the definition. So it is
    while coefficients are fixed.
    """
    return self.form == "two_phase" and not base.coefficients_are_fixed()

  def attend(
    self, read: definition.Read, sources: tuple[jax.Array, ...]
  ) -> jax.Array | base.QKV:
    """The mixture of one read; a single source is returned as is."""
    if len(sources) == 1 and self.options.sums_to_one:
      return sources[0]
    if not self.two_phase:
      return each(read, lambda part: self._defined(part, sources))
    slots = self.phase_1(jax.tree.map(lambda a: a[None], read), sources)
    return each(layer_stacks.single(slots), mixture_of)

  def attend_last(self, sources: tuple[jax.Array, ...]) -> jax.Array:
    """The readout: the mixture with its own query."""
    read = self.queries.single(self.num_sublayers)
    return base.query_input(self.attend(read, sources))

  def phase_1(self, reads: definition.Read, sources: Sources) -> Slot:
    """Slots of stacked reads, from one pass over the sources."""
    query_QD = reads.query
    if reads.value is not None:
      query_QD = jnp.concatenate([query_QD, reads.value.query])
    if isinstance(sources, Bank):
      run = functools.partial(self._phase_1_of_bank, query_QD)
      # Kept for the backward pass: the rows, which are kept in any case.
      return self._slots(reads, *jax.checkpoint(run)(sources))
    mixtures = depth_attention(
      query_QD, sources, eps=self.eps, heads=self._heads, rank=self._rank
    )
    return self._slots(reads, *mixtures)

  def _phase_1_of_bank(
    self, query_QD: jax.Array, bank: Bank
  ) -> tuple[jax.Array, jax.Array]:
    """The definition, of the first rows of an array."""
    rows_MBTD, count = bank
    plain = dataclasses.replace(self.options, null="none")
    valid_M111 = jnp.arange(len(rows_MBTD))[:, None, None, None] < count

    def attend(query_D: jax.Array) -> tuple[jax.Array, jax.Array]:
      scores_MBTH = definition.score(plain, query_D, rows_MBTD, self.eps)
      scores_MBTH = jnp.where(valid_M111, scores_MBTH, -jnp.inf)
      weights_MBTD = definition.spread(
        definition.weigh(plain, scores_MBTH), rows_MBTD
      )
      out_BTD = jnp.sum(weights_MBTD * precision.widen(rows_MBTD), axis=0)
      lse_BTH = jax.nn.logsumexp(scores_MBTH, axis=0)
      if self._heads is None:
        lse_BTH = jnp.squeeze(lse_BTH, -1)
      return out_BTD.astype(rows_MBTD.dtype), lse_BTH

    outs, lses = zip(*map(attend, query_QD))
    return jnp.stack(outs), jnp.stack(lses)

  def _slots(
    self, reads: definition.Read, out_QBTD: jax.Array, lse_QBT: jax.Array
  ) -> Slot:
    """Slots of stacked reads; mixtures for values come last."""
    if reads.value is not None:
      count = reads.query.shape[0]
      inputs, value = layer_stacks.split((out_QBTD, lse_QBT), [count, count])
      slots = self._slots(reads._replace(value=None), *inputs)
      return slots._replace(value=self._slots(reads.value, *value))
    if reads.null_D is not None:
      null_Q11D = reads.null_D[:, None, None].astype(out_QBTD.dtype)
      out_QBTD, lse_QBT = attnres_kernels.combine_mixtures(
        out_QBTD,
        lse_QBT,
        jnp.broadcast_to(null_Q11D, out_QBTD.shape),
        self._null_logits(reads.query, null_Q11D, lse_QBT.shape),
      )
    return Slot(reads.query, out_QBTD, lse_QBT, scale=reads.scale)

  def merge(
    self, slot: Slot, open_BTD: jax.Array, norm: base.Norm
  ) -> jax.Array | base.QKV:
    """norm(the mixture with the open source as one more source).

    One pass over memory, if the norm is ours and mixtures are not scaled.
    """

    def merged(part: Slot) -> jax.Array:
      merge = functools.partial(
        depth_merge, part, open_BTD, eps=self.eps, rank=self._rank
      )
      if part.scale is None:
        return merge(norm)
      # The factor is one more number per read, which no kernel has: without
      # it, eps of the norm would have to be divided by its square.
      h_BTD = merge(norm_lib.Identity())
      wide_BTD = scaled(precision.widen(h_BTD), part.scale)
      return norm(wide_BTD).astype(h_BTD.dtype)

    return each(slot, merged)

  def merge_several(
    self, slot: Slot, sources: tuple[jax.Array, ...], norm: base.Norm
  ) -> jax.Array | base.QKV:
    """norm(the mixture with several more sources), as in `merge`."""
    ours = type(norm) is norm_lib.RMSNorm and slot.scale is None
    if ours and attnres_kernels.merges_several(
      slot.out_BTD, slot.lse_BT, slot.query_D, sources, rank=self._rank
    ):
      merge = functools.partial(depth_merge, eps=self.eps, rank=self._rank)
      return each(slot, lambda part: merge(part, sources, norm))

    def merged(part: Slot) -> jax.Array:
      out_QBTD, lse_QBT = depth_attention(
        part.query_D[None], sources,
        eps=self.eps, heads=self._heads, rank=self._rank,
      )  # fmt: skip
      merged_BTD, _ = attnres_kernels.combine_mixtures(
        part.out_BTD, part.lse_BT, out_QBTD[0], lse_QBT[0]
      )
      return scaled(merged_BTD, part.scale)

    return base.normed(each(slot, merged), norm)

  def mean_weights(
    self, read: definition.Read, sources: Sequence[jax.Array]
  ) -> jax.Array:
    """For `depth_weights`: [M, B, T], the mean over heads, without the null.

    A source outside the window has weight 0.
    """
    weights_MBTH = definition.weights(self.options, read, sources, self.eps)
    if read.null_D is not None:
      weights_MBTH = weights_MBTH[1:]
    weights_MBT = jnp.mean(weights_MBTH, axis=-1)
    hidden = len(sources) - len(weights_MBT)
    if not hidden:
      return weights_MBT
    zeros = jnp.zeros((hidden, *weights_MBT.shape[1:]), weights_MBT.dtype)
    return jnp.concatenate([weights_MBT[:1], zeros, weights_MBT[1:]])

  @property
  def _heads(self) -> int | None:
    return self.options.heads if self.options.heads > 1 else None

  @property
  def _rank(self) -> int | None:
    return self.options.rank or None

  def _defined(
    self, read: definition.Read, sources: tuple[jax.Array, ...]
  ) -> jax.Array:
    """The mixture by its formula."""

    # Autodiff would keep every weighted source.
    @jax.checkpoint
    def mixture(read: definition.Read, *sources: jax.Array) -> jax.Array:
      weights_MBTH = definition.weights(self.options, read, sources, self.eps)
      weights_MBTH = base.coefficient(weights_MBTH)
      mixture_BTD = definition.mix(self.options, weights_MBTH, read, sources)
      return scaled(mixture_BTD, read.scale).astype(self.dtype)

    visible = definition.seen(self.options, sources)
    keys = () if self.options.query == "static" else visible
    width = sources[0].shape[-1]
    key_width = (self.options.rank or width) if keys else 0
    flops = len(visible) * pair_flops(sources[0].shape, key_width)
    if self.options.query == "input":
      flops += 2 * sources[0].size * key_width
    return linear.counted(
      mixture, read, *sources, flops=flops,
      scanned=keys if self.options.key_norm else (), outs=sources[0],
    )  # fmt: skip

  def _null_logits(
    self, query_QD: jax.Array, null_Q11D: jax.Array, shape: tuple[int, ...]
  ) -> jax.Array:
    """Scores of null sources, the log-normalisers of mixtures of them alone."""
    logit_Q11H = jax.vmap(
      lambda query, null: definition.score(self.options, query, null, self.eps)
    )(query_QD, null_Q11D)
    if len(shape) < logit_Q11H.ndim:
      return jnp.broadcast_to(jnp.squeeze(logit_Q11H, -1), shape)
    return jnp.broadcast_to(logit_Q11H, shape)


def checked(
  options: config_lib.DepthReadConfig, width: int
) -> config_lib.DepthReadConfig:
  """The options of the reads of a network of this width, with 1 head for 0.

  Raises:
    ConfigError: the heads do not divide the width, or keys are wider.
  """
  options = dataclasses.replace(options, heads=options.heads or 1)
  if width % options.heads:
    config_lib.fail(
      "model.residual.read.heads",
      options.heads,
      f"a divisor of model.width={width}",
    )
  if options.rank > width:
    config_lib.fail(
      "model.residual.read.rank", options.rank, f"at most model.width={width}"
    )
  return options


def each(
  read: Any, function: Callable[[Any], jax.Array]
) -> jax.Array | base.QKV:
  """`function` of a read, or of both if that of the values is another one."""
  h_BTD = function(read)
  if read.value is None:
    return h_BTD
  return base.QKV(h_BTD, h_BTD, function(read.value))


def scaled(h: jax.Array, scale: jax.Array | None) -> jax.Array:
  """A mixture times its factor, if it has one; the product is float32."""
  if scale is None:
    return h
  wide = precision.widen(h)
  return (wide * scale.astype(wide.dtype)).astype(h.dtype)


def mixture_of(slot: Slot) -> jax.Array:
  """What is read if there is no open source."""
  return scaled(slot.out_BTD, slot.scale)


def normed(h: jax.Array | base.QKV, norm: base.Norm) -> jax.Array | base.QKV:
  """The norm of mixtures, which no product makes; ours as an operator."""
  ours = type(norm) is norm_lib.RMSNorm
  with scopes.part(scopes.NORM):
    return jax.tree.map(norm.in_one_pass if ours else norm, h)


def depth_attention(
  query_QD: jax.Array,
  sources: Sequence[jax.Array],
  *,
  eps: float,
  heads: int | None = None,
  rank: int | None = None,
) -> tuple[jax.Array, jax.Array]:
  """`attnres_kernels.depth_attention` of [B, T, D] sources."""

  def attend(
    query_QD: jax.Array, sources: tuple[jax.Array, ...]
  ) -> tuple[jax.Array, jax.Array]:
    return attnres_kernels.depth_attention(
      query_QD, sources, eps=eps, heads=heads, rank=rank
    )

  queried, tokens = sharding.QUERIED_TOKENS, sharding.TOKENS
  split = sharding.by_shards(
    attend, (sharding.WHOLE, tokens), (queried, queried)
  )
  sources = tuple(sources)
  first, num_queries = sources[0], query_QD.shape[0]
  out_QBTD = jax.ShapeDtypeStruct((num_queries, *first.shape), first.dtype)
  axis_H = () if heads is None else (heads,)
  lse_QBT = jax.ShapeDtypeStruct((*out_QBTD.shape[:-1], *axis_H), jnp.float32)
  return linear.counted(
    split, query_QD, sources,
    flops=len(sources) * pair_flops(out_QBTD.shape, query_QD.shape[-1]),
    scanned=sources, outs=(out_QBTD, lse_QBT),
  )  # fmt: skip


def depth_merge(
  slot: Slot,
  opened: jax.Array | tuple[jax.Array, ...],
  norm: base.Norm,
  *,
  eps: float,
  rank: int | None,
) -> jax.Array:
  """norm(`attnres_kernels.depth_merge`), one operator if the norm is ours."""
  arrays: list[Any] = [slot.out_BTD, slot.lse_BT, slot.query_D, opened]
  merge = functools.partial(attnres_kernels.depth_merge, eps=eps, rank=rank)
  fused = type(norm) is norm_lib.RMSNorm
  if fused:
    arrays.append(norm.gain[...])
    merge = functools.partial(
      attnres_kernels.depth_merge_norm, eps=eps, rank=rank, norm_eps=norm.eps
    )
  sources = jax.tree.leaves(opened)
  tokens, replicated = sharding.TOKENS, sharding.WHOLE
  in_specs = tokens, tokens, replicated, tokens, replicated
  split = sharding.by_shards(merge, in_specs[: len(arrays)], tokens)
  h_BTD = linear.counted(
    split, *arrays,
    flops=len(sources) * pair_flops(sources[0].shape, slot.query_D.size),
    scanned=sources, outs=slot.out_BTD,
  )  # fmt: skip
  return h_BTD if fused else base.normed(h_BTD, norm)


def pair_flops(mixtures: Sequence[int], key_width: int) -> int:
  """FLOPs per source: a dot product of keys and a weighted sum of values.

  A (query, source) pair counts as the two, and a source as one mean square,
  however often its norm is recomputed. `mixtures` is the shape [..., D] of the
  mixed arrays, `key_width` of the scored keys.
  """
  *tokens, width = mixtures
  return 2 * math.prod(tokens) * (width + key_width)

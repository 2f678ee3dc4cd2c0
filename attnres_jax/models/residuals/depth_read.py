# SPDX-License-Identifier: Apache-2.0
"""Attention over depth: queries, both phases, sharding and costs.

Schemes that attend over depth read as in `definition`, one read at a time, or
in two phases (Alg. 1): `phase_1` answers all queries of a block over the
completed sources in one pass, and `merge` adds the open source. These are
operators of `attnres_kernels`, which run on each device's own tokens, since
every token attends over its own depth.
"""

from collections.abc import Sequence
import dataclasses
import functools
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
from attnres_jax.models.residuals import tools
import attnres_kernels


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
    parameter = functools.partial(tools.parameter, decays=False)

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
    norm_apart: as in `TwoPhases`.
  """

  Options = config_lib.DepthAttentionConfig
  attends_last = True
  norm_apart = True

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.eps = config.norm_eps
    self.scannable = False
    options = config.residual.effective_read
    self.options = checked(options, config.width)
    self.form = config.residual.form if options.batched else "one_softmax"
    fields = self.options, self.eps, self.dtype
    self._one_softmax = definition.OneSoftmax(*fields)
    self._two_phases = TwoPhases(*fields, self.norm_apart)
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
    return self.form == "two_phase" and not tools.coefficients_are_fixed()

  @property
  def reader(self) -> definition.OneSoftmax:
    """How reads happen in this context."""
    return self._two_phases if self.two_phase else self._one_softmax

  def attend_last(self, sources: tuple[jax.Array, ...]) -> jax.Array:
    """The readout: the mixture with its own query."""
    read = self.queries.single(self.num_sublayers)
    return base.query_input(self.reader.attend(read, sources))

  def mean_weights(self, l: int, sources: Sequence[jax.Array]) -> jax.Array:
    """Weights of read l (from 0) for `depth_weights`, [M, B, T]."""
    read = self.queries.single(l)
    return definition.mean_weights(self.options, read, sources, self.eps)


@dataclasses.dataclass(frozen=True)
class TwoPhases(definition.OneSoftmax):
  """All reads of a segment at once, then a merge for each that needs one.

  Attributes:
    norm_apart: whether the norm of a mixture without open source is a separate
      operator, rather than fused by compilers.
  """

  norm_apart: bool = True

  def open(self, reads, sources):
    """Phase 1: slots of stacked reads, from one pass over the sources."""
    query_QD = reads.query
    if reads.value is not None:
      query_QD = jnp.concatenate([query_QD, reads.value.query])
    return (), self._slots(reads, *self._mixtures(query_QD, sources))

  def read(self, slot, sources, opened, norm):
    """Phase 2."""
    if not opened:
      norm_of = normed if self.norm_apart else base.normed
      return norm_of(tools.each(slot, mixture_of), norm)
    return self._merge(slot, opened, norm)

  def attend(self, read, sources):
    if len(sources) == 1 and self.options.sums_to_one:
      return sources[0]
    _, slots = self.open(jax.tree.map(lambda a: a[None], read), sources)
    return tools.each(layer_stacks.single(slots), mixture_of)

  def _mixtures(
    self, query_QD: jax.Array, sources: Any
  ) -> tuple[jax.Array, jax.Array]:
    return depth_attention(
      query_QD, sources, eps=self.eps, heads=self._heads, rank=self._rank
    )

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

  def _merge(
    self, slot: Slot, opened: tuple[jax.Array, ...], norm: base.Norm
  ) -> jax.Array | base.QKV:
    """norm(the mixture with the opened sources as further sources).

    One pass over memory, if the norm is ours, mixtures are not scaled, and
    there is one source or a kernel that takes several.
    """
    ours = type(norm) is norm_lib.RMSNorm and slot.scale is None
    arrays = slot.out_BTD, slot.lse_BT, slot.query_D, opened
    if len(opened) > 1 and not (
      ours and attnres_kernels.merges_several(*arrays, rank=self._rank)
    ):
      joined = tools.each(slot, lambda part: self._joined(part, opened))
      return base.normed(joined, norm)

    def merged(part: Slot) -> jax.Array:
      merge = functools.partial(
        depth_merge, part, opened if len(opened) > 1 else opened[0],
        eps=self.eps, rank=self._rank,
      )  # fmt: skip
      if part.scale is None:
        return merge(norm)
      # The factor is one more number per read, which no kernel has: without
      # it, eps of the norm would have to be divided by its square.
      h_BTD = merge(norm_lib.Identity())
      wide_BTD = precision.scaled(precision.widen(h_BTD), part.scale)
      return norm(wide_BTD).astype(h_BTD.dtype)

    return tools.each(slot, merged)

  def _joined(self, slot: Slot, opened: tuple[jax.Array, ...]) -> jax.Array:
    """The mixture with several sources, which are mixed by themselves first."""
    out_QBTD, lse_QBT = self._mixtures(slot.query_D[None], opened)
    merged_BTD, _ = attnres_kernels.combine_mixtures(
      slot.out_BTD, slot.lse_BT, out_QBTD[0], lse_QBT[0]
    )
    return precision.scaled(merged_BTD, slot.scale)

  @property
  def _heads(self) -> int | None:
    return self.options.heads if self.options.heads > 1 else None

  @property
  def _rank(self) -> int | None:
    return self.options.rank or None

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


def mixture_of(slot: Slot) -> jax.Array:
  """What is read if there is no open source."""
  return precision.scaled(slot.out_BTD, slot.scale)


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
    flops=linear.pair_flops(sources, query_QD.shape[-1], num_queries),
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
    flops=linear.pair_flops(sources, slot.query_D.size),
    scanned=sources, outs=slot.out_BTD,
  )  # fmt: skip
  return h_BTD if fused else base.normed(h_BTD, norm)

# SPDX-License-Identifier: Apache-2.0
"""Shared by schemes that attend over depth: phase 1 and phase 2."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax import precision
from attnres_jax.models import linear
from attnres_jax.models import norm as norm_lib
from attnres_jax.models import stacks
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import depth_operators
from attnres_jax.models.residuals import depth_reads
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
    scale: float32 factor of the whole mixture, or None.
    row: where `out_BTD` lies, if it is a row of an array.
  """

  query_D: jax.Array
  out_BTD: jax.Array
  lse_BT: jax.Array
  value: "Slot | None" = None
  scale: jax.Array | None = None
  row: attnres_kernels.Row | None = None

  def ignoring_first(self, wanted: jax.Array | bool = True) -> "Slot":
    """Of several sublayers, with an `lse_BT` of +inf for the first."""
    value = self.value and self.value.ignoring_first(wanted)
    lse = jnp.where(wanted, jnp.inf, self.lse_BT[0])
    return self._replace(lse_BT=self.lse_BT.at[0].set(lse), value=value)

  def lying(self, rows: attnres_kernels.Row) -> "Slot":
    """With the places of mixtures.

    Args:
      rows: [V, Q, B, T, D], the mixtures of Q reads, and of those of values if
        V is 2, and which read this is.
    """
    (_, count, *shape), index = rows.stack.shape, rows.index
    flat = rows.stack.reshape(-1, *shape)
    value = self.value
    if value is not None:
      value = value._replace(row=attnres_kernels.Row(flat, count + index))
    return self._replace(row=attnres_kernels.Row(flat, index), value=value)


def queries_of(reads: depth_reads.Read) -> jax.Array:
  """The queries of phase 1 of stacked reads; those of values come last."""
  if reads.value is None:
    return reads.query
  return jnp.concatenate([reads.query, reads.value.query])


def sharing(scheme: base.Residual, form: type[base.Residual]) -> Any:
  """A scheme of another class with the same parameters."""
  other = object.__new__(form)
  vars(other).update(vars(scheme))
  return other


class DepthAttention(base.Residual):
  """Shared by schemes that attend over depth: queries, and how they read.

  Attributes:
    eps: added to the mean square of a source before it is scored.
    options: of the reads.
    queries: of the L sublayers and, if it attends, of the readout.
    attends_last: whether the readout does.
    can_sum: whether reads may have `scale="sum"`.
  """

  scannable = False
  reads_depth = True
  can_sum = False
  attends_last = True

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.eps = config.norm_eps
    # Without a scan over sublayers, every mixture is read by itself.
    self._apart = not config.scan_layers
    options = self.read_options(config.residual.read)
    self.options = depth_reads.checked(options, config.width)
    self.queries = depth_reads.DepthQueries(
      config,
      self.options,
      num_reads=self.num_sublayers + self.attends_last,
      most_sources=1 + -(-self.num_sublayers // (self.block_size or 1)),
      rngs=rngs,
      scales=self._scales(config.residual.name),
    )

  def _scales(self, name: str) -> tuple[int, ...] | None:
    """Of each read, how many sources it sees, if that is its factor."""
    if self.options.scale == "mean":
      return None
    labels = self.source_labels()
    if not self.can_sum or labels is None:
      config_lib.fail(
        "model.residual.read.scale",
        self.options.scale,
        f"'mean' with model.residual.name={name!r}",
      )
    most = 1 + self.options.window if self.options.window else None
    return tuple(len(sources[:most]) for sources in labels)

  def read_options(
    self, given: config_lib.DepthReadConfig
  ) -> config_lib.DepthReadConfig:
    """The options of the scheme's reads, given the configured ones."""
    return given

  def attend(
    self, read: depth_reads.Read, sources: tuple[jax.Array, ...]
  ) -> jax.Array | base.QKV:
    """The mixture of one read; a single source is returned as is."""
    if len(sources) == 1 and self.options.sums_to_one:
      return sources[0]
    # The definition of a variant is its formula.
    operator = self.options.plain or self.definition is not None
    if not operator or base.coefficients_are_fixed():
      return depth_reads.each(read, lambda one: self._defined(one, sources))
    seen = depth_reads.seen(self.options, sources)
    slots = self.phase_1(jax.tree.map(lambda a: a[None], read), seen)
    first = jax.tree.map(lambda a: a[0], slots)
    return depth_reads.each(first, self.whole)

  def whole(self, slot: Slot) -> jax.Array:
    """What is read if there is no open source."""
    return depth_reads.scaled(slot.out_BTD, slot.scale)

  def attend_last(self, sources: depth_operators.Sources) -> jax.Array:
    """The readout: the mixture with its own query."""
    read = self.queries.single(self.num_sublayers)
    if not isinstance(sources, depth_operators.Bank):
      return base.main(self.attend(read, tuple(sources)))
    slots = self.phase_1(jax.tree.map(lambda a: a[None], read), sources)
    first = jax.tree.map(lambda a: a[0], slots)
    return base.main(depth_reads.each(first, self.whole))

  def phase_1(
    self,
    reads: depth_reads.Read,
    sources: depth_operators.Sources,
    norm: norm_lib.RMSNorm | None = None,
  ) -> Slot:
    """All mixtures of stacked reads, in one pass over the sources.

    With a norm, for reads that it `can_norm`, the first comes out normalised.
    """
    query_QD = queries_of(reads)
    out_QBTD, lse_QBT = depth_operators.depth_attention(
      query_QD,
      sources,
      apart=self._apart and query_QD.shape[0] > 1,
      norm=norm,
      **self.how,
    )
    return self.slots_of(reads, out_QBTD, lse_QBT)

  def can_norm(self, reads: depth_reads.Read) -> bool:
    """Whether nothing is done to their mixtures before a norm."""
    return self._heads is None and self.can_sink(reads)

  def can_sink(self, reads: depth_reads.Read) -> bool:
    """Whether their gradients may be collected in `attnres_kernels.Sinks`."""
    changed = reads.value, reads.null_D, reads.scale
    return all(x is None for x in changed)

  def slots_of(
    self, reads: depth_reads.Read, out_QBTD: jax.Array, lse_QBT: jax.Array
  ) -> Slot:
    """Slots of stacked reads, given the mixtures of their `queries_of`."""
    if reads.value is not None:
      count = reads.query.shape[0]
      own, value = stacks.split((out_QBTD, lse_QBT), [count, count])
      slots = self.slots_of(reads._replace(value=None), *own)
      return slots._replace(value=self.slots_of(reads.value, *value))
    if reads.null_D is not None:
      null_Q11D = reads.null_D[:, None, None].astype(out_QBTD.dtype)
      out_QBTD, lse_QBT = attnres_kernels.combine_mixtures(
        out_QBTD,
        lse_QBT,
        jnp.broadcast_to(null_Q11D, out_QBTD.shape),
        self._null_logits(reads.query, null_Q11D, lse_QBT.shape),
      )
    return Slot(reads.query, out_QBTD, lse_QBT, scale=reads.scale)

  def merge(self, slot: Slot, open_BTD: jax.Array) -> jax.Array | base.QKV:
    """The mixture with the open source as one more source."""
    return depth_reads.each(
      slot,
      lambda one: depth_reads.scaled(
        self._merged(one, open_BTD, None), one.scale
      ),
    )

  def _merged(
    self, slot: Slot, open_BTD: jax.Array, row: attnres_kernels.Row | None
  ) -> jax.Array:
    return depth_operators.depth_merge(
      slot.out_BTD, slot.lse_BT, slot.query_D, open_BTD, (slot.row, row),
      eps=self.eps, rank=self._rank,
    )  # fmt: skip

  def merge_normed(
    self,
    slot: Slot,
    open_BTD: jax.Array,
    norm: norm_lib.RMSNorm,
    row: attnres_kernels.Row | None = None,
  ) -> jax.Array | base.QKV:
    """norm(merge(...)) in one pass over memory, unless mixtures are scaled.

    Args:
      slot: of the read.
      open_BTD: the open source.
      norm: of what is read.
      row: where the open source lies, if it is a row of an array.
    """
    if slot.scale is not None:
      # The factor is one more number per read, which no kernel has: without
      # it, eps of the norm would have to be divided by its square.
      def normed(one: Slot) -> jax.Array:
        merged_BTD = self._merged(one, open_BTD, row)
        wide_BTD = precision.widen(merged_BTD)
        wide_BTD = depth_reads.scaled(wide_BTD, one.scale)
        return norm(wide_BTD).astype(merged_BTD.dtype)

      return depth_reads.each(slot, normed)
    return depth_reads.each(
      slot,
      lambda one: self._merged_and_normed(one, open_BTD, norm, row),
    )

  def merge_and_carry_on(
    self, slot: Slot, open_BTD: jax.Array, norm: norm_lib.RMSNorm
  ) -> tuple[jax.Array, jax.Array]:
    """The open source to carry on, and `merge_normed`.

    Only for one mixture that is not scaled.
    """
    return self._merged_and_normed(slot, open_BTD, norm, None, carry_on=True)

  def merge_into(
    self,
    slot: Slot,
    open_BTD: jax.Array,
    norm: norm_lib.RMSNorm,
    row: attnres_kernels.Row | None,
    sinks: attnres_kernels.Sinks,
  ) -> tuple[attnres_kernels.Sinks, jax.Array]:
    """The sinks, and `merge_normed` of what `can_sink`."""
    return self._merged_and_normed(slot, open_BTD, norm, row, sinks=sinks)

  def _merged_and_normed(
    self,
    slot: Slot,
    open_BTD: jax.Array,
    norm: norm_lib.RMSNorm,
    row: attnres_kernels.Row | None,
    **options: Any,
  ) -> Any:
    return depth_operators.depth_merge_norm(
      slot.out_BTD, slot.lse_BT, slot.query_D, open_BTD, norm.gain[...],
      (slot.row, row), eps=self.eps, norm_eps=norm.eps, rank=self._rank,
      **options,
    )  # fmt: skip

  def merge_several(
    self, slot: Slot, sources: Sequence[jax.Array]
  ) -> jax.Array | base.QKV:
    """The mixture with several more sources."""

    def merge(one):
      out_QBTD, lse_QBT = depth_operators.depth_attention(
        one.query_D[None], sources, **self.how
      )
      merged_BTD, _ = attnres_kernels.combine_mixtures(
        one.out_BTD, one.lse_BT, out_QBTD[0], lse_QBT[0]
      )
      return depth_reads.scaled(merged_BTD, one.scale)

    return depth_reads.each(slot, merge)

  def mean_weights(
    self, read: depth_reads.Read, sources: Sequence[jax.Array]
  ) -> jax.Array:
    """For `depth_weights`: [M, B, T], the mean over heads, without the null.

    A source outside the window has weight 0.
    """
    weights_MBTH = depth_reads.weights(self.options, read, sources, self.eps)
    if read.null_D is not None:
      weights_MBTH = weights_MBTH[1:]
    weights_MBT = jnp.mean(weights_MBTH, axis=-1)
    hidden = len(sources) - len(weights_MBT)
    if not hidden:
      return weights_MBT
    zeros = jnp.zeros((hidden, *weights_MBT.shape[1:]), weights_MBT.dtype)
    return jnp.concatenate([weights_MBT[:1], zeros, weights_MBT[1:]])

  @property
  def how(self) -> dict[str, Any]:
    """The options of the operator."""
    return dict(eps=self.eps, heads=self._heads, rank=self._rank)

  @property
  def _heads(self) -> int | None:
    return self.options.heads if self.options.heads > 1 else None

  @property
  def _rank(self) -> int | None:
    return self.options.rank or None

  def _defined(
    self, read: depth_reads.Read, sources: tuple[jax.Array, ...]
  ) -> jax.Array:
    """The mixture by its formula."""

    def mixture(read, *sources):
      weights = depth_reads.weights(self.options, read, sources, self.eps)
      weights = base.coefficient(weights)
      mixture_BTD = depth_reads.mix(self.options, weights, read, sources)
      mixture_BTD = depth_reads.scaled(mixture_BTD, read.scale)
      return mixture_BTD.astype(self.dtype)

    seen = depth_reads.seen(self.options, sources)
    keys = () if self.options.query == "static" else seen
    width = sources[0].shape[-1]
    key_width = (self.options.rank or width) if keys else 0
    flops = len(seen) * depth_operators.pair_flops(sources[0].shape, key_width)
    if self.options.query == "input":
      flops += 2 * sources[0].size * key_width
    return linear.counted(
      mixture, read, *sources, flops=flops,
      scanned=keys if self.options.key_norm else (), outs=sources[0],
    )  # fmt: skip

  def _null_logits(
    self, query_QD: jax.Array, null_Q11D: jax.Array, shape: tuple[int, ...]
  ) -> jax.Array:
    """Of the null sources: as mixtures of one, these are log-normalisers."""
    logit_Q11H = jax.vmap(
      lambda query, null: depth_reads.score(self.options, query, null, self.eps)
    )(query_QD, null_Q11D)
    if len(shape) < logit_Q11H.ndim:
      return jnp.broadcast_to(jnp.squeeze(logit_Q11H, -1), shape)
    return jnp.broadcast_to(logit_Q11H, shape)


class OfFewTokens(DepthAttention):
  """A form for decoding: each sublayer reads all sources in one operation.

  Mixed into the definition of a scheme, whose carry is its state. The state
  stays inside a step of one token per row, so nothing is scanned.
  """

  def sources(self, state: Any) -> tuple[Any, ...]:
    """What the next sublayer reads, in any float dtype.

    Some may be tuples of arrays, of which `depth_read_norm` forms the sums.
    """
    raise NotImplementedError

  def open(self, state: Any, start: int, stop: int) -> tuple[Any, Any]:
    state, slots = super().open(state, start, stop)
    return (state, start), slots

  def read(self, carry: Any, slot: Any) -> jax.Array | base.QKV:
    return super().read(carry[0], slot)

  def read_normed(self, carry: Any, slot: Any, norm: Any) -> Any:
    state, l = carry
    sources = depth_reads.seen(self.options, self.sources(state))
    one = self.options.plain and slot.value is None and slot.scale is None
    if not one or len(sources) == 1:
      return super().read_normed(carry, slot, norm)
    # The queries of all sublayers, of which the operator finds one.
    queries_LD = self.queries.folded(0, self.num_sublayers)
    return depth_operators.depth_read_norm(
      queries_LD, l, sources, norm.gain[...], eps=self.eps, norm_eps=norm.eps
    )

  def write(self, carry: Any, slot: Any, y_BTD: jax.Array) -> Any:
    state, l = carry
    return super().write(state, slot, y_BTD), l + 1

  def close(self, state: Any, carry: Any, stop: int) -> Any:
    return super().close(state, carry[0], stop)

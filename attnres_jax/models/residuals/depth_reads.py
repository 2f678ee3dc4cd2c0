# SPDX-License-Identifier: Apache-2.0
"""What a read over depth is: its parameters, its weights, its mixture.

The paper's read (Eq. 2-4), with the options of `config.DepthReadConfig`:

  s_i = c <u, r_i v_i>     r_i = (mean v_i^2 + eps)^(-1/2), c = logit_scale
  a   = softmax_i s        or sigmoid(s_i), without normalisation
  h   = sum_i a_i v_i

With H heads, s, a and h are those of each slice of D / H channels, while r_i
is that of all D (arXiv:2607.27230, its own text and code). Low-rank keys are
the last R coordinates t_i of a source, and r_i is theirs (arXiv:2607.09694,
from its code, where eps is 2^-23; ours is the model's). A null source n (zero,
or learned) competes like any other (arXiv:2605.17887, whose abstract alone was
read).

The functions here are the definition, one read at a time. The operators of
`depth_attention` batch the queries of a block, where there is such a form.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import operator
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax import precision
from attnres_jax import scopes
from attnres_jax.models import linear
from attnres_jax.models.residuals import base


class Read(NamedTuple):
  """The parameters of one read; those of several have a leading axis.

  Attributes:
    query: folded with the key-norm gain and the logit scale: [D], or [R] for
      low-rank keys; [D, D] or [D, R] for queries that depend on the input;
      [M], a logit per source, for static ones.
    null_D: the null source, or None.
    value: the read of a mixer's values, if it is another one.
    scale: float32 factor of the mixture, or None.
  """

  query: jax.Array
  null_D: jax.Array | None = None
  value: "Read | None" = None
  scale: jax.Array | None = None


def each(
  read: Any, function: Callable[[Any], jax.Array]
) -> jax.Array | base.QKV:
  """`function` of a read, or of both if that of the values is another one."""
  h_BTD = function(read)
  if read.value is None:
    return h_BTD
  return base.QKV(h_BTD, h_BTD, function(read.value))


def normed(h: jax.Array | base.QKV, norm: Any) -> jax.Array | base.QKV:
  """The norm of mixtures, which no matrix product makes, as an operator."""
  with scopes.part(scopes.NORM):
    return jax.tree.map(norm.in_one_pass, h)


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
    """Draws the parameters.

    Args:
      config: of the network.
      options: of its reads.
      num_reads: L, or L + 1 with a read at the output.
      most_sources: of the read that has the most.
      rngs: for queries that do not start at zero.
      scales: factors of the mixtures, one for each read.
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
    def parameter(value, axes="LD"):
      return nnx.Param(value, axes=axes, decays=False)

    def queries(count):
      if not options.query_init:
        return parameter(jnp.zeros((count, *shape), jnp.float32), axes)
      drawn = jax.random.normal(rngs.params(), (count, *shape), jnp.float32)
      return parameter(options.query_init * drawn, axes)

    def vectors(fill):
      return parameter(jnp.full((num_reads, width), fill, jnp.float32))

    self.width, self.scale = width, options.logit_scale
    self.scales = scales
    self.has_null = options.null != "none"
    self.query = queries(num_reads)
    self.gain = vectors(1) if keyed else None
    num_mixers = -(-config.num_sublayers // 2)
    self.value_query = queries(num_mixers) if options.value_query else None
    self.null = vectors(0) if options.null == "learned" else None

  def folded(self, start: int, stop: int) -> jax.Array:
    """u_l = w_l * g_l of reads start..stop-1 (from 0): [Q, D], float32."""
    return self._fold(self.query[start:stop], start, stop)

  def reads(self, start: int, stop: int) -> Read:
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

  def single(self, l: int) -> Read:
    """The parameters of read l (from 0), for anything but a mixer's values."""
    reads = self._reads(l, l + 1)
    return jax.tree.map(lambda a: a[0], reads)

  def _reads(self, start: int, stop: int) -> Read:
    reads = Read(self.folded(start, stop), self._nulls(start, stop))
    if self.scales is None:
      return reads
    return reads._replace(scale=jnp.float32(self.scales[start:stop]))

  def _fold(self, query: jax.Array, start: int, stop: int) -> jax.Array:
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


def scaled(h: jax.Array, scale: jax.Array | None) -> jax.Array:
  """A mixture times its factor, if it has one; the product is float32."""
  if scale is None:
    return h
  wide = precision.widen(h)
  return (wide * scale.astype(wide.dtype)).astype(h.dtype)


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


def weights(
  options: config_lib.DepthReadConfig,
  read: Read,
  sources: Sequence[jax.Array],
  eps: float,
) -> jax.Array:
  """Weights [M, B, T, H] of the sources in the window, one score at a time.

  If there is a null source, its weight comes first, of M + 1.
  """
  query, null_D = read.query, read.null_D
  if options.query == "input":
    # The paper's "current hidden state" is undefined before the read; we take
    # the newest source.
    query = linear.linear(_normed(sources[-1], eps), query)
  if options.query == "static":
    logits = seen(options, tuple(query[: len(sources)]))
    if null_D is not None:
      logits = (jnp.zeros_like(logits[0]), *logits)
    shape = (*sources[0].shape[:-1], 1)
    scores = [jnp.broadcast_to(logit, shape) for logit in logits]
  else:
    scores = [
      score(options, query, source, eps)
      for source in _competing(options, null_D, sources)
    ]
  scores_MBTH = jnp.stack(scores)
  if options.score == "sigmoid":
    return jax.nn.sigmoid(scores_MBTH)
  return jax.nn.softmax(scores_MBTH, axis=0)


def mix(
  options: config_lib.DepthReadConfig,
  weights_MBTH: jax.Array,
  read: Read,
  sources: Sequence[jax.Array],
) -> jax.Array:
  """sum_i a_i v_i of each head, for `weights`: [B, T, D], float32."""
  sources = _competing(options, read.null_D, sources)
  width, heads = sources[0].shape[-1], options.heads
  terms = []
  for weight_BTH, source_BTD in zip(weights_MBTH, sources, strict=True):
    if heads > 1:
      weight_BTH = jnp.repeat(weight_BTH, width // heads, axis=-1)
    terms.append(weight_BTH * precision.widen(source_BTD))
  return functools.reduce(operator.add, terms)


def seen(
  options: config_lib.DepthReadConfig, sources: Sequence[Any]
) -> tuple[Any, ...]:
  """The sources in the window: the embedding and the newest."""
  first, *others = sources
  return (first, *others[-options.window :])


def score(
  options: config_lib.DepthReadConfig,
  query: jax.Array,
  source_BTD: jax.Array,
  eps: float,
) -> jax.Array:
  """Logits [B, T, H] of one source: <u, r v> for each head."""
  key = precision.widen(source_BTD)
  if options.rank:
    key = key[..., -options.rank :]
  heads = options.heads
  slices = (heads, key.shape[-1] // heads)
  score_BTH = jnp.einsum(
    "...HK,BTHK->BTH" if query.ndim == 1 else "BTHK,BTHK->BTH",
    query.reshape(*query.shape[:-1], *slices),
    key.reshape(*key.shape[:-1], *slices),
    precision=jax.lax.Precision.HIGHEST,
  )
  if options.key_norm:
    mean_square = jnp.mean(jnp.square(key), axis=-1, keepdims=True)
    score_BTH *= jax.lax.rsqrt(mean_square + eps)
  return score_BTH


def _normed(x_BTD, eps):
  x_BTD = precision.widen(x_BTD)
  mean_square = jnp.mean(jnp.square(x_BTD), axis=-1, keepdims=True)
  return x_BTD * jax.lax.rsqrt(mean_square + eps)


def _competing(options, null_D, sources):
  """The null source, if there is one, and those in the window."""
  sources = seen(options, sources)
  if null_D is None:
    return sources
  null_BTD = jnp.broadcast_to(null_D, sources[0].shape)
  return (null_BTD.astype(sources[0].dtype), *sources)

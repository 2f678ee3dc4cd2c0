# SPDX-License-Identifier: Apache-2.0
"""One read over depth by its formula: the definition.

The paper's read (Eq. 2-4), with the options of `config.DepthReadConfig`:

  s_i = c <u, r_i v_i>     r_i = (mean v_i^2 + eps)^(-1/2), c = logit_scale
  a   = softmax_i s        or sigmoid(s_i), without normalisation
  h   = sum_i a_i v_i

With H heads, s, a and h are computed per slice of D / H channels, while r_i is
over all D (arXiv:2607.27230, its text and code). Low-rank keys are the last R
coordinates t_i of a source, and r_i is theirs (arXiv:2607.09694, from its code,
where eps is 2^-23; ours is the model's). A null source n (zero, or learned)
competes like any other (arXiv:2605.17887, whose abstract alone was read).

`weigh` is the only place that turns scores into weights: replace it to try
another weighting, with `model.residual.form=one_softmax`.
"""

from collections.abc import Sequence
import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.models import linear
from attnres_jax.models import norm as norm_lib
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import tools


class Read(NamedTuple):
  """The parameters of one read, or of several with a leading axis.

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


@dataclasses.dataclass(frozen=True)
class OneSoftmax:
  """Reads by the formula, each by itself; a slot is a read's parameters.

  Attributes:
    options: of the reads.
    eps: added to the mean square of a source before it is scored.
    dtype: of mixtures.
  """

  options: config_lib.DepthReadConfig
  eps: float
  dtype: jnp.dtype

  def open(self, reads: Read, sources: Any) -> tuple[tuple, Any]:
    """The sources that `read` needs once more, and slots of stacked reads."""
    return sources, reads

  def read(
    self, slot: Any, sources: tuple, opened: tuple, norm: base.Norm
  ) -> jax.Array | base.QKV:
    """norm(the mixture of a slot, with the sources opened since then)."""
    return base.normed(self.attend(slot, (*sources, *opened)), norm)

  def attend(self, read: Read, sources: tuple) -> jax.Array | base.QKV:
    """The mixture of one read; a single source is returned as is."""
    if len(sources) == 1 and self.options.sums_to_one:
      return sources[0]
    return tools.each(read, lambda part: self._mixture(part, sources))

  def _mixture(self, read: Read, sources: tuple[jax.Array, ...]) -> jax.Array:
    # Autodiff would keep every weighted source.
    @jax.checkpoint
    def mixture(read: Read, *sources: jax.Array) -> jax.Array:
      weights_MBTH = weights(self.options, read, sources, self.eps)
      weights_MBTH = tools.coefficient(weights_MBTH)
      mixture_BTD = mix(self.options, weights_MBTH, read, sources)
      return precision.scaled(mixture_BTD, read.scale).astype(self.dtype)

    visible = seen(self.options, sources)
    keys = () if self.options.query == "static" else visible
    width = sources[0].shape[-1]
    key_width = (self.options.rank or width) if keys else 0
    flops = linear.pair_flops(visible, key_width)
    if self.options.query == "input":
      flops += 2 * sources[0].size * key_width
    return linear.counted(
      mixture, read, *sources, flops=flops,
      scanned=keys if self.options.key_norm else (), outs=sources[0],
    )  # fmt: skip


def weigh(
  options: config_lib.DepthReadConfig, scores_MBTH: jax.Array
) -> jax.Array:
  """Weights of M sources, given their scores: both float32 [M, B, T, H]."""
  if options.score == "sigmoid":
    return jax.nn.sigmoid(scores_MBTH)
  return jax.nn.softmax(scores_MBTH, axis=0)


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
    newest_BTD = precision.widen(sources[-1])
    newest_BTD *= norm_lib.inverse_rms(newest_BTD, eps)
    query = linear.linear(newest_BTD, query)
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
  return weigh(options, jnp.stack(scores))


def mean_weights(
  options: config_lib.DepthReadConfig, read: Read,
  sources: Sequence[jax.Array], eps: float,
) -> jax.Array:  # fmt: skip
  """For `depth_weights`: [M, B, T], the mean over heads, without the null.

  A source outside the window has weight 0.
  """
  weights_MBTH = weights(options, read, sources, eps)
  if read.null_D is not None:
    weights_MBTH = weights_MBTH[1:]
  weights_MBT = jnp.mean(weights_MBTH, axis=-1)
  hidden = len(sources) - len(weights_MBT)
  if not hidden:
    return weights_MBT
  zeros = jnp.zeros((hidden, *weights_MBT.shape[1:]), weights_MBT.dtype)
  return jnp.concatenate([weights_MBT[:1], zeros, weights_MBT[1:]])


def mix(
  options: config_lib.DepthReadConfig,
  weights_MBTH: jax.Array,
  read: Read,
  sources: Sequence[jax.Array],
) -> jax.Array:
  """sum_i a_i v_i of each head, for `weights`: [B, T, D], float32."""
  sources = _competing(options, read.null_D, sources)
  terms = [
    spread(weight_BTH, source_BTD) * precision.widen(source_BTD)
    for weight_BTH, source_BTD in zip(weights_MBTH, sources, strict=True)
  ]
  return functools.reduce(operator.add, terms)


def spread(weight: jax.Array, source: jax.Array) -> jax.Array:
  """Weights [..., H] of heads, for each channel of [..., D]."""
  heads = weight.shape[-1]
  if heads == 1:
    return weight
  return jnp.repeat(weight, source.shape[-1] // heads, axis=-1)


def seen(
  options: config_lib.DepthReadConfig, sources: Sequence[Any]
) -> tuple[Any, ...]:
  """The sources in the window: the embedding and the newest."""
  first, *others = sources
  return (first, *others[-options.window :])


def score(
  options: config_lib.DepthReadConfig,
  query: jax.Array,
  source: jax.Array,
  eps: float,
) -> jax.Array:
  """Logits [..., H] of a source [..., D]: <u, r v> for each head."""
  key = precision.widen(source)
  if options.rank:
    key = key[..., -options.rank :]
  heads = options.heads
  slices = (heads, key.shape[-1] // heads)
  logits = jnp.einsum(
    "HK,...HK->...H" if query.ndim == 1 else "...HK,...HK->...H",
    query.reshape(*query.shape[:-1], *slices),
    key.reshape(*key.shape[:-1], *slices),
    precision=jax.lax.Precision.HIGHEST,
  )
  if options.key_norm:
    mean_square = jnp.mean(jnp.square(key), axis=-1, keepdims=True)
    logits *= jax.lax.rsqrt(mean_square + eps)
  return logits


def _competing(
  options: config_lib.DepthReadConfig,
  null_D: jax.Array | None,
  sources: Sequence[jax.Array],
) -> tuple[jax.Array, ...]:
  """The null source, if there is one, and the sources in the window."""
  sources = seen(options, sources)
  if null_D is None:
    return sources
  null_BTD = jnp.broadcast_to(null_D, sources[0].shape)
  return (null_BTD.astype(sources[0].dtype), *sources)

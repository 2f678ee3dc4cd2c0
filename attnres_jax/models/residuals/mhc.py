# SPDX-License-Identifier: Apache-2.0
"""mHC and mHC-lite: streams mixed by a doubly stochastic matrix per token.

Both compute their coefficients from the normalised streams of a token,
x = RMSNorm(X_1, ..., X_M) over all M D entries, in float32:

  read  = sigmoid(s_1 x W_read + b_read)            between 0 and 1
  write = 2 sigmoid(s_2 x W_write + b_write)        between 0 and 2
  mix   = R(s_3 x W_mix + b_mix)                    M x M

They differ in R, and in the readout. Initialisation (of mHC-lite's code, for
both): W = 0 and s = 0.01; b_read and b_write are 1 at stream
l mod M of sublayer l (from 0) and -1 elsewhere; b_mix makes R the identity,
almost. So reads differ from PreNorm's by more than a factor. (With equal biases
and W = 0, streams would stay equal forever.)

The three products are one. The streams are not normalised before it: their
inverse RMS is a factor of its result.
"""

import functools
import itertools
import math

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.models.residuals import streams as streams_lib
from attnres_jax.models.residuals import styles
from attnres_jax.models.residuals import tools

_SCALE = 0.01  # Of what depends on the streams, at initialisation.
_CLOSED = -8.0  # Bias of what softmax or Sinkhorn almost removes.
_ITERATIONS = 20


class MHC(streams_lib.Streams):
  """mHC: R is doubly stochastic, by 20 Sinkhorn iterations.

    K = exp(b + s x W), then 20 times: divide by row sums, by column sums

  Source: arXiv:2512.24880, Eq. 7 to 9, whose matrix is the transpose of ours.
  Iterations end on columns: column sums are 1, row sums nearly. The backward
  pass differentiates the iterations, and recomputes them first, so that none
  are kept. The readout is the mean of the streams.

  State: M streams. Parameters per sublayer: (M D + 1) (M^2 + 2 M) + 3.

  Attributes:
    eps: added to the mean square of the streams.
  """

  style = styles.Style("mHC", "#7c3aed", "D")
  certainty = styles.Certainty.PAPER
  mean = True

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.eps = config.norm_eps
    depth, streams = config.num_sublayers, self.num_streams
    turns_LM, mix_C = 2 * streams_lib.in_turn(depth, streams) - 1, self.start()
    mix_LC = np.broadcast_to(mix_C, (depth, mix_C.size))
    # No decay: with zero biases, each stream would be read and written alike.
    bias_LC = np.concatenate([turns_LM, turns_LM, mix_LC], axis=1)
    self.bias = tools.parameter("LC", bias_LC, decays=False)
    self.scale = tools.parameter("LC", _SCALE, depth, 3)
    shape = depth, streams, config.width, bias_LC.shape[1]
    self.projection = tools.parameter("LMDC", 0, *shape)

  def start(self) -> np.ndarray:
    """b_mix, of a matrix close to the identity."""
    return _CLOSED * (1 - np.eye(self.num_streams)).ravel()

  def matrix(self, logits_CBT: jax.Array) -> jax.Array:
    """R [M, M, B, T]."""
    return doubly_stochastic(logits_CBT)

  def weight(self) -> jax.Array:
    """W of the three products [M, D, C]."""
    return self.projection[...]

  def coefficients(
    self, streams: streams_lib.State
  ) -> streams_lib.Coefficients:
    product_CBT = streams_lib.projected(streams, self.weight())
    product_CBT = inverse_rms(streams, self.eps)[None] * product_CBT
    cuts = self.num_streams, 2 * self.num_streams
    read_MBT, write_MBT, mix_CBT = (
      streams_lib.to_tokens(bias_C) + scale * part_CBT
      for part_CBT, bias_C, scale in zip(
        jnp.split(product_CBT, cuts),
        jnp.split(self.bias[...], cuts),
        self.scale[...],
      )
    )
    return streams_lib.Coefficients(
      jax.nn.sigmoid(read_MBT),
      2 * jax.nn.sigmoid(write_MBT),
      self.matrix(mix_CBT),
    )


class MHCLite(MHC):
  """mHC-lite: R is a softmax mixture of all M! permutation matrices.

  Source: arXiv:2603.15031 Table 2, and the official code of mHC-lite. R is
  exactly doubly stochastic. The identity starts with weight 0.992 for M = 4.
  x has a factor 1 + gain, with a gain that starts at zero. The readout is the
  sum of the streams.

  State: M streams. Parameters per sublayer: (M D + 1) (M! + 2 M) + M D + 3.
  """

  style = styles.Style("mHC-lite", "#7c3aed", "d", (0, (4, 2.5)))
  certainty = styles.Certainty.CODE
  mean = False

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.gain = tools.parameter("LMD", 0, *self.projection.shape[:3])

  def start(self) -> np.ndarray:
    if self.num_streams > 6:
      config_lib.fail(
        "model.residual.streams",
        self.num_streams,
        "at most 6 for mhc_lite, which mixes all permutations",
      )
    # The first permutation is the identity.
    return _CLOSED * (np.arange(math.factorial(self.num_streams)) > 0)

  def matrix(self, logits_CBT: jax.Array) -> jax.Array:
    weight_CBT = jax.nn.softmax(logits_CBT, axis=0)
    orders = list(itertools.permutations(range(self.num_streams)))
    matrices_CMM = np.eye(self.num_streams)[orders]
    return jnp.tensordot(
      jnp.asarray(matrices_CMM, weight_CBT.dtype), weight_CBT, axes=(0, 0),
      precision=jax.lax.Precision.HIGHEST,
    )  # fmt: skip

  def weight(self) -> jax.Array:
    return self.projection[...] * (1 + self.gain[...])[..., None]


def inverse_rms(streams: streams_lib.State, eps: float) -> jax.Array:
  """1 / rms over the channels of all streams together [B, T]."""
  width = len(streams) * streams[0].shape[-1]
  total_BT = streams_lib.total(map(streams_lib.square, streams))
  return jax.lax.rsqrt(total_BT / width + eps)


@jax.checkpoint
def doubly_stochastic(logits_CBT: jax.Array) -> jax.Array:
  """R [M, M, B, T] of a flat matrix, in logarithms: gradients stay bounded."""
  size = math.isqrt(len(logits_CBT))

  def step(log_MMBT: jax.Array, _: None) -> tuple[jax.Array, None]:
    for axis in (1, 0):
      log_MMBT -= _log_sum(log_MMBT, axis)
    return log_MMBT, None

  log_MMBT = logits_CBT.reshape(size, size, *logits_CBT.shape[1:])
  log_MMBT, _ = jax.lax.scan(step, log_MMBT, length=_ITERATIONS)
  return jnp.exp(log_MMBT)


def _log_sum(log_MMBT: jax.Array, axis: int) -> jax.Array:
  """Log sum exp along an axis, which stays.

  The sum is written out: on a CPU, XLA reduces so few entries in a scalar loop,
  which is 20 times slower.
  """
  terms = jnp.split(log_MMBT, log_MMBT.shape[axis], axis=axis)
  top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, terms))
  return top + jnp.log(streams_lib.total(jnp.exp(term - top) for term in terms))

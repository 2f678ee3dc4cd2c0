# SPDX-License-Identifier: Apache-2.0
"""mHC and its relatives: streams mixed by a constrained matrix per token.

All of them compute their coefficients from the normalised streams of a token,
x = RMSNorm(X_1, ..., X_M) over all M D entries, in float32:

  read  = sigmoid(s_1 x W_read + b_read)            between 0 and 1
  write = 2 sigmoid(s_2 x W_write + b_write)        between 0 and 2
  mix   = R(s_3 x W_mix + b_mix)                    M x M

The relatives differ in R alone. Initialisation (of mHC-lite's code, and our
choice for the others): W = 0 and s = 0.01; b_read and b_write are 1 at stream
l mod M of sublayer l (from 0) and -1 elsewhere; b_mix makes R the identity,
almost. So reads differ from PreNorm's by more than a factor. (With equal biases
and W = 0, streams would stay equal forever.)

The three products are one. The streams are not normalised before it: their
inverse RMS is a factor of its result.
"""

from collections.abc import Sequence
import itertools
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.models import linear
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import streams as streams_lib
import attnres_kernels

_SCALE = 0.01  # Of what depends on the streams, at initialisation.
_CLOSED = -8.0  # Bias of what softmax or Sinkhorn almost removes.
_ITERATIONS = 20


class Manifold(streams_lib.Streams):
  """Shared by mHC and its relatives, which define `start` and `matrix`.

  Attributes:
    has_gain: whether x = RMSNorm(...) (1 + gain), with a gain that starts at 0.
    eps: added to the mean square of the streams.
  """

  has_gain = True

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.eps = config.norm_eps
    depth, streams = config.num_sublayers, self.num_streams
    self.check(streams)
    turns_LM = 2 * streams_lib.in_turn(depth, streams) - 1
    mix = [np.broadcast_to(b, (depth, b.size)) for b in self.start(streams)]
    bias = turns_LM, turns_LM, *mix
    self.sizes = tuple(part.shape[1] for part in bias)
    # No decay: with zero biases, each stream would be read and written alike.
    bias_LC = np.concatenate(bias, axis=1)
    self.bias = base.parameter("LC", bias_LC, decays=False)
    self.scale = base.parameter("LC", _SCALE, depth, len(self.sizes))
    shape = depth, streams, config.width
    self.projection = base.parameter("LMDC", 0, *shape, sum(self.sizes))
    if self.has_gain:
      self.gain = base.parameter("LMD", 0, *shape)

  def check(self, streams: int) -> None:
    """Raises ConfigError if the scheme has no matrix of this size."""

  def start(self, streams: int) -> Sequence[np.ndarray]:
    """b_mix, in one part for each scale s."""
    raise NotImplementedError

  def matrix(self, *logits: jax.Array) -> jax.Array:
    """R [M, M, B, T], from one array [C, B, T] per part of `start`."""
    raise NotImplementedError

  def weight(self) -> jax.Array:
    """Of the products [M, D, C], with the gain."""
    weight_MDC = self.projection[...]
    if self.has_gain:
      weight_MDC = weight_MDC * (1 + self.gain[...])[..., None]
    return weight_MDC

  def coefficients(
    self, streams: streams_lib.State
  ) -> streams_lib.Coefficients:
    return self.of_products(products(streams, self.weight(), self.eps))

  def of_products(self, product_CBT: jax.Array) -> streams_lib.Coefficients:
    """The coefficients, given x W."""
    read_MBT, write_MBT, *mix = logits(
      product_CBT, self.bias[...], self.scale[...], self.sizes
    )
    return streams_lib.Coefficients(
      jax.nn.sigmoid(read_MBT),
      2 * jax.nn.sigmoid(write_MBT),
      self.matrix(*mix),
    )

  def open(
    self, state: streams_lib.State, start: int, stop: int
  ) -> tuple[streams_lib.Carry, Any]:
    carry, slots = super().open(state, start, stop)
    if not base.coefficients_are_fixed():
      carry = carry._replace(h_BTD=self.input(carry, None))
    return carry, slots

  def write(
    self, carry: streams_lib.Carry, slot: Any, y_BTD: jax.Array
  ) -> streams_lib.Carry:
    if carry.h_BTD is None:
      return super().write(carry, slot, y_BTD)
    streams, h_BTD, product_CBT = streams_lib.mix(
      carry, base.save(y_BTD), slot.weight(), slot.bias[: self.num_streams],
      slot.scale[0], eps=self.eps, dtype=self.dtype,
    )  # fmt: skip
    streams = tuple(map(base.save, streams))
    return streams_lib.Carry(streams, slot.of_products(product_CBT), h_BTD)


class MHC(Manifold):
  """mHC: R is doubly stochastic, by 20 Sinkhorn iterations.

    K = exp(b + s x W), then 20 times: divide by row sums, by column sums

  Source: arXiv:2512.24880 (not read; the equations are taken from three public
  implementations, which agree). They end on columns: column sums are 1, row
  sums nearly. The backward pass differentiates the iterations, and recomputes
  them first, so that none are kept. The readout is the mean of the streams.

  State: M streams. Parameters per sublayer: (M D + 1) (M^2 + 2 M) + 3.
  """

  style = base.Style("mHC", "#7c3aed", "D")
  certainty = base.Certainty.SUMMARY
  mean = True
  has_gain = False

  def start(self, streams: int) -> Sequence[np.ndarray]:
    return [almost_identity(streams)]

  def matrix(self, *logits: jax.Array) -> jax.Array:
    return doubly_stochastic(*logits)


class MHCLite(Manifold):
  """mHC-lite: R is a softmax mixture of all M! permutation matrices.

  Source: arXiv:2603.15031 Table 2, and the official code of mHC-lite. R is
  exactly doubly stochastic. The identity starts with weight 0.992 for M = 4.
  The readout is the sum of the streams.

  State: M streams. Parameters per sublayer: (M D + 1) (M! + 2 M) + M D + 3.
  """

  style = base.Style("mHC-lite", "#7c3aed", "d", (0, (4, 2.5)))
  certainty = base.Certainty.CODE

  def check(self, streams: int) -> None:
    if streams > 6:
      self.refuse("at most 6 for mhc_lite, which mixes all permutations")

  def start(self, streams: int) -> Sequence[np.ndarray]:
    # The first permutation is the identity.
    return [_CLOSED * (np.arange(math.factorial(streams)) > 0)]

  def matrix(self, *logits: jax.Array) -> jax.Array:
    (logits_CBT,) = logits
    weight_CBT = jax.nn.softmax(logits_CBT, axis=0)
    return combined(permutations(self.num_streams), weight_CBT)


class KromHC(Manifold):
  """KromHC: R is a Kronecker product of 2 x 2 doubly stochastic matrices.

    R = U_1 (x) ... (x) U_log2(M),  U_k = [[p, 1 - p], [1 - p, p]]
    p = softmax(b_k + s x W_k)_0

  Source: arXiv:2601.21579 and its official code. R is symmetric and exactly
  doubly stochastic. Initialisation: b_k = (0, -8). The readout is the sum.

  State: M streams. Parameters per sublayer:
  (M D + 1) (2 M + 2 log2 M) + M D + 3.
  """

  style = base.Style("KromHC", "#0284c7", "P")
  certainty = base.Certainty.CODE

  def check(self, streams: int) -> None:
    if streams < 2 or streams & (streams - 1):
      self.refuse("a power of two for krom_hc")

  def start(self, streams: int) -> Sequence[np.ndarray]:
    factors = streams.bit_length() - 1
    return [np.tile([0.0, _CLOSED], factors)]

  def matrix(self, *logits: jax.Array) -> jax.Array:
    (logits_CBT,) = logits
    product = jnp.ones((1, 1, 1, 1), logits_CBT.dtype)
    for p_BT in jax.nn.sigmoid(logits_CBT[::2] - logits_CBT[1::2]):
      factor = jnp.stack([p_BT, 1 - p_BT, 1 - p_BT, p_BT])
      factor = factor.reshape(1, 2, 1, 2, *p_BT.shape)
      size = 2 * len(product)
      product = product[:, None, :, None] * factor
      product = product.reshape(size, size, *p_BT.shape)
    return product


class SHC(Manifold):
  """sHC: R has rows and columns that sum to one, and norm at most one.

    R = 1/M + Q U diag(tau) V' Q',  tau = tanh(b_3 + s_3 x W_3)
    U = Cayley(g_1 tanh(b_1 + s_1 x W_1)), V = Cayley(g_2 tanh(b_2 + s_2 x W_2))

  with an orthonormal basis Q of the vectors whose entries sum to zero, and
  Cayley(a) = (I + A)^-1 (I - A), A skew-symmetric with a above its diagonal.
  Entries may be negative.

  Source: arXiv:2603.20896 and its official code. Initialisation: b_1 = b_2 = 0,
  b_3 = 4, g = 1: R = 1/M + 0.9993 (I - 1/M). The readout is the sum.

  State: M streams. Parameters per sublayer:
  (M D + 1) (2 M + (M - 1)^2) + M D + 7.
  """

  style = base.Style("sHC", "#be185d", "X")
  certainty = base.Certainty.CODE

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.angle_gain = base.parameter("LC", 1, config.num_sublayers, 2)

  def check(self, streams: int) -> None:
    if streams < 3:
      self.refuse("at least 3 for shc")

  def start(self, streams: int) -> Sequence[np.ndarray]:
    angles = np.zeros((streams - 1) * (streams - 2) // 2)
    return [angles, angles, np.full(streams - 1, 4.0)]

  def matrix(self, *logits: jax.Array) -> jax.Array:
    *angles, singular = map(jnp.tanh, logits)
    gain = self.angle_gain[...][None, :, None, None]
    both = gain * jnp.stack(angles, axis=1)
    rotations = cayley(combined(skew_basis(self.num_streams - 1), both))
    basis_MC = zero_sum_basis(self.num_streams)
    qu, qv = jnp.moveaxis(combined(basis_MC.T, rotations), 2, 0)
    parts = qu[:, None] * singular[None, None] * qv[None]
    return 1 / self.num_streams + jnp.sum(parts, axis=2)


class OHC(Manifold):
  """oHC: R is a rotation of four streams, by two unit quaternions.

    X <- p X conj(q),  p, q = normalised (1, 0, 0, 0) + b + s x W

  with the four streams of a channel as the parts of one quaternion.

  Source: a summary of arXiv:2609.02672; p and q as functions of x are our
  choice, as is the mean as readout. R is orthogonal with determinant one, but
  does not conserve the mean of the streams. Initialisation: b = 0 and R = I.

  State: 4 streams. Parameters per sublayer: (4 D + 1) 16 + 3.
  """

  style = base.Style("oHC", "#b45309", "p")
  certainty = base.Certainty.SUMMARY
  mean = True
  has_gain = False

  def check(self, streams: int) -> None:
    if streams != 4:
      self.refuse("4, the parts of a quaternion, for ohc")

  def start(self, streams: int) -> Sequence[np.ndarray]:
    return [np.zeros(2 * streams)]

  def matrix(self, *logits: jax.Array) -> jax.Array:
    (logits_CBT,) = logits
    p, q = (unit_quaternion(part) for part in jnp.split(logits_CBT, 2))
    table_CMM, conjugate = quaternion_table(), np.array([1, -1, -1, -1])
    left = combined(table_CMM, p)
    right = combined(table_CMM.swapaxes(0, 1) * conjugate[:, None, None], q)
    return jnp.sum(left[:, :, None] * right[None], axis=1)


def products(
  streams: streams_lib.State, weight_MDC: jax.Array, eps: float
) -> jax.Array:
  """The products x W [C, B, T]."""
  product_CBT = streams_lib.projected(streams, weight_MDC)
  return inverse_rms(streams, eps)[None] * product_CBT


def logits(
  product_CBT: jax.Array,
  bias_C: jax.Array,
  scales: Sequence[jax.Array] | jax.Array,
  sizes: Sequence[int],
) -> list[jax.Array]:
  """Parts b + s x W [C, B, T] for each scale s, which has `sizes` columns."""
  cuts = np.cumsum(sizes)[:-1]
  parts = jnp.split(product_CBT, cuts), jnp.split(bias_C, cuts)
  return [
    streams_lib.to_tokens(bias) + scale * part
    for part, bias, scale in zip(*parts, scales)
  ]


def inverse_rms(streams: streams_lib.State, eps: float) -> jax.Array:
  """1 / rms over the channels of all streams together [B, T]."""
  width = len(streams) * streams[0].shape[-1]
  total_BT = streams_lib.total(map(streams_lib.square, streams))
  return jax.lax.rsqrt(total_BT / width + eps)


def almost_identity(size: int) -> np.ndarray:
  """Logits of a doubly stochastic matrix close to the identity."""
  return _CLOSED * (1 - np.eye(size)).ravel()


def doubly_stochastic(logits_CBT: jax.Array) -> jax.Array:
  """`attnres_kernels.sinkhorn` of a flat matrix."""
  size = math.isqrt(len(logits_CBT))
  shape = size, size, *logits_CBT.shape[1:]

  def local(logits_CBT):
    shape = size, size, *logits_CBT.shape[1:]
    matrix = attnres_kernels.sinkhorn(
      logits_CBT.reshape(shape), iterations=_ITERATIONS
    )
    return matrix.reshape(logits_CBT.shape)

  rows = sharding.QUERIED_TOKENS
  split = sharding.by_shards(local, (rows,), rows)
  # There is no product of matrices in it.
  outs = jax.ShapeDtypeStruct(logits_CBT.shape, logits_CBT.dtype)
  return linear.counted(split, logits_CBT, flops=0, outs=outs).reshape(shape)


def permutations(size: int) -> np.ndarray:
  """All permutation matrices [size!, size, size], the identity first."""
  return np.eye(size)[list(itertools.permutations(range(size)))]


def zero_sum_basis(size: int) -> np.ndarray:
  """Orthonormal columns [size, size - 1] that sum to zero (Helmert's)."""
  columns = [
    np.r_[np.ones(i), -i, np.zeros(size - 1 - i)] / math.sqrt(i * (i + 1))
    for i in range(1, size)
  ]
  return np.stack(columns, axis=1)


def skew_basis(size: int) -> np.ndarray:
  """Skew-symmetric matrices with a one at each place above the diagonal."""
  rows, columns = np.triu_indices(size, 1)
  upper = np.zeros((len(rows), size, size))
  upper[np.arange(len(rows)), rows, columns] = 1
  return upper - upper.swapaxes(1, 2)


def combined(matrices: np.ndarray, weight: jax.Array) -> jax.Array:
  """The sum of weight[c] matrices[c], whose axes come first."""
  return jnp.tensordot(
    jnp.asarray(matrices, weight.dtype),
    weight,
    axes=(0, 0),
    precision=jax.lax.Precision.HIGHEST,
  )


def cayley(skew: jax.Array) -> jax.Array:
  """(I + A)^-1 (I - A) of the first two axes, a rotation if A' = -A.

  By elimination without pivots, which I + A does not need: x'(I + A)x = x'x.
  """
  size = len(skew)
  eye = jnp.eye(size, dtype=skew.dtype)
  eye = jnp.expand_dims(eye, range(2, skew.ndim))
  rows = jnp.concatenate([eye + skew, eye - skew], axis=1)
  for k in range(size):
    pivot = rows[k] / rows[k, k][None]
    rows = (rows - rows[:, k, None] * pivot[None]).at[k].set(pivot)
  return rows[:, size:]


def unit_quaternion(offset_CBT: jax.Array) -> jax.Array:
  """(1, 0, 0, 0) + offset, scaled to length one."""
  parts = offset_CBT.at[0].add(1)
  return parts * jax.lax.rsqrt(jnp.sum(jnp.square(parts), axis=0))[None]


def quaternion_table() -> np.ndarray:
  """e_i e_j = sum_k table[i, j, k] e_k."""
  table = np.zeros((4, 4, 4))
  for i in range(4):
    table[0, i, i] = table[i, 0, i] = 1
  for i, j, k in ((1, 2, 3), (2, 3, 1), (3, 1, 2)):
    table[i, j, k], table[j, i, k], table[i, i, 0] = 1, -1, -1
  return table

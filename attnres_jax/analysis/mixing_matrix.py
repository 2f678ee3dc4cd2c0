# SPDX-License-Identifier: Apache-2.0
"""Depth mixing matrices (paper, section 6.2 and Fig. 9).

Under every residual scheme, a sublayer reads a combination of the earlier
outputs, h_l = sum_i M[i -> l] v_i. M has a row per sublayer l = 1..L and a
column per value i = 0..L-1. It is lower triangular including its diagonal: all
ones for the plain sum, 1/l for the running mean, the softmax weights for Full
AttnRes. For Block AttnRes, an entry is the weight of the block (completed or
open) that contains the value.

No scheme has a formula here. The coefficients that depend on the input are held
fixed (`models.residuals.tools.coefficient`), and each output is varied in turn
along a probe of random signs: what arrives at a read is M times the probe. An
entry is a mean over channels and tokens, exact where M scales each channel.
Where an entry is a matrix over channels, the result estimates the mean of its
diagonal without bias, and `norms=True` measures its size.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Int
import numpy as np

from attnres_jax import models
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import tools


def mixing_matrix(
  model: models.Transformer,
  tokens: Int[Array | np.ndarray, "B T"],
  *,
  include_output: bool = False,
  norms: bool = False,
  channel: int | None = None,
  probe: int = 0,
) -> np.ndarray:
  """M of `model`, averaged over tokens.

  Args:
    model: a network with any residual scheme.
    tokens: inputs, if the weights depend on the input.
    include_output: whether to add the row of the final read and the column of
      v_L.
    norms: the root mean square of |M p| / |p| over tokens, for the probe p, in
      place of the mean gain: for schemes that mix channels or tokens.
    channel: the gain of this channel alone, in place of the mean over channels.
    probe: seed of the probe. A gain that depends on it shows that M mixes
      channels or tokens.

  Returns:
    [L, L], or [L + 1, L + 1] with the output; zero above the diagonal.
  """
  gains_LLD, norms_LL = _responses(model, jnp.asarray(tokens), probe)
  if norms:
    rows = norms_LL
  elif channel is None:
    rows = jnp.mean(gains_LLD, axis=-1)
  else:
    rows = gains_LLD[..., channel]
  rows = np.asarray(rows, np.float64)
  return rows if include_output else rows[:-1, :-1]


def semiseparable_rank(matrix: np.ndarray, tolerance: float = 1e-5) -> int:
  """The largest rank of a block that contains the lower left corner.

  It is max over l of rank(M[l:, :l+1]) of a lower triangular M [L, L]: 1 for a
  single stream, m for m streams, at most about L / 2 for Full AttnRes. Singular
  values below this share of the matrix's largest count as zero.
  """
  least = tolerance * np.linalg.norm(matrix, 2)
  return max(
    int(np.linalg.matrix_rank(matrix[l:, : l + 1], tol=least))
    for l in range(len(matrix))
  )


@jax.jit
def _responses(
  model: models.Transformer, tokens_BT: jax.Array, probe: jax.typing.ArrayLike
) -> tuple[jax.Array, jax.Array]:
  """How read l (a row) responds to value i (a column), each of L + 1.

  Returns:
    Gains of each channel [L + 1, L + 1, D], and norms [L + 1, L + 1].
  """
  scheme = model.residual
  values = jnp.stack(
    [v_BTD.astype(scheme.dtype) for v_BTD in model.trace(tokens_BT).values]
  )
  probe_BTD = jax.random.rademacher(
    jax.random.key(probe), values.shape[1:], values.dtype
  )

  def respond(i: jax.Array) -> tuple[jax.Array, jax.Array]:
    tangents = jnp.zeros_like(values).at[i].set(probe_BTD)
    reads = map(base.query_input, response(scheme, values, tangents))
    reads = jnp.stack([*reads]).astype(jnp.float32)
    gains_LD = jnp.mean(
      reads * probe_BTD[None].astype(jnp.float32), axis=(1, 2)
    )
    return gains_LD, jnp.sqrt(jnp.mean(jnp.square(reads), axis=(1, 2, 3)))

  gains_LLD, norms_LL = jax.lax.map(respond, jnp.arange(len(values)))
  return jnp.swapaxes(gains_LLD, 0, 1), norms_LL.T


def response(
  scheme: base.Residual, values: jax.Array, tangents: jax.Array
) -> list[Any]:
  """How each read changes with the values, at fixed coefficients.

  Values v_0, ..., v_L and their tangents are stacked: [L + 1, B, T, D]. Returns
  L + 1 changes [B, T, D], of h_1, ..., h_L and h_out; `QKV` where a mixer has
  several inputs.
  """

  def reads(values: jax.Array) -> list[Any]:
    mixtures = []

    def sublayer(l: int, carry: Any, slot: Any) -> jax.Array:
      mixtures.append(base.before_norm(scheme, carry, slot))
      return values[l + 1]

    state = base.run_through(scheme, values[0], sublayer)
    return [*mixtures, scheme.readout(state)]

  with tools.fixed_coefficients():
    return jax.jvp(reads, (values,), (tangents,))[1]

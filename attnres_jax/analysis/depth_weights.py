# SPDX-License-Identifier: Apache-2.0
"""The softmax weights over depth, averaged over tokens, as in Fig. 8.

The paper draws two heatmaps per network: one of the reads of attention
sublayers, one of the reads of MLPs. Row l is the l-th transformer block, a
column is a source: 0 the embedding, then sublayer outputs (Full) or completed
blocks with the open, partial block after the last of them (Block).
"""

from collections.abc import Sequence
import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Int
import numpy as np

from attnres_jax import models


@dataclasses.dataclass(frozen=True)
class DepthWeights:
  """Mean weights and entropies of every read of a network.

  Attributes:
    attention: [transformer blocks, columns], what the attention sublayers read;
      NaN if a source does not exist yet. Each row sums to 1, minus the weight
      of a null source; a read of several heads has their mean; sources outside
      a window, and all of a read that does not attend, have 0.
    mlp: [transformer blocks, columns], what the MLPs read.
    output: [sources], what the final norm and the head read.
    columns, output_columns: names of the sources.
    attention_entropy, mlp_entropy: [transformer blocks], mean over tokens of
      the entropy of the weights, in nats; 0 if there is only one source.
    output_entropy: of the weights of the output.
  """

  attention: np.ndarray
  mlp: np.ndarray
  output: np.ndarray
  columns: tuple[str, ...]
  output_columns: tuple[str, ...]
  attention_entropy: np.ndarray
  mlp_entropy: np.ndarray
  output_entropy: float


def depth_weights(
  model: models.Transformer, tokens: Int[Array | np.ndarray, "B T"]
) -> DepthWeights:
  """The depth-attention weights of a network, averaged over all tokens.

  Raises:
    ValueError: the scheme has no depth attention (`mixing_matrix` describes
      every scheme).
  """
  means = mean_weights(model, jnp.asarray(tokens))
  labels = model.residual.source_labels()
  if means is None or labels is None:
    raise ValueError(
      f"{type(model.residual).__name__} has no depth attention;"
      " attnres_jax.analysis.mixing_matrix describes every scheme"
    )
  weights = [np.asarray(weight_M, np.float64) for weight_M, _ in means]
  entropies = np.asarray([entropy for _, entropy in means], np.float64)
  widest = max(labels[:-1], key=len)
  return DepthWeights(
    attention=stack_rows(weights[:-1:2], len(widest)),
    mlp=stack_rows(weights[1:-1:2], len(widest)),
    output=weights[-1],
    columns=tuple(_column_name(i, widest) for i in range(len(widest))),
    output_columns=tuple(labels[-1]),
    attention_entropy=entropies[:-1:2],
    mlp_entropy=entropies[1:-1:2],
    output_entropy=float(entropies[-1]),
  )


@jax.jit
def mean_weights(
  model: models.Transformer, tokens_BT: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], ...] | None:
  """(mean weights [M], mean entropy) of reads 1..L+1, or None without any."""
  weights = model.residual.depth_weights(model.trace(tokens_BT).values)
  if weights is None:
    return None
  return tuple(
    (jnp.mean(w_MBT, axis=(1, 2)), jnp.mean(_entropy(w_MBT)))
    for w_MBT in weights
  )


def _entropy(weight_MBT: jax.Array) -> jax.Array:
  return jnp.sum(jax.scipy.special.entr(weight_MBT), axis=0)


def stack_rows(rows: Sequence[np.ndarray], width: int) -> np.ndarray:
  """Rows of several lengths, with NaN where a source does not exist."""
  padded = [
    np.pad(row, (0, width - len(row)), constant_values=np.nan) for row in rows
  ]
  return np.stack(padded)


def _column_name(index: int, widest: tuple[str, ...]) -> str:
  # The partial block n is in the column that block n occupies once it is
  # complete, so that column has the block's name.
  return f"block {index}" if widest[index] == "partial" else widest[index]

# SPDX-License-Identifier: Apache-2.0
"""Depth mixing matrices (paper, section 6.2 and Fig. 9).

Under every residual scheme, a sublayer reads a combination of the earlier
outputs, h_l = sum_i M[i -> l] v_i. M has a row per sublayer l = 1..L and a
column per value i = 0..L-1, and is lower triangular including its diagonal: all
ones for the plain sum, 1/l for the running mean, the softmax weights for Full
AttnRes, and for Block AttnRes the weight of the block (completed or open) that
contains the value.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Int
import numpy as np

from attnres_jax import models
from attnres_jax.models.residuals import base


def mixing_matrix(
  model: models.Transformer,
  tokens: Int[Array | np.ndarray, "B T"],
  *,
  include_output: bool = False,
) -> np.ndarray:
  """M of `model`, averaged over tokens.

  Args:
    model: a network with any residual scheme.
    tokens: inputs, if the weights depend on the input.
    include_output: whether to add the row of the final read and the column of
      v_L.

  Returns:
    [L, L], or [L + 1, L + 1] with the output; zero above the diagonal.
  """
  weights = _mean_weights(model, jnp.asarray(tokens))
  labels = model.residual.source_labels()
  if weights is None or labels is None:
    rows = _fixed_coefficients(model.residual)
  else:
    rows = _spread([np.asarray(weight_M) for weight_M in weights], labels)
  return rows if include_output else rows[:-1, :-1]


@jax.jit
def _mean_weights(model, tokens_BT):
  weights = model.residual.depth_weights(model.trace(tokens_BT).values)
  if weights is None:
    return None
  return tuple(jnp.mean(w_MBT, axis=(1, 2)) for w_MBT in weights)


def _spread(
  weights: list[np.ndarray], labels: Iterable[tuple[str, ...]]
) -> np.ndarray:
  """Gives every value the weight of the source that contains it."""
  size = len(weights)
  matrix = np.zeros((size, size))
  for row, (weight_M, members) in enumerate(
    zip(weights, _source_members(labels), strict=True)
  ):
    for weight, values in zip(weight_M, members, strict=True):
      matrix[row, list(values)] += weight
  return matrix


def _source_members(
  labels: Iterable[tuple[str, ...]],
) -> list[list[tuple[int, ...]]]:
  """For every read, the values (0 is the embedding) that each source sums.

  A block is closed when it first appears as a source: it then contains all
  values since the previous block. The partial block contains those since the
  last closed one.
  """
  blocks: dict[str, tuple[int, ...]] = {}
  closed = 0  # the last value inside a completed block
  reads = []
  for written, names in enumerate(labels):
    members: list[tuple[int, ...]] = []
    for name in names:
      kind, _, number = name.partition(" ")
      if kind == "embedding":
        members.append((0,))
      elif kind == "sublayer":
        members.append((int(number),))
      elif kind == "partial":
        members.append(tuple(range(closed + 1, written + 1)))
      elif kind == "block":
        if name not in blocks:
          blocks[name] = tuple(range(closed + 1, written + 1))
          closed = written
        members.append(blocks[name])
      else:
        raise ValueError(f"a source of unknown kind: {name!r}")
    reads.append(members)
  return reads


def _fixed_coefficients(scheme: base.Residual) -> np.ndarray:
  """Runs the scheme on unit vectors, so that each read is its row of M.

  Correct for schemes whose coefficients do not depend on the values.
  """
  unit_LLBTD = jnp.eye(scheme.num_sublayers + 1)[:, None, None]
  rows = []

  def sublayer(l: int, h_BTD: jax.Array) -> jax.Array:
    rows.append(h_BTD)
    return unit_LLBTD[l + 1]

  rows.append(scheme.readout(base.run_through(scheme, unit_LLBTD[0], sublayer)))
  return np.stack([np.asarray(row, np.float64)[0, 0] for row in rows])

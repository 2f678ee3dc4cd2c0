# SPDX-License-Identifier: Apache-2.0
"""What `attnres_kernels.experts` computes, one grouped product after the other.

Axes as in `expert_parallel`.
"""

import functools

import jax
import jax.numpy as jnp

from attnres_jax.common import precision
from attnres_jax.models import grouped_matmul
from attnres_kernels.experts import pallas_tpu as kernels


def _weighted(
  units: kernels.Units, sizes_E: jax.Array, both_JC: jax.Array,
  weight_J: jax.Array,
) -> jax.Array:  # fmt: skip
  """Weighted hidden units, with zeros for padding."""
  real_J = jnp.arange(both_JC.shape[0]) < jnp.sum(sizes_E)
  gate, up = (
    jnp.where(real_J[:, None], precision.widen(a), 0.0)
    for a in jnp.split(both_JC, 2, axis=1)
  )
  return (weight_J[:, None] * units(gate, up)).astype(both_JC.dtype)


def _side_by_side(gate_and_up_EGFD: jax.Array) -> jax.Array:
  """[E, C, D]."""
  experts, _, _, width = gate_and_up_EGFD.shape
  return jnp.reshape(gate_and_up_EGFD, (experts, -1, width))


def forward(
  units: kernels.Units, x_JD: jax.Array, weight_J: jax.Array,
  sizes_E: jax.Array, gate_and_up_EGFD: jax.Array, down_EFD: jax.Array,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
  """`kernels.forward`, one product after the other, and the first of them."""
  gate_and_up_ECD = _side_by_side(gate_and_up_EGFD)
  both_JC = grouped_matmul.multiply(
    x_JD, gate_and_up_ECD, sizes_E, transposed=True
  )
  hidden_JF = _weighted(units, sizes_E, both_JC, weight_J)
  return grouped_matmul.multiply(hidden_JF, down_EFD, sizes_E), both_JC


def backward(
  units: kernels.Units, both_JC: jax.Array | None, x_JD: jax.Array,
  weight_J: jax.Array, sizes_E: jax.Array, gate_and_up_EGFD: jax.Array,
  down_EFD: jax.Array, dy_JD: jax.Array, *existing: jax.Array,
) -> tuple[jax.Array, ...]:  # fmt: skip
  """`kernels.backward`, one product after the other."""
  gate_and_up_ECD = _side_by_side(gate_and_up_EGFD)
  if both_JC is None:
    both_JC = grouped_matmul.multiply(
      x_JD, gate_and_up_ECD, sizes_E, transposed=True
    )
  hidden_JF, pull = jax.vjp(
    functools.partial(_weighted, units, sizes_E), both_JC, weight_J
  )
  dboth_JC, dweight_J = pull(
    grouped_matmul.multiply(dy_JD, down_EFD, sizes_E, transposed=True)
  )
  factors = (dboth_JC, x_JD), (hidden_JF, dy_JD)
  dmatrices = []
  for i, matrix in enumerate((gate_and_up_EGFD, down_EFD)):
    before = None
    if existing:
      before = existing[i] if i else _side_by_side(existing[i])
    dmatrix = grouped_matmul.weight_gradient(*factors[i], sizes_E, before)
    dmatrices.append(jnp.reshape(dmatrix, matrix.shape))
  dx_JD = grouped_matmul.multiply(dboth_JC, gate_and_up_ECD, sizes_E)
  return dx_JD, dweight_J, *dmatrices

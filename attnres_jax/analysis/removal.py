# SPDX-License-Identifier: Apache-2.0
"""The importance of a source to a read, against the weight it has there.

One source is removed from one read, everything after it is computed again, and
the loss is measured. A weight is routing mass; only the change of the loss is
causal importance, and the two need not agree (arXiv:2606.13168 asks the
question; the procedure is ours).

A read is a linear map of the earlier outputs, given its coefficients (see
`mixing_matrix`). Removing a source subtracts its term and does not change the
others. A softmax that gives this weight to the remaining sources in proportion
does the same. It multiplies the read of each token by a number, which the norm
behind it takes out again (up to its epsilon).

Sources are values v_0..v_L or, in schemes with blocks, what a block contains so
far: column n is block n, as in `depth_weights`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Int
import numpy as np

from attnres_jax import models
from attnres_jax.analysis import edited

# The package's names are functions, which hide the modules.
from attnres_jax.analysis.depth_weights import mean_weights
from attnres_jax.analysis.depth_weights import stack_rows
from attnres_jax.analysis.magnitudes import cross_entropy
from attnres_jax.analysis.mixing_matrix import response
from attnres_jax.models.residuals import base


@dataclasses.dataclass(frozen=True)
class Removal:
  """One network, one batch.

  Attributes:
    importance: [L + 1, sources], the loss without this source in this read,
      minus the loss, in nats per token; NaN where there is no such source yet.
      The last row is the readout.
    weights: [L + 1, sources], the mean softmax weight; None for a scheme
      without depth attention.
    sources: a name per column.
    loss: the mean cross-entropy of the network, in nats per token.
  """

  importance: np.ndarray
  weights: np.ndarray | None
  sources: tuple[str, ...]
  loss: float


def source_removal(
  model: models.Transformer, tokens: Int[Array | np.ndarray, "B T"]
) -> Removal:
  """Removes each source from each read of `model` in turn.

  Runs the network about L M / 2 times, for M sources. The loss is of all
  columns of the tokens but the first.
  """
  tokens_BT = jnp.asarray(tokens)
  members = _members(model)
  loss, losses_ML = _losses(model, tokens_BT, members)
  exists = np.argmax(members, axis=1) <= np.arange(members.shape[1])[:, None]
  importance = np.asarray(losses_ML, np.float64).T - float(loss)
  return Removal(
    importance=np.where(exists, importance, np.nan),
    weights=_weights(model, tokens_BT[:, :-1], len(members)),
    sources=_names(members),
    loss=float(loss),
  )


def _members(model: models.Transformer) -> np.ndarray:
  """Whether a source [M] contains a value [L + 1]: float32 zeros and ones."""
  values = np.arange(model.residual.num_sublayers + 1)
  sources = -(-values // (model.residual.block_size or 1))
  members = sources == np.arange(sources[-1] + 1)[:, None]
  return members.astype(np.float32)


def _names(members: np.ndarray) -> tuple[str, ...]:
  if np.all(members.sum(1) == 1):
    return ("embedding", *(f"sublayer {i}" for i in range(1, len(members))))
  return ("embedding", *(f"block {i}" for i in range(1, len(members))))


@jax.jit
def _losses(model, tokens_BT, members_ML):
  """The loss, and that without a source in a read, [M, L + 1]."""
  inputs_BT = tokens_BT[:, :-1]
  scheme = model.residual
  values = jnp.stack(
    [v_BTD.astype(scheme.dtype) for v_BTD in model.trace(inputs_BT).values]
  )
  last = len(values) - 1

  def loss(**edits):
    changed = edited.Edited(scheme, **edits)
    logits_BTV = edited.logits(model, changed, inputs_BT)
    return cross_entropy(logits_BTV, tokens_BT)

  plain = loss()

  def without(member_L):
    tangents = values * member_L[:, None, None, None].astype(values.dtype)
    *parts, part_of_readout = response(scheme, values, tangents)
    # Only some reads of a network may have several inputs.
    parts = jax.tree.map(lambda *a: jnp.stack(a), *map(base.qkv, parts))

    def at(row):
      def read(l, h):
        changed = jax.tree.map(
          lambda h, part: jnp.where(l == row, h - part[l], h),
          base.qkv(h),
          parts,
        )
        return changed if isinstance(h, base.QKV) else changed.query

      def readout(h_BTD):
        return jnp.where(row == last, h_BTD - part_of_readout, h_BTD)

      return loss(read=read, readout=readout)

    exists_L = jnp.argmax(member_L) <= jnp.arange(last + 1)
    return jax.lax.map(
      lambda xs: jax.lax.cond(xs[1], at, lambda _: plain, xs[0]),
      (jnp.arange(last + 1), exists_L),
    )

  return plain, jax.lax.map(without, members_ML)


def _weights(
  model: models.Transformer, tokens_BT: jax.Array, num_sources: int
) -> np.ndarray | None:
  means = mean_weights(model, tokens_BT)
  if means is None:
    return None
  rows = [np.asarray(weight_M, np.float64) for weight_M, _ in means]
  return stack_rows(rows, num_sources)

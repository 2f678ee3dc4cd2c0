# SPDX-License-Identifier: Apache-2.0
"""Interventions: reads and outputs of a network are changed on their way."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attnres_jax import models
from attnres_jax.models import trunk
from attnres_jax.models.residuals import base

Edit = Callable[[jax.Array, Any], Any]


def _same(l: jax.Array, x: Any) -> Any:
  del l
  return x


class Edited(base.Residual):
  """A scheme whose reads and writes pass through functions.

  States and carries are the scheme's. A slot is a pair: the sublayer's number
  and the scheme's slot.
  """

  def __init__(
    self,
    scheme: base.Residual,
    *,
    read: Edit = _same,
    write: Edit = _same,
    readout: Callable[[jax.Array], jax.Array] = lambda h_BTD: h_BTD,
  ):
    """Wraps a scheme.

    Args:
      scheme: any.
      read: maps l, an int32 counted from 0, and the input of sublayer l + 1
        before its norm ([B, T, D], or `QKV`) to a new input.
      write: maps l and the output of sublayer l + 1 to the array to write.
      readout: maps h_out [B, T, D] to the input of the final norm.
    """
    self.scheme = scheme
    self.edit_read = read
    self.edit_write = write
    self.edit_readout = readout

  def segments(self) -> tuple[tuple[int, int], ...]:
    return self.scheme.segments()

  def init(self, embedding_BTD: jax.Array) -> Any:
    return self.scheme.init(embedding_BTD)

  def open(self, state: Any, start: int, stop: int) -> tuple[Any, Any]:
    carry, slots = self.scheme.open(state, start, stop)
    return carry, (jnp.arange(start, stop), slots)

  def read(
    self, carry: Any, slot: Any, norm: base.Norm
  ) -> tuple[jax.Array | base.QKV, Any]:
    l, slot = slot
    h = self.edit_read(l, base.before_norm(self.scheme, carry, slot))
    return self.scheme.normed(carry, h, norm), carry

  def write(self, carry: Any, slot: Any, y_BTD: jax.Array) -> Any:
    l, slot = slot
    return self.scheme.write(carry, slot, self.edit_write(l, y_BTD))

  def close(self, state: Any, carry: Any, stop: int) -> Any:
    return self.scheme.close(state, carry, stop)

  def readout(self, state: Any) -> jax.Array:
    return self.edit_readout(self.scheme.readout(state))


def logits(
  model: models.Transformer, scheme: base.Residual, tokens_BT: jax.Array
) -> jax.Array:
  """Logits [B, T, V] of a network under another scheme, by sublayer."""
  trace = trunk.Trunk.of(model.config, scheme).trace(
    model.sublayers, model.embedding.encode(tokens_BT)
  )
  return model.embedding.decode(model.final_norm(trace.reads[-1]))

# SPDX-License-Identifier: Apache-2.0
"""Magnitudes along depth (paper, Fig. 5b and 5c).

The paper plots an output magnitude and a gradient magnitude per transformer
block without defining them. Here, the output magnitude is the RMS over the
width, averaged over tokens, of the running state after the block (for Block
AttnRes the open partial sum, which restarts at each block boundary). The
gradient is of all parameters of the block.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array
from jaxtyping import Int
import numpy as np
import optax

from attnres_jax import models
from attnres_jax import optimizer as optimizer_lib
from attnres_jax.analysis import edited
from attnres_jax.models import layer_stacks


@dataclasses.dataclass(frozen=True)
class Magnitudes:
  """One network, one batch.

  Attributes:
    state_rms: [transformer blocks], running state after each block.
    output_rms: [sublayers], output of each sublayer.
    read_rms: [sublayers], input of each sublayer, before its norm.
    grad_norm: [transformer blocks], L2 norm of the gradient of the mean
      cross-entropy with respect to all parameters of the block.
    output_grad_rms: [sublayers], the gradient of the summed cross-entropy of a
      sequence with respect to the output of each sublayer: RMS over the width,
      mean over tokens. Where the scheme adds the output to a sum, this is also
      the gradient with respect to the sum.
    loss: the mean cross-entropy, in nats per token.
  """

  state_rms: np.ndarray
  output_rms: np.ndarray
  read_rms: np.ndarray
  grad_norm: np.ndarray
  output_grad_rms: np.ndarray
  loss: float


def magnitudes(
  model: models.Transformer, tokens: Int[Array | np.ndarray, "B T"]
) -> Magnitudes:
  """Measures `model` on `tokens`, whose last column is only a target.

  To average over several batches, as in the paper's figure, call it once per
  batch.
  """
  tokens_BT = jnp.asarray(tokens)
  state_L, output_L, read_L = _rms(model, tokens_BT[:, :-1])
  loss, grad_norm_L, output_grad_L = _gradient(model, tokens_BT)
  return Magnitudes(
    state_rms=np.asarray(state_L)[1::2],
    output_rms=np.asarray(output_L),
    read_rms=np.asarray(read_L),
    grad_norm=np.asarray(grad_norm_L),
    output_grad_rms=np.asarray(output_grad_L),
    loss=float(loss),
  )


@jax.jit
def _rms(model, tokens_BT):
  trace = model.trace(tokens_BT)
  states = model.residual.running_state(trace)
  return tuple(
    jnp.stack([_mean_rms(x_BTD) for x_BTD in arrays])
    for arrays in (states, trace.values[1:], trace.reads[:-1])
  )


def _mean_rms(x_BTD: jax.Array) -> jax.Array:
  x_BTD = x_BTD.astype(jnp.float32)
  return jnp.mean(jnp.sqrt(jnp.mean(jnp.square(x_BTD), axis=-1)))


@jax.jit
def _gradient(model, tokens_BT):
  inputs_BT = tokens_BT[:, :-1]
  x_BTD = model.embedding.encode(inputs_BT)
  num_sublayers = model.residual.num_sublayers
  offsets = jnp.zeros((num_sublayers, *x_BTD.shape), x_BTD.dtype)

  def loss(model, offsets):
    scheme = edited.Edited(
      model.residual, write=lambda l, y_BTD: y_BTD + offsets[l]
    )
    logits_BTV = edited.logits(model, scheme, inputs_BT)
    return cross_entropy(logits_BTV, tokens_BT)

  value, (gradient, by_output) = jax.value_and_grad(loss, (0, 1))(
    model, offsets
  )
  # Of a sum over targets, which does not depend on how many others there are.
  by_output = inputs_BT.size * jnp.stack([_mean_rms(g) for g in by_output])
  # Without selection biases, whose gradient is a load.
  of_sublayers = optimizer_lib.trained(gradient).sublayers
  kinds = model.config.sublayer_kinds
  return value, layer_stacks.block_norms(of_sublayers, kinds), by_output


def cross_entropy(
  logits_BTV: jax.Array, tokens_BT: Int[Array | np.ndarray, "B T"]
) -> jax.Array:
  """The mean over all but the first column of the tokens, in nats."""
  return jnp.mean(
    optax.softmax_cross_entropy_with_integer_labels(
      logits_BTV, tokens_BT[:, 1:]
    )
  )

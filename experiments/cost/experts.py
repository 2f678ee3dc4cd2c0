# SPDX-License-Identifier: Apache-2.0
"""One sublayer of routed experts, in three forms with the same routing.

grouped     as in `Moe`: rows sorted by expert, and a loop over pieces on CPUs
dense       one einsum over all experts, then a mask
ragged_dot  as `grouped`, with `jax.lax.ragged_dot` in place of the loop; on a
            CPU it makes one masked copy of all rows per expert
"""

import functools
from unittest import mock

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax.models import grouped_matmul
from attnres_jax.models import moe
from experiments.cost import networks

BASELINE = "grouped"
FORMS = (BASELINE, "dense", "ragged_dot")


def calls(network: networks.Network, form: str) -> dict:
  """Both passes of one form, compiled."""
  module = build(network)
  shape = 1, network.tokens, network.model.width
  x_BTD = jax.random.normal(jax.random.key(1), shape)
  return {
    name: functools.partial(
      jax.jit(function).lower(module, x_BTD).compile(), module, x_BTD
    )
    for name, function in passes(form).items()
  }


def build(network: networks.Network) -> moe.Moe:
  """The sublayer."""
  return moe.Moe(network.model, rngs=nnx.Rngs(params=0))


def passes(form: str) -> dict:
  """Forward, and forward and backward, of a module and its input."""
  forward = functools.partial(_apply, form)
  loss = lambda module, x_BTD: jnp.sum(jnp.square(forward(module, x_BTD)))
  return {
    "experts forward": forward,
    "experts forward_backward": jax.grad(loss, argnums=(0, 1)),
  }


def _apply(form, module, x_BTD):
  if form == "dense":
    return _dense(module, x_BTD[0])[None]
  if form == BASELINE:
    return module(x_BTD)
  ragged = lambda operands, _, tpu: tpu(*operands)
  with (
    mock.patch.object(grouped_matmul.dispatch, "by_platform", ragged),
    mock.patch.object(grouped_matmul, "_fits_kernel", lambda rows: False),
  ):
    return module(x_BTD)


def _dense(module, x_UD):
  weight_UK, expert_UK = module.route(x_UD)
  rows_U1 = jnp.arange(x_UD.shape[0])[:, None]
  weight_UE = jnp.zeros((x_UD.shape[0], module.router[...].shape[1]))
  weight_UE = weight_UE.at[rows_U1, expert_UK].set(weight_UK)
  gate_EUF = jnp.einsum("UD,EDF->EUF", x_UD, module.gate[...])
  up_EUF = jnp.einsum("UD,EDF->EUF", x_UD, module.up[...])
  hidden_EUF = jax.nn.silu(gate_EUF) * up_EUF * weight_UE.T[..., None]
  return jnp.einsum("EUF,EFD->UD", hidden_EUF, module.down[...])

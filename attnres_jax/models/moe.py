# SPDX-License-Identifier: Apache-2.0
"""Fine-grained mixture of experts, balanced without an auxiliary loss.

  z = sigmoid(W_r x)                               per expert, float32
  chosen = the k experts with the largest z + b
  w = scaling_factor z / (sum of z over the chosen)
  y = sum over the chosen of w_e MLP_e(x) + MLP_shared(x)

(arXiv:2412.19437 section 2.1.2 and arXiv:2502.16982 appendix C.) The selection
bias b only affects which experts are chosen, and gradients do not train it.
After a step, `optimizer.balance_update` changes it according to the deviation
of the load from its mean. Rows are sorted by expert, and no token is dropped.

Routed experts may share a latent, which is narrower than x (Kimi K3):

  y = W_u RMSNorm(sum over the chosen of w_e MLP_e(W_d x)) + MLP_shared(x)

The load is returned as a gradient: the gradient of the leaf `selection_bias` IS
the number of tokens that were routed to each expert. So it passes through
scans, activation checkpointing, pipelines and reductions over devices and
microbatches like any other gradient, and is summed over the global batch.

Certain: sigmoid, top-k, renormalisation, the factor, the shared expert, the
update. Inferred: that w is computed from z without b. One public copy of the
released code adds b in place to a view of z, so that it leaks into w; later
code of the same team does not.

Axes besides the letters of `attnres_jax.models`: U tokens of the batch,
flattened; K experts of a token; P = U K pairs.
"""

import dataclasses
import functools
import math

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.common import sharding
from attnres_jax.models import expert_parallel
from attnres_jax.models import linear
from attnres_jax.models import mlp
from attnres_jax.models import norm as norm_lib

_WEIGHT_EPS = 1e-20  # Added to the sum of chosen scores.


class Moe(nnx.Module):
  """Routed and shared gated experts."""

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    width, shape = config.width, config.moe
    experts, hidden = shape.num_experts, shape.expert_width
    self.top_k = shape.top_k
    self.scaling_factor = shape.scaling_factor
    self.activation = config.activation
    latent = shape.latent_width
    matrix = linear.matrices(config.init_std, rngs)

    self.router = matrix("D|E", width, experts, wide=True)
    self.selection_bias = nnx.Param(
      jnp.zeros(experts, jnp.float32), axes="E", load=True
    )
    self.latent_down = matrix("D|R", width, latent) if latent else None
    self.latent_norm = norm_lib.optional(
      shape.latent_norm, latent, config.norm_eps, "R"
    )
    self.latent_up = matrix("R|D", latent, width) if latent else None
    self.gate = matrix("E|D|F", experts, latent or width, hidden)
    self.up = matrix("E|D|F", experts, latent or width, hidden)
    self.down = matrix("E|F|D", experts, hidden, latent or width)
    shared = dataclasses.replace(config, mlp_width=shape.num_shared * hidden)
    self.shared = mlp.SwiGLU(shared, rngs=rngs) if shape.num_shared else None

  def scale_values(self, factor: float) -> None:
    """Multiplies the weights of all experts."""
    linear.scale(factor, self.gate, self.up, self.down)
    if self.shared is not None:
      self.shared.scale_values(factor)

  def __call__(
    self, x_BTD: jax.Array, segment_ids_BT: jax.Array | None = None
  ) -> jax.Array:
    """Applies to each token its experts and the shared experts.

    Args:
      x_BTD: normalised input.
      segment_ids_BT: tokens of segment 0 are padding, which does not count as
        load.
    """
    # Tokens are sorted within each device. Parameters that all tokens need are
    # gathered; experts stay sharded.
    apply = lambda rows, module: module.local(*rows)
    if sharding.scatters():
      # Each device computes its hidden units of all experts.
      cuts = sharding.map_parameters(_narrow_cut, self)
      apply = sharding.scatter_sum(apply, sharding.SEQUENCES, cuts)
    else:
      apply = sharding.by_rows(apply, sharding.map_parameters(_cut, self))
    if self.latent_down is None or self.latent_up is None:
      return apply((x_BTD, segment_ids_BT), self)
    low_BTR = linear.linear(x_BTD, self.latent_down[...])
    low_BTR = apply((x_BTD, segment_ids_BT, low_BTR), self)
    # Checkpointed, so that nothing is kept in float32.
    norm = jax.checkpoint(lambda norm, x: norm(x))
    low_BTR = norm(self.latent_norm, low_BTR)
    y_BTD = linear.linear(low_BTR, self.latent_up[...])
    return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD)

  def local(
    self,
    x_BTD: jax.Array,
    segment_ids_BT: jax.Array | None,
    low_BTR: jax.Array | None = None,
  ) -> jax.Array:
    """The same for the rows of one device; of latents, the routed sum only.

    Experts may be sharded. If there are fewer than the router has, they are
    this device's along `expert`; if they are narrower, `fsdp` cuts them.
    """
    x_UD = jnp.reshape(x_BTD, (-1, x_BTD.shape[-1]))
    counts_U = None
    if segment_ids_BT is not None:
      counts_U = jnp.reshape(segment_ids_BT, -1) > 0
    weight_UK, expert_UK = self.route(x_UD, counts_U)
    if low_BTR is not None:
      low_UR = jnp.reshape(low_BTR, (len(x_UD), -1))
      y_UR = self._routed(low_UR, weight_UK, expert_UK)
      return jnp.reshape(y_UR, low_BTR.shape)
    y_BTD = jnp.reshape(self._routed(x_UD, weight_UK, expert_UK), x_BTD.shape)
    return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD)

  def route(
    self, x_UD: jax.Array, counts_U: jax.Array | None = None
  ) -> tuple[jax.Array, jax.Array]:
    """weight_UK, float32, of the outputs of the experts of tokens, expert_UK.

    Weights sum to the scaling factor over K. Equal scores go to the expert with
    the lower index. `counts_U` says which tokens count as load.
    """
    logits_UE = _logits(x_UD, self.router[...])
    score_UE = jax.nn.sigmoid(logits_UE)
    bias_E = self.selection_bias[...]
    biased_UE = jax.lax.stop_gradient(score_UE + bias_E[None])
    _, expert_UK = jax.lax.top_k(biased_UE, self.top_k)
    chosen_UK = jnp.take_along_axis(score_UE, expert_UK, axis=1)
    sum_U1 = jnp.sum(chosen_UK, axis=1, keepdims=True) + _WEIGHT_EPS
    load_E = expert_counts(expert_UK, bias_E.shape[0], counts_U)
    weight_UK = _report_load(
      self.scaling_factor * chosen_UK / sum_U1,
      bias_E,
      load_E.astype(bias_E.dtype),
    )
    return weight_UK, expert_UK

  def _routed(
    self, x_UD: jax.Array, weight_UK: jax.Array, expert_UK: jax.Array
  ) -> jax.Array:
    """The weighted sum of the outputs of the chosen experts."""
    weights = self.gate[...], self.up[...], self.down[...]
    sizes = expert_counts(expert_UK, self.router[...].shape[1])
    return linear.counted(
      functools.partial(expert_parallel.apply_experts, self.activation),
      x_UD, weight_UK, expert_UK, sizes, *weights,
      flops=6 * expert_UK.size * math.prod(weights[0].shape[1:]),
      outs=x_UD,
    )  # fmt: skip


def expert_counts(
  expert_UK: jax.Array, num_experts: int, counts_U: jax.Array | None = None
) -> jax.Array:
  """The number of tokens routed to each expert, int32 [E].

  `counts_U` says which tokens count; by default, all do.
  """
  chosen_UKE = expert_UK[..., None] == jnp.arange(num_experts)[None, None]
  if counts_U is not None:
    chosen_UKE &= counts_U[:, None, None]
  return jnp.sum(chosen_UKE, axis=(0, 1), dtype=jnp.int32)


def load_metrics(load: jax.Array) -> dict[str, jax.Array]:
  """How evenly tokens are spread over experts, given their numbers [..., E].

  float32 [...] each: `entropy` of the load, over a uniform load's (1 is even),
  `max_violation`, max / mean - 1 (0 is even), and `unused`, the fraction of
  experts without tokens. A common factor of the load does not matter.
  """
  load = load.astype(jnp.float32)
  share = load / jnp.sum(load, axis=-1, keepdims=True)
  entropy = jnp.sum(jax.scipy.special.entr(share), axis=-1)
  return dict(
    entropy=entropy / jnp.log(jnp.float32(load.shape[-1])),
    max_violation=jnp.max(load, axis=-1) / jnp.mean(load, axis=-1) - 1,
    unused=jnp.mean(load == 0, axis=-1, dtype=jnp.float32),
  )


def _cut(parameter: sharding.Parameter) -> sharding.PartitionSpec:
  """How a parameter is sharded where a device applies it to its rows."""
  if not parameter.axes.startswith("E|"):
    return sharding.WHOLE
  return sharding.row_cut(parameter.axes)


def _narrow_cut(parameter: sharding.Parameter) -> sharding.PartitionSpec:
  """The same, if `tensor` also cuts the hidden units."""
  *_, rows, columns = "", *parameter.axes.split("|")
  units = tuple(sharding.TENSOR if a == "F" else None for a in rows + columns)
  if parameter.axes.startswith("E|"):
    _, *axes = _cut(parameter)
    units = sharding.EXPERT, *(a or b for a, b in zip(axes, units))
  return sharding.PartitionSpec(*units)


# Checkpointed, so that x is saved in its own dtype rather than float32.
@jax.checkpoint
def _logits(x_UD: jax.Array, router_DE: jax.Array) -> jax.Array:
  # In full float32 precision: the choice of experts must not depend on
  # rounding.
  return jnp.einsum(
    "UD,DE->UE", precision.widen(x_UD), router_DE,
    precision=jax.lax.Precision.HIGHEST,
  )  # fmt: skip


@jax.custom_vjp
def _report_load(
  weight_UK: jax.Array, bias_E: jax.Array, load_E: jax.Array
) -> jax.Array:
  """The weights; the backward pass returns the load as the bias's gradient."""
  return weight_UK


def _report_forward(
  weight_UK: jax.Array, bias_E: jax.Array, load_E: jax.Array
) -> tuple[jax.Array, jax.Array]:
  return _report_load(weight_UK, bias_E, load_E), load_E


def _report_backward(
  load_E: jax.Array, dweight_UK: jax.Array
) -> tuple[jax.Array | None, ...]:
  return dweight_UK, load_E, None


_report_load.defvjp(_report_forward, _report_backward)

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
flattened; K experts of a token; P = U K pairs; G is gate and up.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

from flax import nnx
import jax
from jax import ad_checkpoint
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.common import sharding
from attnres_jax.models import expert_parallel
from attnres_jax.models import linear
from attnres_jax.models import mlp
from attnres_jax.models import norm as norm_lib
from attnres_kernels import platforms

# The name by which activation checkpointing recognises the chosen experts.
ROUTING = "routing"
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
    # Gate beside up: one product gives both.
    self.gate_and_up = matrix("EG|F|D", experts, 2, hidden, latent or width)
    self.down = matrix("E|F|D", experts, hidden, latent or width)
    shared = dataclasses.replace(config, mlp_width=shape.num_shared * hidden)
    self.shared = mlp.SwiGLU(shared, rngs=rngs) if shape.num_shared else None

  def scale_values(self, factor: float) -> None:
    """Multiplies the weights of all experts."""
    linear.scale(factor, self.gate_and_up, self.down)
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

    If there are fewer experts than the router has, they are this device's.
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
    bias_E = self.selection_bias[...]
    logit_UK, expert_UK = _choose(self.top_k, x_UD, self.router[...], bias_E)
    chosen_UK = jax.nn.sigmoid(logit_UK)
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
    weights = self.gate_and_up[...], self.down[...]
    sizes = expert_counts(expert_UK, self.router[...].shape[1])
    return linear.counted(
      functools.partial(expert_parallel.apply_experts, self.activation),
      x_UD, weight_UK, expert_UK, sizes, *weights,
      flops=6 * expert_UK.size * math.prod(weights[1].shape[1:]),
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


def _cut(parameter: sharding.Parameter) -> jax.sharding.PartitionSpec:
  """How a parameter is sharded where a device applies it to its rows."""
  if not (parameter.is_matrix and parameter.axes.startswith("E")):
    return sharding.WHOLE
  return sharding.row_cut(parameter.axes)


def _narrow_cut(parameter: sharding.Parameter) -> jax.sharding.PartitionSpec:
  """The same, if `tensor` also cuts the hidden units."""
  letters = parameter.axes.replace("|", "")
  cuts = itertools.zip_longest(letters, _cut(parameter))
  return jax.sharding.PartitionSpec(
    *(sharding.TENSOR if letter == "F" else cut for letter, cut in cuts)
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _choose(
  top_k: int, x_UD: jax.Array, router_DE: jax.Array, bias_E: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Logits, float32, and indices of the experts with the best scores."""
  return _choose_forward(top_k, x_UD, router_DE, bias_E)[0]


def _choose_forward(
  top_k: int, x_UD: jax.Array, router_DE: jax.Array, bias_E: jax.Array
) -> tuple[Any, Any]:
  in_parts = x_UD.dtype == jnp.bfloat16
  logits_UE = platforms.by_platform(
    (x_UD, router_DE), exact_logits,
    tpu=logits_in_parts if in_parts else exact_logits,
  )  # fmt: skip
  biased_UE = jax.nn.sigmoid(logits_UE) + bias_E[None]
  _, expert_UK = jax.lax.top_k(biased_UE, top_k)
  # 8 bytes a pair are kept, instead of products and top-k once more.
  chosen = ad_checkpoint.checkpoint_name(
    (jnp.take_along_axis(logits_UE, expert_UK, axis=1), expert_UK), ROUTING
  )
  return chosen, (x_UD, router_DE, chosen[1])


def _choose_backward(
  top_k: int, residuals: Any, gradient: tuple[jax.Array, Any]
) -> tuple[jax.Array | None, ...]:
  x_UD, router_DE, expert_UK = residuals
  # As a sum over the chosen, rather than a scatter.
  experts_11E = jnp.arange(router_DE.shape[1])[None, None]
  is_chosen_UKE = expert_UK[..., None] == experts_11E
  dlogits_UE = jnp.sum(jnp.where(is_chosen_UKE, gradient[0][..., None], 0), 1)
  return *linear.gradients(x_UD, router_DE, dlogits_UE), None


_choose.defvjp(_choose_forward, _choose_backward)


def exact_logits(x_UD: jax.Array, router_DE: jax.Array) -> jax.Array:
  """In float32: the choice of experts must not depend on rounding."""
  return jnp.einsum(
    "UD,DE->UE", precision.widen(x_UD), router_DE,
    precision=jax.lax.Precision.HIGHEST,
  )  # fmt: skip


def logits_in_parts(x_UD: jax.Array, router_DE: jax.Array) -> jax.Array:
  """The same of bfloat16 x, in half the passes of a matrix unit.

  The router is the sum of three bfloat16 matrices, without a remainder.
  """
  products, rest_DE = [], router_DE
  for _ in range(3):
    # A conversion there and back would be removed by the compiler.
    wide_DE = jax.lax.reduce_precision(rest_DE, 8, 7)
    rest_DE -= wide_DE
    part_DE = wide_DE.astype(x_UD.dtype)
    products.append(
      jnp.matmul(x_UD, part_DE, preferred_element_type=jnp.float32)
    )
  return products[0] + (products[1] + products[2])


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

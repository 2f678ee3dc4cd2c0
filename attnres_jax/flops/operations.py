# SPDX-License-Identifier: Apache-2.0
"""FLOPs of one token, from the configuration alone.

One multiply-add is two FLOPs, triangular products (causal attention, the inside
of a chunk of KDA) count half, backward is twice forward, and recomputation
under remat does not count. `compiled.cost_analysis()` is not a substitute,
because it counts the body of a scan once. Norms, activations and plain residual
additions are left out; depth attention (arXiv:2603.15031, Eq. 2-4) is counted
and reported separately.
"""

from collections.abc import Callable, Mapping
import dataclasses

import jax

from attnres_jax import config as config_lib
from attnres_jax.flops import parameters
from attnres_jax.flops import programs
from attnres_jax.models import residuals


@dataclasses.dataclass(frozen=True)
class FlopsPerToken:
  """Forward FLOPs of one token, part by part.

  Attributes:
    projections: of the mixers (queries, keys, values, gates, output).
    attention: scores and weighted values over the sequence, causal.
    recurrence: of KDA's state, in its chunkwise form.
    mlp: the feed-forward sublayers; of experts, those that a token is routed
      to.
    head: the vocabulary projection.
    residual: depth attention and other products of the residual scheme.
  """

  projections: float
  attention: float
  recurrence: float
  mlp: float
  head: float
  residual: float

  @property
  def forward(self) -> float:
    return sum(dataclasses.astuple(self))

  @property
  def backward(self) -> float:
    """Two products for each product of the forward pass."""
    return 2 * self.forward

  @property
  def train(self) -> float:
    return self.forward + self.backward


def flops_per_token(
  model: config_lib.ModelConfig, sequence_length: int
) -> FlopsPerToken:
  """Forward FLOPs per token at this length; `model.vocab_size` must be set."""
  parts = dict.fromkeys(("projections", "attention", "recurrence", "mlp"), 0.0)
  for kind in model.sublayer_kinds:
    matrices = 2 * parameters.of_sublayer(kind, model).active_matrices
    parts["mlp" if kind in ("mlp", "moe") else "projections"] += matrices
    if kind == "kda":
      parts["recurrence"] += kda_flops(model)
    elif kind in ATTENTION_WIDTHS:
      # Two FLOPs per column of keys and values, over half of the positions.
      widths = model.num_heads * ATTENTION_WIDTHS[kind](model)
      parts["attention"] += 2 * widths * sequence_length / 2
  return FlopsPerToken(
    **parts,
    head=2 * model.width * model.vocab_size,
    residual=residual_flops(model),
  )


# Columns of a head's key and value together, of mixers with a softmax.
ATTENTION_WIDTHS: Mapping[str, Callable[[config_lib.ModelConfig], int]] = {
  "attention": lambda model: 2 * model.head_size,
  "mla": lambda model: (
    model.mla.nope_width + model.mla.shared_width + model.mla.value_width
  ),
}


def kda_flops(model: config_lib.ModelConfig) -> float:
  """FLOPs per token of a KDA sublayer in chunkwise form, without projections.

  Per head, with keys and values H wide and chunks of C tokens:

    6 H^2      W S, Q S and K^T V~, the products with the state
    5 C H      K K^T, Q K^T, M K, M V, (Q K^T) V~, all with triangles
    C^2 / 3    M, the inverse of a unit triangle
  """
  head, chunk = model.kda.head_width, model.kda.chunk_size
  per_head = 6 * head**2 + 5 * chunk * head + chunk**2 / 3
  return model.num_heads * per_head


def residual_flops(model: config_lib.ModelConfig) -> float:
  """FLOPs of the residual scheme: its products and depth attention.

  Counted in the program of its definition, so that the number belongs to the
  function and not to the order in which a form computes it.
  """
  residual = dataclasses.replace(model.residual, form="one_softmax")
  model = dataclasses.replace(model, residual=residual)
  scheme = jax.eval_shape(lambda: residuals.build_residual(model))
  token = jax.ShapeDtypeStruct((1, 1, model.width), model.dtype)

  def network(scheme, embedding_BTD, y_BTD):
    # Outputs are different arrays, so that each is a separate source.
    state = residuals.run_through(scheme, embedding_BTD, lambda l, _: y_BTD[l])
    return scheme.readout(state)

  outputs = [token] * model.num_sublayers
  return sum(programs.flops(network, scheme, token, outputs).values())

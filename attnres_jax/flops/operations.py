# SPDX-License-Identifier: Apache-2.0
"""FLOPs of one token, counted in the traced modules of a configuration.

One multiply-add is two FLOPs, triangular products (causal attention, the inside
of a chunk of KDA) count half, backward is twice forward, and recomputation
under remat does not count. Norms, activations and plain residual additions are
left out; depth attention (arXiv:2603.15031, Eq. 2-4) is counted and reported
separately. Modules declare costs that their program does not show with
`models.linear.counted`.
"""

import dataclasses
import functools
from typing import Any

import jax

from attnres_jax import config as config_lib
from attnres_jax.flops import programs
from attnres_jax.models import linear
from attnres_jax.models import residuals
from attnres_jax.models import sublayer


@dataclasses.dataclass(frozen=True)
class FlopsPerToken:
  """Forward FLOPs of one token, part by part.

  Attributes:
    projections: products of the mixers (queries, keys, values, gates, output).
    attention: scores and weighted values over the sequence, causal.
    recurrence: of KDA's state, in its chunkwise form.
    mlp: the feed-forward sublayers; only the experts that a token is routed
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
  """Forward FLOPs per token at this length; no head without a vocabulary."""
  parts = dict.fromkeys(("projections", "attention", "recurrence", "mlp"), 0.0)
  for i, of_sublayer in enumerate(_of_sublayers(model, sequence_length)):
    # Mixers and MLPs alternate.
    default_part = "mlp" if i % 2 else "projections"
    for part, flops in of_sublayer.items():
      parts[part or default_part] += flops
  return FlopsPerToken(
    **parts,
    head=2 * model.width * model.vocab_size,
    residual=residual_flops(model),
  )


def flops_of_kinds(
  model: config_lib.ModelConfig, sequence_length: int
) -> dict[str, float]:
  """Forward FLOPs per token of all sublayers of each kind."""
  totals = dict.fromkeys(model.sublayer_kinds, 0.0)
  for kind, of_sublayer in zip(
    model.sublayer_kinds, _of_sublayers(model, sequence_length)
  ):
    totals[kind] += sum(of_sublayer.values())
  return totals


def _of_sublayers(
  model: config_lib.ModelConfig, length: int
) -> list[dict[linear.Part, float]]:
  """FLOPs of each sublayer and token."""
  plain = dataclasses.replace(model, residual=config_lib.ResidualConfig())
  return [
    _of_sublayer(sublayer.CORES.get(kind), kind, plain, length)
    for kind in model.sublayer_kinds
  ]


@functools.lru_cache(maxsize=64)
def _of_sublayer(
  registered: Any, kind: str, model: config_lib.ModelConfig, length: int
) -> dict[linear.Part, float]:
  """FLOPs of one sublayer and token; `registered` is part of the cache key."""
  del registered
  core = sublayer.abstract_core(kind, model)
  x_BTD = jax.ShapeDtypeStruct((1, length, model.width), model.dtype)
  flops_of_part = programs.flops(lambda core, x_BTD: core(x_BTD), core, x_BTD)
  return {part: flops / length for part, flops in flops_of_part.items()}


def residual_flops(model: config_lib.ModelConfig) -> float:
  """FLOPs of the residual scheme: its products and depth attention.

  Counted in the program of its definition, so that the number belongs to the
  function and not to the order in which a form computes it.
  """
  if isinstance(model.residual, config_lib.DepthAttentionConfig):
    residual = dataclasses.replace(model.residual, form="one_softmax")
    model = dataclasses.replace(model, residual=residual)
  scheme = residuals.abstract_residual(model)
  token = jax.ShapeDtypeStruct((1, 1, model.width), model.dtype)

  def network(scheme, embedding_BTD, y_BTD):
    # Outputs are different arrays, so that each is a separate source.
    def sublayer(l, carry, slot):
      residuals.base.before_norm(scheme, carry, slot)
      return y_BTD[l]

    return scheme.readout(
      residuals.run_through(scheme, embedding_BTD, sublayer)
    )

  outputs = [token] * model.num_sublayers
  return sum(programs.flops(network, scheme, token, outputs).values())

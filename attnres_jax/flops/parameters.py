# SPDX-License-Identifier: Apache-2.0
"""Numbers of parameters, from the configuration alone.

Tests compare these with the leaves of the real networks, for every size.
"""

from collections.abc import Callable, Mapping
import dataclasses

import jax

from attnres_jax import config as config_lib
from attnres_jax.models import residuals


@dataclasses.dataclass(frozen=True)
class Count:
  """Parameters of one part of a network.

  Attributes:
    matrices: used in products with tokens, including short convolutions.
    idle: of those, the experts that a token is not routed to.
    vectors: gains, decay rates and so on.
    state: selection biases, which are not trained by gradients.
  """

  matrices: int = 0
  idle: int = 0
  vectors: int = 0
  state: int = 0

  @property
  def total(self) -> int:
    return self.matrices + self.vectors + self.state

  @property
  def active(self) -> int:
    """The parameters that one token uses."""
    return self.total - self.idle

  @property
  def active_matrices(self) -> int:
    return self.matrices - self.idle

  def __add__(self, other: "Count") -> "Count":
    pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other))
    return Count(*(a + b for a, b in pairs))

  def __mul__(self, times: int) -> "Count":
    return Count(*(times * n for n in dataclasses.astuple(self)))


Modules = dict[str, Count]


def _attention(model: config_lib.ModelConfig) -> Modules:
  head = model.width * model.head_size
  return {
    "query and output": Count(2 * head * model.num_heads),
    "key and value": Count(2 * head * model.kv_heads),
  }


def _kda(model: config_lib.ModelConfig) -> Modules:
  width, heads, kda = model.width, model.num_heads, model.kda
  inner = heads * kda.head_width
  low_rank = kda.gate_rank * (width + inner)
  return {
    "query, key, value, output": Count(4 * width * inner),
    "convolutions": Count(3 * kda.conv_width * inner),
    "decay": Count(low_rank, vectors=heads + inner),
    "beta": Count(width * heads),
    "output gate and norm": Count(low_rank, vectors=kda.head_width),
  }


def _mla(model: config_lib.ModelConfig) -> Modules:
  width, heads, mla = model.width, model.num_heads, model.mla
  return {
    "query": Count(width * heads * (mla.nope_width + mla.shared_width)),
    "compress": Count(
      width * (mla.latent_rank + mla.shared_width), vectors=mla.latent_rank
    ),
    "expand": Count(
      mla.latent_rank * heads * (mla.nope_width + mla.value_width)
    ),
    "output": Count(heads * mla.value_width * width),
  }


def _mlp(model: config_lib.ModelConfig) -> Modules:
  return {"gate, up, down": Count(3 * model.width * model.mlp_size)}


def _moe(model: config_lib.ModelConfig) -> Modules:
  moe, expert = model.moe, expert_params(model)
  return {
    "router": Count(model.width * moe.num_experts, state=moe.num_experts),
    "experts": Count(
      moe.num_experts * expert, idle=(moe.num_experts - moe.top_k) * expert
    ),
    "shared": Count(moe.num_shared * expert),
  }


def expert_params(model: config_lib.ModelConfig) -> int:
  """Parameters of one expert."""
  return 3 * model.width * model.moe.expert_width


# Kind of sublayer to its modules, without the pre-norm.
SUBLAYERS: Mapping[str, Callable[[config_lib.ModelConfig], Modules]] = {
  "attention": _attention,
  "kda": _kda,
  "mla": _mla,
  "mlp": _mlp,
  "moe": _moe,
}


def of_sublayer(kind: str, model: config_lib.ModelConfig) -> Count:
  """One sublayer of this kind, without its pre-norm."""
  return total(SUBLAYERS[kind](model))


def of_residual(model: config_lib.ModelConfig) -> Count:
  """What the residual scheme adds."""
  scheme = jax.eval_shape(lambda: residuals.build_residual(model))
  return Count(vectors=sum(a.size for a in jax.tree.leaves(scheme)))


def of_parts(model: config_lib.ModelConfig) -> dict[str, Count]:
  """All sublayers of each kind, norms, residual scheme, embedding and head."""
  parts: dict[str, Count] = {}
  for kind in model.sublayer_kinds:
    parts[kind] = parts.get(kind, Count()) + of_sublayer(kind, model)
  parts["norms"] = Count(vectors=(model.num_sublayers + 1) * model.width)
  parts["residual"] = of_residual(model)
  table = model.vocab_size * model.width
  # A token looks up one row of the embedding; the head is a product.
  tied = model.tie_embeddings
  parts["embedding"] = Count(table, idle=0 if tied else table)
  parts["head"] = Count(0 if tied else table)
  return parts


def total(parts: Mapping[str, Count], *without: str) -> Count:
  """The sum of all parts except these."""
  left = [count for name, count in parts.items() if name not in without]
  return sum(left, start=Count())

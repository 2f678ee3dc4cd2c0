# SPDX-License-Identifier: Apache-2.0
"""The least that each part of a training step has to compute and move.

Bounds to compare a compiled program with, from shapes alone. Per device and
step, for the mean device of the mesh. A pass goes over a microbatch, forward,
again where activations are checkpointed or a pipeline keeps only the inputs of
its chunks, or backward. Nothing is moved twice within a pass, and what is
between the input and the output of a sublayer is not moved at all:

  sublayers      a pass reads the weights, in the dtype of their products.
                 Forward reads x and writes y; again reads x; backward reads x
                 and dy, and writes dx and the float32 gradients of the weights.
                 Once per step, float32 weights become those of products
  residual       what `flops.traffic` counts, per pass; backward transposes it
  norms          the final one, forward and backward. A scheme's read can be
                 normalised before it is written
  head and loss  reads the weights once per microbatch, reads h and writes dh,
                 and writes the gradient. No logits
  embedding      reads a row and writes a vector per token; backward reads the
                 vector and adds it to its row of the gradient
  accumulation   reads the previous sum of all gradients, from the second
                 microbatch on
  optimiser      reads the gradients twice, the first time for their norm; reads
                 and writes parameters and state

Where `fsdp` cuts weights, a pass reads them whole: what arrives over links is
not counted where it is written. The messages and the cache of a pipeline are
not counted either.

FLOPs are counted by `attnres_jax.flops`, with products that are computed again,
and products in the optimiser.
"""

from collections.abc import Mapping
import dataclasses
import math

import jax
import jax.numpy as jnp

from attnres_jax import flops
from attnres_jax import optimizer
from attnres_jax.common import precision
from attnres_jax.common import scopes
from attnres_jax.common import sharding
from attnres_jax.flops import operations
from attnres_jax.flops import programs
from attnres_jax.flops import traffic
from attnres_jax.train import train_state

# Values of `model.remat` with which no product is computed again.
KEEP_PRODUCTS = ("none", "dots")


@dataclasses.dataclass
class Least:
  """What a part needs at least; None where no bound is known."""

  moved_bytes: float | None = None
  flops: float | None = None


@dataclasses.dataclass
class _Weights:
  """Parameters of one part on one device.

  Attributes:
    product_bytes: as a pass reads them.
    convert_bytes: to make these from the master weights, once.
    gradient_bytes: of all of them, float32.
    rest_bytes: of the other parameters, in their dtypes between steps.
  """

  product_bytes: float = 0.0
  convert_bytes: float = 0.0
  gradient_bytes: float = 0.0
  rest_bytes: float = 0.0


def of_parts(program: train_state.Program) -> dict[str, Least]:
  """The bounds of the training step; see the module docstring."""
  config, mesh = program.config, program.mesh
  model, length = config.model, config.data.sequence_length
  microbatches = program.network.microbatches
  stages = mesh.shape[sharding.STAGE]
  tokens = config.data.batch_size * length / mesh.size
  vector = model.width * jnp.dtype(model.dtype).itemsize
  again = (model.remat not in KEEP_PRODUCTS) + (stages > 1)
  weights = _weights(program)
  per_token = flops.flops_per_token(model, length)

  least = {}
  for kind, forward in operations.flops_of_kinds(model, length).items():
    of_kind, number = weights[kind], model.sublayer_kinds.count(kind)
    least[kind] = Least(
      number * (5 + again) * tokens * vector
      + microbatches * (2 + again) * of_kind.product_bytes
      + microbatches * of_kind.gradient_bytes
      + of_kind.convert_bytes,
      (3 + again) * tokens * forward,
    )
  moved = traffic.of_scheme(model).total * model.num_sublayers
  least[scopes.RESIDUAL] = Least(
    (2 + again) * tokens * moved * vector,
    (3 + again) * tokens * per_token.residual,
  )
  least[scopes.NORM] = Least(5 * tokens * vector)
  head = weights["head"]
  least[scopes.HEAD] = Least(
    2 * tokens * vector
    + microbatches * (head.product_bytes + head.gradient_bytes)
    + head.convert_bytes,
    3 * tokens * per_token.head,
  )
  row = 4 * model.width
  touched = min(tokens, microbatches * model.vocab_size)
  least[scopes.EMBEDDING] = Least(
    tokens * (row + 2 * vector) + 2 * touched * row
  )
  summed = sum(
    w.rest_bytes for part, w in weights.items() if part != "embedding"
  )
  adds = scopes.PIPELINE if stages > 1 else scopes.ACCUMULATION
  least[adds] = Least((microbatches - 1) * summed)
  parameters = summed + weights["embedding"].rest_bytes
  state = sharding.bytes_per_device(program.abstract_state.opt_state)
  least[scopes.OPTIMISER] = Least(
    2 * (2 * parameters + state), _update_flops(program) / mesh.size
  )
  return least


def _weights(program: train_state.Program) -> Mapping[str, _Weights]:
  """The weights of each kind, of `head` and `embedding`, and the rest."""
  config, mesh = program.config, program.mesh
  by_part: dict[str, _Weights] = {}

  def add(parameter: sharding.Parameter) -> None:
    value = parameter.value
    own_size = math.prod(value.sharding.shard_shape(value.shape))
    gathered = sharding.FSDP in sharding.axes_at_rest(parameter)
    used = own_size * (mesh.shape[sharding.FSDP] if gathered else 1)
    dtype = jnp.dtype(config.model.dtype)
    if parameter.wide or not parameter.is_matrix:
      dtype = precision.wide(dtype)
    itemsize = jnp.dtype(dtype).itemsize
    sums = by_part.setdefault(_part(parameter.name), _Weights())
    sums.product_bytes += used * itemsize
    if itemsize < value.dtype.itemsize:
      sums.convert_bytes += own_size * (itemsize + value.dtype.itemsize)
    sums.gradient_bytes += used * value.dtype.itemsize
    sums.rest_bytes += own_size * value.dtype.itemsize

  sharding.map_parameters(add, program.abstract_state.model)
  if config.model.tie_embeddings:
    by_part["head"] = by_part["embedding"]
    by_part["embedding"] = _Weights()
  return by_part


def _part(name: str) -> str:
  """Which part has a parameter, by its path in the network."""
  first, second, *_ = *name.split("/"), ""
  if first == "embedding":
    return {"table": "embedding", "head": "head"}[second]
  return second if first == "sublayers" else first


def _update_flops(program: train_state.Program) -> float:
  """FLOPs of all products of the optimiser, on one device."""
  config, state = program.config, program.abstract_state
  transform = optimizer.make_optimizer(config.optim)
  scalar = jax.ShapeDtypeStruct((), jnp.float32)

  def update(gradient, state, parameters, rate):
    rates = dict(learning_rate=rate, balance_rate=rate)
    return transform.update(gradient, state, parameters, **rates)

  counted = programs.flops(
    update, state.model, state.opt_state, state.model, scalar
  )
  return sum(counted.values())

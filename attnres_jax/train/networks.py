# SPDX-License-Identifier: Apache-2.0
"""How the loss of a batch and its gradient are computed without a pipeline."""

import dataclasses
import math
from typing import Any, Protocol

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.common import scopes
from attnres_jax.common import sharding
from attnres_jax.models import layer_stacks
from attnres_jax.models import loss as loss_lib
from attnres_jax.models import trunk
from attnres_jax.models.mixers import probe
from attnres_jax.models.residuals import tools


class Network(Protocol):
  """How the network of a run is computed on a mesh.

  Attributes:
    microbatches: parts of a batch that are computed one after another.
  """

  microbatches: int

  def loss_sums(self, model: Any, examples: Any) -> loss_lib.LossSums:
    """Sums of the loss over a batch of `loss.Examples`."""
    ...

  def value_and_grad(
    self, model: Any, examples: Any
  ) -> tuple[loss_lib.LossSums, Any]:
    """Sums of the loss, and the gradient of their total, like the model."""
    ...

  def kept_bytes(self, model: Any) -> dict[str, int]:
    """Bytes that a device keeps for the backward pass of an abstract model.

    `running_state_bytes` and `block_bytes`; empty where the compiler decides.
    """
    ...


@dataclasses.dataclass(frozen=True, eq=False)
class Unpipelined:
  """A network without a pipeline: every device computes all sublayers."""

  config: config_lib.RunConfig
  mesh: Mesh

  @property
  def microbatches(self) -> int:
    return self.config.optim.accumulate_steps

  def loss_sums(self, model, examples):
    sums_of = lambda microbatch: self._total(model, None, microbatch)[1]
    with sharding.ambient(self.mesh):
      if self.microbatches == 1:
        return sums_of(examples)
      # All rows at once may need more memory than a step.
      return jax.tree.map(jnp.sum, jax.lax.map(sums_of, self._split(examples)))

  def _split(self, examples):
    """The microbatches; every device keeps its own rows in each."""

    def split(a):
      a = a.reshape(-1, self.microbatches, *a.shape[1:])
      return jnp.swapaxes(a, 0, 1)

    return jax.tree.map(split, examples)

  def _total(self, model, embedding_BTD, examples):
    """The loss, and its sums; encodes the inputs if they are not yet."""
    if embedding_BTD is None:
      embedding_BTD = model.embedding.encode(examples.inputs)
    hidden_BTD = model.hidden_of(embedding_BTD, examples.segment_ids)
    head_DV = model.embedding.head_DV()
    sums = loss_lib.loss_sums(self.config, hidden_BTD, head_DV, examples)
    return sums.total, sums

  def value_and_grad(self, model, examples):
    with sharding.ambient(self.mesh):  # Gradient rules need it too.
      if self.microbatches > 1:
        return sharding.by_copies(self._accumulated, probe.total)(
          model, examples
        )
      total = jax.grad(self._total, has_aux=True)
      gradient, sums = total(model, None, examples)
      return sums, widened(gradient)

  def _accumulated(self, model, examples):
    """Sums over microbatches."""
    separate = jax.tree.map(lambda a: a, model)
    if not trunk.Trunk.of(self.config.model, model.residual).repeats:
      with scopes.part(scopes.ACCUMULATION):
        separate.sublayers = layer_stacks.separated(model.sublayers)

    # Jitted, so that it is traced once for the shapes and the loop.
    @jax.jit
    def gradient_of(model, microbatch):
      embedding_BTD = model.embedding.encode(microbatch.inputs)
      gradients, sums = jax.grad(self._total, argnums=(0, 1), has_aux=True)(
        model, embedding_BTD, microbatch
      )
      return (sums, widened(gradients[0])), gradients[1]

    def add(total, microbatch):
      new, d_BTD = gradient_of(separate, microbatch)
      with scopes.part(scopes.ACCUMULATION):
        return probe.add(total, new), d_BTD

    each = self._split(examples)
    first = jax.tree.map(lambda a: a[0], each)
    shapes, _ = jax.eval_shape(gradient_of, separate, first)
    with scopes.part(scopes.ACCUMULATION):
      zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    (sums, gradient), d_MBTD = jax.lax.scan(add, zeros, each)
    with scopes.part(scopes.ACCUMULATION):
      joined = layer_stacks.joined(gradient.sublayers)
    gradient.sublayers = nnx.Dict(joined)
    # The table's gradient is made once, since it has a row for every token of
    # the vocabulary.
    _, pull = jax.vjp(lambda model: model.embedding.encode(each.inputs), model)
    return sums, probe.add(gradient, *map(widened, pull(d_MBTD)))

  def kept_bytes(self, model):
    """What `model.remat="full"` keeps of a microbatch (section 4.1).

    The states and outputs that the scheme marks, and otherwise what segments
    open. The sublayer that is being differentiated needs more.
    """
    if self.config.model.remat != "full":
      return {}
    data = self.config.data
    rows = data.batch_size // self.microbatches
    tokens = rows * data.sequence_length // self.mesh.size
    shape = 1, tokens, self.config.model.width
    vector = jax.ShapeDtypeStruct(shape, self.config.model.dtype)

    def depth(residual, embedding_BTD, y_BTD):
      opened = [residual.init(embedding_BTD)]
      for start, stop in residual.segments():
        carry, slots = residual.open(opened[-1], start, stop)
        for i in range(stop - start):
          slot = jax.tree.map(lambda a, i=i: a[i], slots)
          carry = residual.write(carry, slot, y_BTD)
        opened.append(residual.close(opened[-1], carry, stop))
      *opened, last = opened
      return opened, residual.take_apart(last)[0]

    program = jax.make_jaxpr(depth)(model.residual, vector, vector).jaxpr
    states = [
      equation.outvars[0]
      for equation in program.eqns
      if equation.params.get("name") == tools.DEPTH_STATE
    ]
    blocks = set(program.outvars) - set(states)
    return dict(
      running_state_bytes=_nbytes(states), block_bytes=_nbytes(blocks)
    )


def widened(tree: Any) -> Any:
  """The arrays in the dtype of sums: float32, if they are narrower."""
  return jax.tree.map(precision.widen, tree)


def _nbytes(variables: Any) -> int:
  avals = [variable.aval for variable in variables]
  return sum(math.prod(a.shape) * a.dtype.itemsize for a in avals)

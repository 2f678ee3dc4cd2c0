# SPDX-License-Identifier: Apache-2.0
"""Memory of the blocks of a prompt (arXiv:2603.15031 section 4.2).

While a prompt of T tokens passes through the network, N blocks of T vectors
are kept. With `mesh.tensor` devices, each has those of its own tokens. Blocks
of a chunk are dropped when the chunk has passed the last sublayer, so in chunks
of C tokens there are never more than those of C.
"""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.config import fields
from attnres_jax.models import residuals
from attnres_jax.models.residuals import base


def block_bytes(
  config: config_lib.ModelConfig,
  tokens: int,
  *,
  devices: int = 1,
  chunk: int | None = None,
  embedding: bool = False,
) -> int:
  """Bytes per device of all completed blocks, in the dtype of the model.

  Args:
    config: of the network; a scheme without blocks needs none.
    tokens: of the prompt.
    devices: along `mesh.tensor`.
    chunk: tokens that are computed at once; all by default.
    embedding: whether the token vectors, which are a source too, count. The
      paper leaves them out.

  Raises:
    ConfigError: a number is less than 1.
  """
  chunk = tokens if chunk is None else chunk
  for name, value in (
    ("tokens", tokens), ("devices", devices), ("chunk", chunk),
  ):  # fmt: skip
    fields.accept(name, value, fields.Size)
  own = -(-min(tokens, chunk) // devices)

  def blocks() -> Any:
    residual = residuals.build_residual(config, rngs=nnx.Rngs(params=0))
    embedding_BTD = jnp.zeros((1, own, config.width), config.dtype)
    # What a sublayer returns does not matter, only its shape.
    state = base.run_through(
      residual, embedding_BTD, lambda l, carry, slot: embedding_BTD
    )
    return residual.take_apart(state)[0]

  first, *others = jax.eval_shape(blocks) or (None,)
  kept = [first, *others] if embedding and first is not None else others
  return sum(block.size * block.dtype.itemsize for block in kept)

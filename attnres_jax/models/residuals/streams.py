# SPDX-License-Identifier: Apache-2.0
"""Shared by schemes with several residual streams.

M streams X_1..X_M of the model's width take the place of one. A sublayer l
reads one combination of them, its output y goes back to each of them, and the
streams are mixed among themselves:

  h   = sum_i read_i X_i
  X_j <- sum_i mix_ij X_i + write_j y

A scheme supplies these coefficients, from its parameters and, in most schemes,
from the streams that enter the sublayer. All streams start as the embedding;
the readout is their sum or mean.

Streams are separate arrays: the products that compute coefficients then read
each of them in place, and one loop over channels writes all of them.
They are float32, or bfloat16 with `model.residual.stream_dtype`, which rounds
what a sublayer writes; sums and coefficients are float32.
Coefficients have the axes of tokens last, so that a vector register holds many
tokens rather than the few entries of one.

The carry holds the coefficients of the next read, computed where the streams
are written: one program writes sublayer l and reads sublayer l + 1, and each
coefficient is computed once. So the slot of a sublayer has the parameters of
the next one. The last slot of a segment has the first ones in their place, and
what is computed from them is not used.
"""

from collections.abc import Iterable
import dataclasses
import functools
from typing import Any, Literal, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.config import fields
from attnres_jax.models import linear
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import tools

# What enters the stream of a token: [B, T, D] arrays, one per stream.
State = tuple[jax.Array, ...]


class Coefficients(NamedTuple):
  """Factors of one sublayer; B and T are 1 where no token changes them."""

  read_MBT: jax.Array
  write_MBT: jax.Array
  mix_MMBT: jax.Array  # From the stream of the first axis to the second.


class Carry(NamedTuple):
  """The streams, and the coefficients of the sublayer that reads them.

  Attributes:
    streams: see `State`.
    coefficients: of the next sublayer.
  """

  streams: Any
  coefficients: Any


@dataclasses.dataclass(frozen=True)
class Options(config_lib.ResidualConfig):
  """Options of hyper-connections and their relatives.

  Attributes:
    streams: M.
    stream_dtype: in which streams are kept between sublayers; sums and
      coefficients are float32 in any case. `bfloat16` halves what they move and
      occupy, and rounds each stream once per sublayer.
  """

  streams: fields.Function[fields.Size] = 4
  stream_dtype: fields.Precision[Literal["float32", "bfloat16"]] = "float32"


class Streams(base.Residual):
  """A scheme with M streams, whose every parameter has a leading axis L.

  Attributes:
    num_streams: M.
    mean: whether the readout is the mean of the streams; else their sum.
  """

  mean = False
  Options = Options

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    super().__init__(config, rngs=rngs)
    self.num_streams = config.residual.streams
    self._rounds = config.residual.stream_dtype == "bfloat16"

  def coefficients(self, streams: Any) -> Any:
    """Coefficients for `streams`; `self` has the parameters of one sublayer."""
    raise NotImplementedError

  def init(self, embedding_BTD: jax.Array) -> Any:
    stream_BTD = self.widened(embedding_BTD)
    if self._rounds:
      stream_BTD = stream_BTD.astype(jnp.bfloat16)
    return (stream_BTD,) * self.num_streams

  def open(self, state: Any, start: int, stop: int) -> tuple[Carry, Any]:
    rows = self.rows(start, stop)
    first = jax.tree.map(lambda a: a[0], rows)
    following = jax.tree.map(lambda a: jnp.roll(a, -1, axis=0), rows)
    return Carry(state, first.fixed(state)), following

  def input(self, carry: Carry, slot: Any) -> jax.Array:
    h_BTD = combine(carry.coefficients.read_MBT, carry.streams)
    return h_BTD.astype(self.dtype)

  def write(self, carry: Carry, slot: Any, y_BTD: jax.Array) -> Carry:
    streams = mixed(carry, precision.widen(tools.save(y_BTD)))
    return Carry(streams, slot.fixed(streams))

  def close(self, state: Any, carry: Carry, stop: int) -> Any:
    return carry.streams

  def readout(self, state: Any) -> jax.Array:
    h_BTD = total(map(precision.widen, state))
    if self.mean:
      h_BTD = h_BTD / len(state)
    return h_BTD.astype(self.dtype)

  def fixed(self, streams: Any) -> Any:
    """The coefficients, which analysis may hold fixed."""
    return self.coefficients(jax.tree.map(tools.coefficient, streams))


def combine(weight_MBT: jax.Array, streams: State) -> jax.Array:
  """sum_i weight_i X_i [B, T, D], in the dtype of sums."""
  wide = map(precision.widen, streams)
  return total(w_BT[..., None] * x for w_BT, x in zip(weight_MBT, wide))


def total(terms: Iterable[jax.Array]) -> jax.Array:
  """The sum of at least one array."""
  return functools.reduce(jnp.add, terms)


def mixed(carry: Carry, y_BTD: jax.Array) -> State:
  """The streams after a sublayer with output `y_BTD`, in their dtype."""
  _, write_MBT, mix_MMBT = carry.coefficients
  new = (
    combine(mix_MMBT[:, j], carry.streams) + write_MBT[j, ..., None] * y_BTD
    for j in range(len(carry.streams))
  )
  return tuple(
    tools.save(x_BTD.astype(old_BTD.dtype))
    for x_BTD, old_BTD in zip(new, carry.streams)
  )


def projected(
  streams: Iterable[jax.Array], weight_MDC: Iterable[jax.Array]
) -> jax.Array:
  """sum_i X_i W_i, as [C, B, T]."""
  product_BTC = total(
    linear.linear(x_BTD, weight_DC, out_dtype=precision.wide(x_BTD.dtype))
    for x_BTD, weight_DC in zip(streams, weight_MDC)
  )
  return jnp.moveaxis(product_BTC, -1, 0)


def square(x_BTD: jax.Array) -> jax.Array:
  """Sum of squares of each token [B, T]."""
  return jnp.sum(jnp.square(precision.widen(x_BTD)), axis=-1)


def to_tokens(x: jax.Array) -> jax.Array:
  """A coefficient that all tokens share, [...] as [..., 1, 1]."""
  return x[..., None, None]


def in_turn(depth: int, streams: int) -> np.ndarray:
  """[L, M] of zeros, with a one at stream l mod M of sublayer l (from 0)."""
  return np.eye(streams)[np.arange(depth) % streams]

# SPDX-License-Identifier: Apache-2.0
"""The protocol of a residual scheme.

A network is L sublayers f_1..f_L. A scheme decides what each of them reads:

  state = scheme.init(embedding)
  for start, stop in scheme.segments():
    carry, slots = scheme.open(state, start, stop)
    for i in range(stop - start):
      x, carry = scheme.read(carry, slots[i], norm_{start+i+1})
      carry = scheme.write(carry, slots[i], core_{start+i+1}(x))
    state = scheme.close(state, carry, stop)
  h_out = scheme.readout(state)

The state is valid between any two sublayers; it is what crosses a pipeline
boundary. What a sublayer reads, h, goes through the sublayer's pre-norm inside
of `read`, so that a scheme can fuse the two.

Opening a segment splits the state in two. The *carry* is the part that
sublayers change; if `scannable`, its shape is constant along the segment, so
that a `lax.scan` may carry it. The *slots* are what else each sublayer needs
(its own parameters, its phase-1 results), stacked on a leading axis over which
a scan may run. Everything else stays outside the loop and is therefore never
copied per sublayer.

`tools` has what schemes are written with.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any, NamedTuple, Self, TypeVar

from flax import nnx
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import precision
from attnres_jax.common import scopes
from attnres_jax.models import norm as norm_lib
from attnres_jax.models.residuals import styles

# Any function or module; `norm_lib.RMSNorm` is fused where a scheme can.
Norm = Callable[[jax.Array], jax.Array]


class Trace(NamedTuple):
  """All values and reads along the depth of a network.

  Attributes:
    values: v_0 (the embedding), v_1, ..., v_L (sublayer outputs), [B, T, D].
    reads: h_1, ..., h_L, h_out: inputs of the sublayers and of the final norm.
  """

  values: tuple[jax.Array, ...]
  reads: tuple[jax.Array, ...]


class QKV(NamedTuple):
  """Different inputs [B, T, D] for a mixer's queries, keys and values.

  Whatever else a mixer computes from its input (gates, decays) follows the
  query. A sublayer that is no such mixer reads the query's input.
  """

  query: jax.Array
  key: jax.Array
  value: jax.Array


_Input = TypeVar("_Input", jax.Array, QKV, jax.Array | QKV)


def qkv(x: jax.Array | QKV) -> QKV:
  """The three inputs of a mixer, which are one unless they differ."""
  return x if isinstance(x, QKV) else QKV(x, x, x)


class Residual(nnx.Module):
  """A residual scheme; subclasses define the protocol of the module docstring.

  Attributes:
    style: its style in tables and figures.
    certainty: what its equations were read in; OURS for a new scheme.
    headline: whether tables list it beside any other scheme.
    num_sublayers: L.
    dtype: of what sublayers read and of stored activations. Running sums are
      float32 (float64 only where this is).
    segment_size: sublayers that are opened together; None for all.
    scannable: whether the carry keeps its structure between sublayers.
    scans_blocks: whether `models.block_scan` can run its blocks.
    block_size: sublayers between one completed block and the next.
    stream: whether states have more than blocks at the end of a block, too.
    form: how it reads over depth, "two_phase" or "one_softmax", if it does.
    pre_norm: whether sublayers have a norm (with a gain) in front of them;
      without, it is the identity.
    final_norm: whether there is a norm between the readout and the head.
    qkv_norm: whether mixers have the norms of `model.qkv_norm` in any case.
    Options: the class of `config.residual`, a dataclass with its options.
    has_blocks: whether it reads the sizes of blocks there.
  """

  style = styles.Style()
  certainty = styles.Certainty.OURS
  headline = False
  segment_size: int | None = None
  scannable: bool = True
  scans_blocks: bool = False
  # Sublayers of a completed block; None if states contain no blocks.
  block_size: int | None = None
  stream = False
  form: str | None = None
  pre_norm = True
  final_norm = True
  qkv_norm = False
  Options = config_lib.ResidualConfig
  has_blocks = False

  def __init__(self, config: config_lib.ModelConfig, *, rngs: nnx.Rngs):
    """For the schemes that draw parameters at random, `rngs`."""
    if type(config.residual) is not self.Options:
      expected = f"residual_config({config.residual.name!r}, ...)"
      config_lib.fail("model.residual", config.residual, expected)
    self.num_sublayers = config.num_sublayers
    self.dtype = jnp.dtype(config.dtype)

  def prepare(self, sublayers: Mapping[str, Any]) -> None:
    """Changes freshly drawn stacks in place, if their start depends on it."""

  def widened(self, embedding_BTD: jax.Array) -> jax.Array:
    """v_0 in the dtype of sums, rounded like any other value."""
    return precision.widen(embedding_BTD.astype(self.dtype))

  def rows(self, start: int, stop: int) -> Self:
    """The parameters of sublayers start..stop-1, if the first axis is L."""
    return jax.tree.map(lambda a: a[start:stop], self)

  def segments(self) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of sublayers (from 0) that are opened together."""
    size, last = self.segment_size or self.num_sublayers, self.num_sublayers
    return tuple((i, min(i + size, last)) for i in range(0, last, size))

  def init(self, embedding_BTD: jax.Array) -> Any:
    """State before the first sublayer."""
    raise self._lacks("init")

  def open(self, state: Any, start: int, stop: int) -> tuple[Any, Any]:
    """(carry, slots) of sublayers start..stop-1, counted from 0.

    By default, the carry is the state, and slots are nothing.
    """
    return state, None

  def read(
    self, carry: Any, slot: Any, norm: Norm
  ) -> tuple[jax.Array | QKV, Any]:
    """Returns the input of a sublayer's core, norm(h_BTD), and `write`'s carry.

    By default, the norm of `input`, and the carry itself.
    """
    return self.normed(carry, self.input(carry, slot), norm), carry

  def normed(self, carry: Any, h: Any, norm: Norm) -> Any:
    """norm(h) of any h_BTD, such as an edited one, that a sublayer reads."""
    return normed(h, norm)

  def input(self, carry: Any, slot: Any) -> jax.Array | QKV:
    """h_BTD, if the scheme leaves its norm to `read`."""
    raise self._lacks("input")

  def write(self, carry: Any, slot: Any, y_BTD: jax.Array) -> Any:
    """Carry after a sublayer whose output is y_BTD."""
    raise self._lacks("write")

  def close(self, state: Any, carry: Any, stop: int) -> Any:
    """State after sublayer stop-1, given the state before the segment.

    By default, it is the carry.
    """
    return carry

  def readout(self, state: Any) -> jax.Array:
    """h_out [B, T, D], which goes to the final norm and the head."""
    raise self._lacks("readout")

  @classmethod
  def check_methods(cls) -> None:
    """Raises NotImplementedError for a method without which nothing runs."""
    for method in ("init", "input", "write", "readout"):
      reads = method == "input" and cls.read is not Residual.read
      if getattr(cls, method) is getattr(Residual, method) and not reads:
        raise cls._lacks(method)

  @classmethod
  def _lacks(cls, method: str) -> NotImplementedError:
    return NotImplementedError(
      f"the scheme {cls.__name__} has no `{method}`"
      " (attnres_jax.models.residuals.base says what a scheme has)"
    )

  def take_apart(self, state: Any) -> tuple[tuple[jax.Array, ...], Any]:
    """(completed blocks, the rest): a pipeline sends each block only once.

    The rest, a tree of arrays, is sent over every boundary; None if there is
    nothing else.
    """
    return (), state

  def put_together(self, blocks: tuple[jax.Array, ...], rest: Any) -> Any:
    """The inverse of `take_apart`."""
    return rest

  def running_state(self, trace: Trace) -> tuple[jax.Array, ...]:
    """After each sublayer, the state whose magnitude the paper's Fig. 5b plots.

    The paper does not define it. We use what the next sublayer would read, or
    the open partial sum if the scheme has one.
    """
    return trace.reads[1:]

  def depth_weights(
    self, values: Sequence[jax.Array]
  ) -> tuple[jax.Array, ...] | None:
    """Weights of reads 1..L+1 over their sources, each [M, B, T].

    A mean over heads, if there are several; 0 for sources outside a window, and
    for all of a read that does not attend. A null source is not listed.
    Computed from the definition (one softmax) for any form of the model. None
    for schemes without depth attention.
    """
    return None

  def source_labels(self) -> tuple[tuple[str, ...], ...] | None:
    """Names of the sources of reads 1..L+1, in the order of `depth_weights`."""
    return None


def run_through(
  residual: Residual,
  embedding_BTD: jax.Array,
  sublayer: Callable[[int, Any, Any], Any],
) -> Any:
  """Runs all sublayers as in the module docstring; returns the last state.

  `sublayer` maps l, counted from 0, a carry and a slot, which it reads, to the
  output of sublayer l, or to (output, carry) if its read has changed the carry.
  """
  part = functools.partial(scopes.part, scopes.RESIDUAL)
  with part():
    state = residual.init(embedding_BTD)
  for start, stop in residual.segments():
    with part():
      carry, slots = residual.open(state, start, stop)
    for i in range(stop - start):
      slot = jax.tree.map(lambda leaf, i=i: leaf[i], slots)
      y_BTD = sublayer(start + i, carry, slot)
      if isinstance(y_BTD, tuple):
        y_BTD, carry = y_BTD
      with part():
        carry = residual.write(carry, slot, y_BTD)
    with part():
      state = residual.close(state, carry, stop)
  return state


def normed(h: _Input, norm: Norm) -> _Input:
  """The pre-norm of a sublayer's input, which compilers fuse."""
  with scopes.part(scopes.NORM):
    return jax.tree.map(norm, h)


def before_norm(residual: Residual, carry: Any, slot: Any) -> jax.Array | QKV:
  """h_BTD, what a sublayer reads before its norm."""
  return residual.read(carry, slot, norm_lib.Identity())[0]


def query_input(h: jax.Array | QKV) -> jax.Array:
  """The read of a sublayer [B, T, D]; the query's if there are several."""
  return h.query if isinstance(h, QKV) else h

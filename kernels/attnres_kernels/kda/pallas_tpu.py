# SPDX-License-Identifier: Apache-2.0
"""KDA on TPU: one grid step per chunk; the state stays in VMEM between chunks.

The chunkwise form and its tree are plain JAX's (`plain`), laid out for the
matrix unit (`pallas_tpu_chunk`). The state is stored transposed, [V, K], so
that decays are rows of lanes. Many heads share a grid step, from several
sequences if one has few, and the program goes through them stage by stage. The
compiler keeps that order almost unchanged, so the products of one head hide the
latencies of another only if they stand next to each other.

The backward pass needs scores, inverses and states of every chunk (`Chunks`).
The forward pass writes them if it runs for a gradient that may keep them.
Otherwise it runs again, right before the backward pass.
"""

from collections.abc import Callable, Iterator
import functools
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attnres_kernels import platforms
from attnres_kernels.kda import pallas_tpu_chunk as chunk_lib
from attnres_kernels.kda import pallas_tpu_decay as decay_lib

# The block spec and the shape of a result.
_Out = tuple[pl.BlockSpec, jax.ShapeDtypeStruct]
_DTYPES = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


class Chunks(NamedTuple):
  """What the forward pass finds in every chunk, in the dtype of q.

  Attributes:
    z: what each token adds to the values that its key reads, before beta, [B,
      T, H V].
    starts: the states before the chunks, [B, H, N, V, K].
    inverses: of the triangular systems, for n heads side by side, [B, H / n, N,
      C, n C].
    keys: scores of keys with keys, for n heads side by side.
    pairs: scores of queries with keys, for n heads side by side.
  """

  z: jax.Array
  starts: jax.Array
  inverses: jax.Array
  keys: jax.Array
  pairs: jax.Array


class Step(NamedTuple):
  """How many heads a grid step has.

  More heads hide more latency, but take more VMEM (backward, 22 MiB for sixteen
  heads of 128) and more time to compile. So there are at most 48 forward and
  sixteen backward, or eight with the little VMEM of v4.

  Attributes:
    rows: sequences.
    heads: of each sequence.
    aside: of these, how many lie side by side; the same in both directions.
  """

  rows: int
  heads: int
  aside: int

  @classmethod
  def choose(
    cls, batch: int, heads: int, chunk_size: int, width: int, *,
    backward: bool = False,
  ) -> "Step":  # fmt: skip
    """As many as fit."""
    large = platforms.tpu_vmem_bytes() > 22 * 2**20
    room = 64 * 128 / (chunk_size * width)
    least = max(1, int((16 if large else 8) * room))
    aside = chunk_lib.num_aside(heads, chunk_size, least)
    most = least if backward or not large else max(1, int(48 * room))
    divisors = range(aside, max(most, aside) + 1, aside)
    each = max(n for n in divisors if heads % n == 0)
    rows = max(1, most // each) if each == heads else 1
    rows = max(n for n in range(1, rows + 1) if batch % n == 0)
    return cls(rows, each, aside)


def why_not(
  function: str, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array,
  beta: jax.Array, state: jax.Array, *, scale: float, chunk_size: int,
  save: str,
) -> str | None:  # fmt: skip
  """The reason why these arguments cannot run, or None."""
  if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES:
    return (
      "q, k and v must all be bfloat16 or all float32, got"
      f" {q.dtype}, {k.dtype} and {v.dtype}"
    )
  if state.dtype != jnp.float32:
    return f"the state must be float32, got {state.dtype}"
  if q.shape[-1] % 128 or v.shape[-1] % 128:
    return (
      f"keys and values must be multiples of 128 wide: q {q.shape}, v {v.shape}"
    )
  if chunk_size not in (16, 32, 64, 128):
    return f"chunk_size must be 16, 32, 64 or 128, got {chunk_size}"
  return None


def kda(
  q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array,
  state: jax.Array, *, scale: float, chunk_size: int, save: str,
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
  """Returns the outputs and the last state; may be differentiated once."""
  arguments = q, k, v, g, beta, state
  return _kda(scale, chunk_size, save, interpret, *arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _kda(
  scale: float, chunk_size: int, save: str, interpret: Any,
  *arguments: jax.Array,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
  return forward(
    *arguments, scale=scale, chunk_size=chunk_size, interpret=interpret
  )


def _kda_forward(
  scale: float, chunk_size: int, save: str, interpret: Any,
  *arguments: jax.Array,
) -> tuple[Any, Any]:  # fmt: skip
  options = dict(scale=scale, chunk_size=chunk_size, interpret=interpret)
  if save == "arguments":
    return forward(*arguments, **options), (arguments, None)
  *results, chunks = forward(*arguments, **options, chunks=True)
  q, k, _, g, beta, _ = arguments
  return tuple(results), ((q, k, None, g, beta, None), chunks)


def _kda_backward(
  scale: float, chunk_size: int, save: str, interpret: Any, saved: Any,
  cotangents: Any,
) -> tuple[jax.Array, ...]:  # fmt: skip
  options = dict(scale=scale, chunk_size=chunk_size, interpret=interpret)
  arguments, chunks = saved
  if chunks is None:
    *_, chunks = forward(*arguments, **options, chunks=True)
  q, k, _, g, beta, _ = arguments
  do, dstate = cotangents
  return backward(q, k, g, beta, chunks, do, dstate, **options)


_kda.defvjp(_kda_forward, _kda_backward, optimize_remat=True)


def forward(
  q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array,
  state: jax.Array, *, scale: float, chunk_size: int, chunks: bool = False,
  interpret: Any = False,
) -> tuple[Any, ...]:  # fmt: skip
  """Returns the outputs, the last state and, if asked to, `Chunks`."""
  call = _Call(q, v, chunk_size, interpret)
  outputs = [call.tokens_out(v), call.state_out()]
  if chunks:
    squares = [call.squares_out(q.dtype)] * 3
    outputs += [call.tokens_out(v), call.starts_out(q.dtype), *squares]
  o, state, *saved = call(
    functools.partial(_forward_kernel, scale=scale),
    "kda_forward_saving" if chunks else "kda_forward",
    [call.tokens(x) for x in (q, k, v, g)]
    + [call.row(beta), call.state(state)],
    outputs,
  )
  results = call.unflatten(o, v), state.mT
  return (*results, Chunks(*saved)) if chunks else results


def backward(
  q: jax.Array, k: jax.Array, g: jax.Array, beta: jax.Array, chunks: Chunks,
  do: jax.Array, dstate: jax.Array, *, scale: float, chunk_size: int,
  interpret: Any = False,
) -> tuple[jax.Array, ...]:  # fmt: skip
  """Returns the gradients of q, k, v, g, beta and the first state."""
  call = _Call(q, do, chunk_size, interpret, backward=True)
  z, *matrices = chunks
  dq, dk, dv, dg, dbeta, dstate = call(
    functools.partial(_backward_kernel, scale=scale),
    "kda_backward",
    [call.tokens(x) for x in (q, k, g)]
    + [call.row(beta), call.flat(z)]
    + [call.matrices(x) for x in matrices]
    + [call.tokens(do), call.state(dstate)],
    [call.tokens_out(x) for x in (q, k, do, g)]
    + [call.row_out(beta), call.state_out()],
  )
  return (
    *(call.unflatten(d, x) for d, x in zip((dq, dk, dv, dg), (q, k, do, g))),
    call.unflatten_row(dbeta, beta),
    dstate.mT,
  )


class _Call:
  """Shapes and block specs of a grid of (batch, heads, chunks).

  Tokens are [B, T, H * K] with T padded to whole chunks; the padding neither
  decays nor writes the state. States are [B, H, N, V, K]. What lies side by
  side in the lanes for n heads is [B, H / n, N, 1 or C, n C].
  """

  def __init__(
    self, q: jax.Array, v: jax.Array, chunk_size: int, interpret: Any,
    backward: bool = False,
  ):  # fmt: skip
    self.batch, self.length, self.heads, self.key = q.shape
    self.value = v.shape[-1]
    self.size = chunk_size
    self.number = pl.cdiv(self.length, chunk_size)
    self.step = Step.choose(
      self.batch,
      self.heads,
      chunk_size,
      max(self.key, self.value),
      backward=backward,
    )
    self.interpret = interpret
    self.reverse = backward

  def __call__(
    self, kernel: Callable[..., None], name: str, inputs: list[Any],
    outputs: list[Any],
  ) -> Any:  # fmt: skip
    """Inputs are (spec, array), outputs (spec, shape)."""
    step = self.step
    return pl.pallas_call(
      kernel,
      grid=(self.batch // step.rows, self.heads // step.heads, self.number),
      in_specs=[spec for spec, _ in inputs],
      out_specs=[spec for spec, _ in outputs],
      out_shape=[shape for _, shape in outputs],
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        vmem_limit_bytes=platforms.tpu_vmem_bytes(),
      ),
      cost_estimate=self._cost(inputs, outputs),
      interpret=self.interpret,
      name=name,
    )(*(array for _, array in inputs))

  def tokens(self, x: jax.Array) -> tuple[Any, ...]:
    x = x.reshape(self.batch, self.length, -1)
    padding = self.number * self.size - self.length
    x = jnp.pad(x, [(0, 0), (0, padding), (0, 0)])
    return self._tokens_spec(x.shape[-1]), x

  def flat(self, x: jax.Array) -> tuple[pl.BlockSpec, jax.Array]:
    return self._tokens_spec(x.shape[-1]), x

  def tokens_out(self, like: Any) -> _Out:
    width = self.heads * like.shape[-1]
    shape = self.batch, self.number * self.size, width
    return self._tokens_spec(width), jax.ShapeDtypeStruct(shape, like.dtype)

  def _tokens_spec(self, width: int) -> pl.BlockSpec:
    block = self.step.rows, self.size, width // self.heads * self.step.heads
    return pl.BlockSpec(block, lambda b, h, n: (b, self._at(n), h))

  def unflatten(self, x: jax.Array, like: Any) -> jax.Array:
    return x[:, : self.length].reshape(like.shape)

  def row(self, x: jax.Array) -> tuple[pl.BlockSpec, jax.Array]:
    padding = self.number * self.size - self.length
    x = jnp.pad(x.mT, [(0, 0), (0, 0), (0, padding)])
    x = x.reshape(self.batch, -1, self.step.aside, self.number, self.size)
    shape = self._aside_shape(1)
    return self._matrix_spec(shape), jnp.moveaxis(x, 2, 3).reshape(shape)

  def row_out(self, like: Any) -> _Out:
    shape = self._aside_shape(1)
    return self._matrix_spec(shape), jax.ShapeDtypeStruct(shape, like.dtype)

  def unflatten_row(self, x: jax.Array, like: Any) -> jax.Array:
    x = x.reshape(self.batch, -1, self.number, self.step.aside, self.size)
    x = jnp.moveaxis(x, 3, 2).reshape(self.batch, self.heads, -1)
    return x[..., : self.length].mT.reshape(like.shape)

  def matrices(self, x: jax.Array) -> tuple[pl.BlockSpec, jax.Array]:
    return self._matrix_spec(x.shape), x

  def starts_out(self, dtype: Any) -> _Out:
    shape = self.batch, self.heads, self.number, self.value, self.key
    return self._matrix_spec(shape), jax.ShapeDtypeStruct(shape, dtype)

  def squares_out(self, dtype: Any) -> _Out:
    shape = self._aside_shape(self.size)
    return self._matrix_spec(shape), jax.ShapeDtypeStruct(shape, dtype)

  def _aside_shape(self, rows: int) -> tuple[int, ...]:
    groups = self.heads // self.step.aside
    return self.batch, groups, self.number, rows, self.step.aside * self.size

  def _matrix_spec(self, shape: tuple[int, ...]) -> pl.BlockSpec:
    number = shape[1] * self.step.heads // self.heads
    block = self.step.rows, number, 1, *shape[3:]
    return pl.BlockSpec(block, lambda b, h, n: (b, h, self._at(n), 0, 0))

  def state(self, x: jax.Array) -> tuple[Any, ...]:
    return self._state_spec(), x.mT

  def state_out(self) -> _Out:
    shape = self.batch, self.heads, self.value, self.key
    return self._state_spec(), jax.ShapeDtypeStruct(shape, jnp.float32)

  def _state_spec(self) -> pl.BlockSpec:
    block = self.step.rows, self.step.heads, self.value, self.key
    return pl.BlockSpec(block, lambda b, h, n: (b, h, 0, 0))

  def _at(self, n: Any) -> Any:
    return self.number - 1 - n if self.reverse else n

  def _cost(self, inputs: list[Any], outputs: list[Any]) -> pl.CostEstimate:
    """For the compiler's schedule: a token of a head in so many products."""
    rows = self.batch * self.heads * self.number * self.size
    products = 22 if self.reverse else 14
    return pl.CostEstimate(
      flops=2 * products * rows * self.value * self.key,
      bytes_accessed=sum(
        x.size * x.dtype.itemsize for _, x in inputs + outputs
      ),
      transcendentals=rows * self.key * (decay_lib.num_levels(self.size) + 2),
    )


def _forward_kernel(
  q_ref: Any, k_ref: Any, v_ref: Any, g_ref: Any, beta_ref: Any, first_ref: Any,
  o_ref: Any, state_ref: Any, *chunks_refs: Any, scale: float,
) -> None:  # fmt: skip
  """The heads go in lockstep: products of one hide the latency of another.

  Queries, keys, values and log-decays are [rows, C, heads * width], beta is
  [rows, heads / n, 1, 1, n C], states are [rows, heads, V, K]. Then the
  results: outputs like values, the last states, and `Chunks` if wanted.
  """
  chunks = Chunks(*chunks_refs) if chunks_refs else None
  _start(first_ref, state_ref)
  groups = list(_groups(q_ref, k_ref, g_ref, beta_ref, scale))
  scores = [chunk_lib.scores(c) for c, _ in groups]
  asides = [c for c, _ in groups]
  inverses = chunk_lib.inverses(asides, [keys for keys, _ in scores])
  if chunks:
    for (_, members), (keys, pairs), inverse in zip(groups, scores, inverses):
      at = members[0].group
      for ref, square in zip(chunks[2:], (inverse, keys, pairs)):
        ref[at] = square.astype(ref.dtype)
      for m in members:
        chunks.starts[m.matrix] = state_ref[m.state].astype(chunks.starts.dtype)
  # In the order of heads: states, what k and q read of them, z, and beta z.
  members = [m for _, members in groups for m in members]
  heads = [h for c in asides for h in c.heads]
  states = [state_ref[m.state] for m in members]
  reads = [
    asides[0].dot(_stack([h.k_in, h.q_in]), state, 1)
    for h, state in zip(heads, states)
  ]
  size = asides[0].size
  rests = [
    v_ref[m.tokens(v_ref)].astype(jnp.float32) - read[:size]
    for m, read in zip(members, reads)
  ]
  z = []
  for c, inverse in zip(asides, inverses):
    group_rows, rests = rests[: len(c.heads)], rests[len(c.heads) :]
    z += c.split(c.dot(c.spread(inverse), _stack(group_rows)))
  betas = [column for c in asides for column in c.columns(c.beta)]
  written = [column * x for column, x in zip(betas, z)]
  for m, h, state, x in zip(members, heads, states, written):
    state_ref[m.state] = h.chunk_decay * state + asides[0].dot(x, h.k_out, 0, 0)
  if chunks:
    for m, x in zip(members, z):
      chunks.z[m.tokens(chunks.z)] = x.astype(chunks.z.dtype)
  outputs = []
  for c, (_, pairs) in zip(asides, scores):
    group_rows, written = written[: len(c.heads)], written[len(c.heads) :]
    outputs += c.split(c.dot(c.spread(pairs), _stack(group_rows)))
  for m, read, output in zip(members, reads, outputs):
    o_ref[m.tokens(o_ref)] = (read[size:] + output).astype(o_ref.dtype)


def _backward_kernel(
  q_ref: Any, k_ref: Any, g_ref: Any, beta_ref: Any, z_ref: Any,
  starts_ref: Any, inverses_ref: Any, keys_ref: Any, pairs_ref: Any,
  do_ref: Any, last_ref: Any, dq_ref: Any, dk_ref: Any, dv_ref: Any,
  dg_ref: Any, dbeta_ref: Any, dstate_ref: Any, *, scale: float,
) -> None:  # fmt: skip
  """Arguments and `Chunks` of the forward pass, gradients of its results.

  Then the results: gradients of q, k, v, g, beta and of the first states, which
  are carried from chunk to chunk, the last one first.
  """
  _start(last_ref, dstate_ref)
  for c, members in _groups(q_ref, k_ref, g_ref, beta_ref, scale):
    at = members[0].group
    z, do = (
      [ref[m.tokens(ref)].astype(jnp.float32) for m in members]
      for ref in (z_ref, do_ref)
    )
    *grads, dbeta_ref[at] = chunk_lib.gradients(
      c,
      chunk_lib.Saved(
        z,
        [starts_ref[m.matrix] for m in members],
        inverses_ref[at],
        keys_ref[at],
        pairs_ref[at],
      ),
      do,
      [dstate_ref[m.state] for m in members],
    )
    for m, dq, dk, dv, dg, dstate in zip(members, *grads):
      gradients = (dq_ref, scale * dq), (dk_ref, dk), (dv_ref, dv), (dg_ref, dg)
      for ref, gradient in gradients:
        ref[m.tokens(ref)] = gradient.astype(ref.dtype)
      dstate_ref[m.state] = dstate


class _Member(NamedTuple):
  """Where one head of one sequence of a grid step lies in blocks."""

  row: int
  head: int
  heads: int
  aside: int

  def tokens(self, ref: Any) -> tuple[Any, ...]:
    width = ref.shape[-1] // self.heads
    return self.row, slice(None), pl.ds(self.head * width, width)

  @property
  def state(self) -> tuple[Any, ...]:
    return self.row, self.head

  @property
  def matrix(self) -> tuple[int, ...]:
    return self.row, self.head, 0

  @property
  def group(self) -> tuple[int, ...]:
    return self.row, self.head // self.aside, 0


def _groups(
  q_ref: Any, k_ref: Any, g_ref: Any, beta_ref: Any, scale: float
) -> Iterator[tuple[chunk_lib.Aside, list[_Member]]]:
  """Yields n heads side by side and their members, for all of a grid step."""
  rows, number = beta_ref.shape[:2]
  aside = beta_ref.shape[-1] // q_ref.shape[1]
  exact = k_ref.dtype == jnp.float32
  for row in range(rows):
    for first in range(0, number * aside, aside):
      members = [
        _Member(row, head, number * aside, aside)
        for head in range(first, first + aside)
      ]
      heads = [
        chunk_lib.Head(
          q_ref[m.tokens(q_ref)],
          k_ref[m.tokens(k_ref)],
          g_ref[m.tokens(g_ref)],
          scale,
        )
        for m in members
      ]
      yield chunk_lib.Aside(heads, beta_ref[members[0].group], exact), members


def _start(first_ref: Any, state_ref: Any) -> None:
  @pl.when(pl.program_id(2) == 0)
  def _():
    @pl.loop(0, state_ref.shape[1])
    def _(head):
      state_ref[:, pl.ds(head, 1)] = first_ref[:, pl.ds(head, 1)]


def _stack(arrays: list[jax.Array]) -> jax.Array:
  return jnp.concatenate(arrays, axis=0)

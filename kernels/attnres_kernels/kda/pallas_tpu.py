# SPDX-License-Identifier: Apache-2.0
"""KDA on TPU: one grid step per chunk; the state stays in VMEM between chunks.

The chunkwise form and its tree are those of the plain-JAX backend (`xla`), laid
out for the matrix unit (`pallas_tpu_chunk`). The state is stored transposed,
[V, K], so that decays are rows of lanes. Several heads share a grid step: the
products of one hide the latencies of another.

The backward pass is two kernels: one runs forward in time and writes the state
before each chunk and the inverse of its triangular system, the other runs
backward in time.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attnres_kernels import dispatch
from attnres_kernels.kda import pallas_tpu_chunk as chunk_lib

_DTYPES = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


def choose_heads(chunk_size, num_heads, width):
  """Heads per grid step: as many as fit, up to eight.

  More heads hide more latency, but take more VMEM.
  """
  most = min(8, max(1, 8 * 64 * 128 // (chunk_size * width)))
  return max(n for n in range(1, most + 1) if num_heads % n == 0)


def why_not(function, q, k, v, g, beta, state, *args, scale, chunk_size):
  """The reason why these arguments cannot run, or None."""
  del function, g, beta, args, scale
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


def forward(
  q, k, v, g, beta, state, *, scale, chunk_size, interpret=False, heads=None
):
  """Returns the outputs and the last state."""
  call = _Call(q, v, chunk_size, interpret, heads)
  o, state = call(
    functools.partial(_forward_kernel, scale=scale),
    "kda_forward",
    [call.constant(chunk_lib.ranges(chunk_size, q.dtype))]
    + [call.tokens(x) for x in (q, k, v, g)]
    + [call.row(beta), call.state(state)],
    [call.tokens_out(v), call.state_out()],
  )
  return call.unflatten(o, v), state.mT


def backward(
  q,
  k,
  v,
  g,
  beta,
  state,
  do,
  dstate,
  *,
  scale,
  chunk_size,
  interpret=False,
  heads=None,
):
  """Returns the gradients of q, k, v, g, beta and the first state."""
  call = _Call(q, v, chunk_size, interpret, heads)
  ranges, turned = (
    chunk_lib.ranges(chunk_size, q.dtype, t) for t in (False, True)
  )
  starts, inverses = call(
    _states_kernel,
    "kda_states",
    [call.constant(ranges)]
    + [call.tokens(x) for x in (k, v, g)]
    + [call.row(beta), call.state(state)],
    [
      call.matrices_out((v.shape[-1], q.shape[-1]), q.dtype),
      call.matrices_out((chunk_size, chunk_size), q.dtype),
    ],
  )
  call.reverse = True
  dq, dk, dv, dg, dbeta, dstate = call(
    functools.partial(_backward_kernel, scale=scale),
    "kda_backward",
    [call.constant(ranges), call.constant(turned)]
    + [call.tokens(x) for x in (q, k, v, g)]
    + [call.row(beta)]
    + [call.matrices(x) for x in (starts, inverses)]
    + [call.tokens(do.astype(v.dtype)), call.state(dstate)],
    [call.tokens_out(x) for x in (q, k, v, g)]
    + [call.row_out(beta), call.state_out()],
  )
  return (
    *(call.unflatten(d, x) for d, x in zip((dq, dk, dv, dg), (q, k, v, g))),
    call.unflatten_row(dbeta, beta),
    dstate.mT,
  )


class _Call:
  """Shapes and block specs of a grid of (batch, heads, chunks).

  Tokens are [B, T, H * K] with T padded to whole chunks; the padding neither
  decays nor writes the state. Rows are [B, H, N, 1, C], matrices [B, H, N,
  ...].
  """

  def __init__(self, q, v, chunk_size, interpret, heads):
    self.batch, self.length, self.heads, self.key = q.shape
    self.value = v.shape[-1]
    self.size = chunk_size
    self.number = pl.cdiv(self.length, chunk_size)
    width = max(self.key, self.value)
    self.group = heads or choose_heads(chunk_size, self.heads, width)
    self.interpret = interpret
    self.reverse = False

  def __call__(self, kernel, name, inputs, outputs):
    """Inputs are (spec, array), outputs (spec, shape)."""
    return pl.pallas_call(
      kernel,
      grid=(self.batch, self.heads // self.group, self.number),
      in_specs=[spec for spec, _ in inputs],
      out_specs=[spec for spec, _ in outputs],
      out_shape=[shape for _, shape in outputs],
      scratch_shapes=[
        pltpu.VMEM((self.group, self.value, self.key), jnp.float32)
      ],
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        vmem_limit_bytes=dispatch.TPU_VMEM_BYTES,
      ),
      cost_estimate=self._cost(name, inputs, outputs),
      interpret=self.interpret,
      name=name,
    )(*(array for _, array in inputs))

  def constant(self, array):
    array = jnp.asarray(array, jnp.bfloat16)
    return pl.BlockSpec(array.shape, lambda b, h, n: (0, 0)), array

  def tokens(self, x):
    x = x.reshape(self.batch, self.length, -1)
    padding = self.number * self.size - self.length
    x = jnp.pad(x, [(0, 0), (0, padding), (0, 0)])
    return self._tokens_spec(x.shape[-1]), x

  def tokens_out(self, like):
    width = self.heads * like.shape[-1]
    shape = self.batch, self.number * self.size, width
    return self._tokens_spec(width), jax.ShapeDtypeStruct(shape, like.dtype)

  def _tokens_spec(self, width):
    block = 1, self.size, width // self.heads * self.group
    return pl.BlockSpec(block, lambda b, h, n: (b, self._at(n), h))

  def unflatten(self, x, like):
    return x[:, : self.length].reshape(like.shape)

  def row(self, x):
    padding = self.number * self.size - self.length
    x = jnp.pad(x.mT, [(0, 0), (0, 0), (0, padding)])
    shape = self.batch, self.heads, self.number, 1, self.size
    return self._matrix_spec(shape), x.reshape(shape)

  def row_out(self, like):
    shape = self.batch, self.heads, self.number, 1, self.size
    return self._matrix_spec(shape), jax.ShapeDtypeStruct(shape, like.dtype)

  def unflatten_row(self, x, like):
    x = x.reshape(self.batch, self.heads, -1)[..., : self.length]
    return x.mT.reshape(like.shape)

  def matrices(self, x):
    return self._matrix_spec(x.shape), x

  def matrices_out(self, shape, dtype):
    shape = self.batch, self.heads, self.number, *shape
    return self._matrix_spec(shape), jax.ShapeDtypeStruct(shape, dtype)

  def _matrix_spec(self, shape):
    block = 1, self.group, 1, *shape[3:]
    return pl.BlockSpec(block, lambda b, h, n: (b, h, self._at(n), 0, 0))

  def state(self, x):
    return self._state_spec(), x.mT

  def state_out(self):
    shape = self.batch, self.heads, self.value, self.key
    return self._state_spec(), jax.ShapeDtypeStruct(shape, jnp.float32)

  def _state_spec(self):
    block = 1, self.group, self.value, self.key
    return pl.BlockSpec(block, lambda b, h, n: (b, h, 0, 0))

  def _at(self, n):
    return self.number - 1 - n if self.reverse else n

  def _cost(self, name, inputs, outputs):
    steps = self.batch * self.heads * self.number
    return pl.CostEstimate(
      flops=steps * flops(name, self.size, self.key, self.value),
      bytes_accessed=sum(
        x.size * x.dtype.itemsize for _, x in inputs + outputs
      ),
      transcendentals=steps
      * (chunk_lib.num_levels(self.size) + 2)
      * self.size
      * self.key,
    )


def flops(name, size, key, value):
  """Useful operations of one chunk of one head, in the products."""
  squares = size * size
  tree = squares * key  # Half a square of A; the same for P.
  solve = squares * size // 3 + squares * value
  carry = 2 * size * key * value
  return {
    "kda_forward": 2 * tree + solve + squares * value + 3 * carry,
    "kda_states": tree + solve + 2 * carry,
    "kda_backward": 6 * tree + 5 * squares * value + 7 * carry,
  }[name]


def _forward_kernel(
  ranges_ref,
  q_ref,
  k_ref,
  v_ref,
  g_ref,
  beta_ref,
  first_ref,
  o_ref,
  last_ref,
  state_ref,
  *,
  scale,
):
  _start(first_ref, state_ref)
  refs = ranges_ref, q_ref, k_ref, v_ref, g_ref, beta_ref
  chunks, states, _, reads, z = _solve(*refs, state_ref, scale)
  outputs = [
    read[c.size :] + c.dot(c.pairs * c.beta, z)
    for c, z, read in zip(chunks, z, reads)
  ]
  states = [c.next(s, z) for c, s, z in zip(chunks, states, z)]
  for head in range(len(chunks)):
    _set_head(o_ref, head, len(chunks), outputs[head])
    state_ref[head] = states[head]
  _finish(last_ref, state_ref)


def _states_kernel(
  ranges_ref,
  k_ref,
  v_ref,
  g_ref,
  beta_ref,
  first_ref,
  starts_ref,
  inverses_ref,
  state_ref,
):
  _start(first_ref, state_ref)
  refs = ranges_ref, None, k_ref, v_ref, g_ref, beta_ref
  chunks, states, inverses, _, z = _solve(*refs, state_ref, None)
  for head, c in enumerate(chunks):
    starts_ref[0, head, 0] = states[head].astype(starts_ref.dtype)
    inverses_ref[0, head, 0] = inverses[head].astype(inverses_ref.dtype)
    state_ref[head] = c.next(states[head], z[head])


def _solve(ranges_ref, q_ref, k_ref, v_ref, g_ref, beta_ref, state_ref, scale):
  """The chunks and states of all heads, and what `solve` finds for them."""
  group = state_ref.shape[0]
  chunks = [
    chunk_lib.Chunk(
      None if q_ref is None else _head(q_ref, head, group),
      _head(k_ref, head, group),
      _head(g_ref, head, group),
      beta_ref[0, head, 0],
      ranges_ref,
      scale,
    )
    for head in range(group)
  ]
  states = [state_ref[head] for head in range(group)]
  values = [_head(v_ref, head, group) for head in range(group)]
  return chunks, states, *chunk_lib.solve(chunks, states, values)


def _backward_kernel(
  ranges_ref,
  turned_ref,
  q_ref,
  k_ref,
  v_ref,
  g_ref,
  beta_ref,
  starts_ref,
  inverses_ref,
  do_ref,
  last_ref,
  dq_ref,
  dk_ref,
  dv_ref,
  dg_ref,
  dbeta_ref,
  first_ref,
  dstate_ref,
  *,
  scale,
):
  group = dstate_ref.shape[0]
  _start(last_ref, dstate_ref)
  for head in range(group):
    q, k, v, g, do = (
      _head(x, head, group) for x in (q_ref, k_ref, v_ref, g_ref, do_ref)
    )
    beta = beta_ref[0, head, 0]
    c = chunk_lib.Chunk(q, k, g, beta, ranges_ref, scale)
    start, inverse = starts_ref[0, head, 0], inverses_ref[0, head, 0]
    dstate = dstate_ref[head]
    do = do.astype(jnp.float32)
    column = chunk_lib.as_column(beta)
    z = c.dot(
      inverse, v.astype(jnp.float32) - c.dot(c.both_in[: c.size], start, 1)
    )
    written = column * z
    dwritten = c.dot(c.pairs, do, 0, 0) + c.dot(c.k_out, dstate, 1)
    x = c.dot(inverse, column * dwritten, 0, 0)
    _set_head(dv_ref, head, group, x)
    dpairs = c.dot(do, written, 1)
    dsystem = -c.dot(x, z, 1)
    dbeta_ref[0, head, 0] = jnp.sum(
      jnp.where(c.diagonal, jnp.sum(dwritten * z, axis=1, keepdims=True), 0.0)
      + jnp.where(c.below, dsystem * c.keys, 0.0),
      axis=0,
      keepdims=True,
    )
    both = jnp.concatenate([-x, do], axis=0)
    dboth_in = c.dot(both, start)
    dk_in = dboth_in[: c.size] * c.carried
    dq_in = dboth_in[c.size :] * c.carried
    dk_out = c.dot(written, dstate) * c.left
    dwhole = c.whole * jnp.sum(
      start.astype(jnp.float32) * dstate, axis=0, keepdims=True
    )
    dstate_ref[head] = c.whole * dstate + c.dot(both, c.both_in, 0, 0)
    own = jnp.sum(jnp.where(c.diagonal, dpairs, 0.0), axis=1, keepdims=True)
    dq = dq_in + own * c.k
    dk = dk_in + dk_out + own * c.q
    dexponents = []
    dsquares = jnp.concatenate([dsystem * beta, dpairs], axis=0)
    for level in range(chunk_lib.num_levels(c.size)):
      mask = c.mask(level)
      dsquare = jnp.where(jnp.concatenate([mask, mask], axis=0), dsquares, 0.0)
      decay, rows = c.decay(level), c.rows(level)
      drows = c.dot(dsquare, rows[: c.size])
      dk_here = (drows[: c.size] + c.dot(dsquare, rows, 0, 0)) * decay
      dq_here = drows[c.size :] * decay
      dq += dq_here
      dk += dk_here
      dexponents.append(c.q * dq_here + c.k * dk_here)
    dexponents.append(c.q * dq_in + c.k * dk_in)
    dexponents.append(c.k * dk_out)
    dexponents = jnp.concatenate(dexponents, axis=0)
    dg = chunk_lib.range_sums(turned_ref, dexponents, q_ref.dtype)
    _set_head(dq_ref, head, group, scale * dq)
    _set_head(dk_ref, head, group, dk)
    _set_head(dg_ref, head, group, dg + dwhole)
  _finish(first_ref, dstate_ref)


def _start(first_ref, state_ref):
  @pl.when(pl.program_id(2) == 0)
  def _():
    state_ref[...] = first_ref[0]


def _finish(last_ref, state_ref):
  @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
  def _():
    last_ref[0] = state_ref[...]


def _head(ref, head, group):
  width = ref.shape[-1] // group
  return ref[0, :, head * width : (head + 1) * width]


def _set_head(ref, head, group, value):
  width = ref.shape[-1] // group
  ref[0, :, head * width : (head + 1) * width] = value.astype(ref.dtype)

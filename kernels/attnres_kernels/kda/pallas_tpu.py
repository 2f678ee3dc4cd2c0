# SPDX-License-Identifier: Apache-2.0
"""KDA on TPU: one grid step per chunk; the state stays in VMEM between chunks.

The chunkwise form and its tree are those of the plain-JAX backend (`xla`), laid
out for the matrix unit (`pallas_tpu_chunk`). The state is stored transposed,
[V, K], so that decays are rows of lanes. Several heads share a grid step, and
the program goes through them stage by stage: the compiler keeps that order
almost as it is, so the products of one head hide the latencies of another only
if they stand next to each other.

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
from attnres_kernels.kda import pallas_tpu_decay as decay_lib

_DTYPES = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


def choose_heads(chunk_size, num_heads, width):
  """Heads per grid step: as many as fit, up to sixteen; half of that on v4.

  More heads hide more latency, but take more VMEM: backward, 22 MiB for
  sixteen heads of 128.
  """
  most = 16 if dispatch.tpu_vmem_bytes() > 22 * 2**20 else 8
  most = min(most, max(1, most * 64 * 128 // (chunk_size * width)))
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
    [call.tokens(x) for x in (q, k, v, g)]
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
  starts, inverses = call(
    _states_kernel,
    "kda_states",
    [call.tokens(x) for x in (k, v, g)] + [call.row(beta), call.state(state)],
    [call.starts_out(q.dtype), call.inverses_out(q.dtype)],
    [call.state_scratch()],
  )
  call.reverse = True
  dq, dk, dv, dg, dbeta, dstate = call(
    functools.partial(_backward_kernel, scale=scale),
    "kda_backward",
    [call.tokens(x) for x in (q, k, v, g)]
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
  decays nor writes the state. States are [B, H, N, V, K]. What lies side by
  side in the lanes for n heads is [B, H / n, N, 1 or C, n C].
  """

  def __init__(self, q, v, chunk_size, interpret, heads):
    self.batch, self.length, self.heads, self.key = q.shape
    self.value = v.shape[-1]
    self.size = chunk_size
    self.number = pl.cdiv(self.length, chunk_size)
    width = max(self.key, self.value)
    self.group = heads or choose_heads(chunk_size, self.heads, width)
    self.aside = chunk_lib.num_aside(self.group, chunk_size)
    self.interpret = interpret
    self.reverse = False

  def __call__(self, kernel, name, inputs, outputs, scratch=()):
    """Inputs are (spec, array), outputs (spec, shape)."""
    return pl.pallas_call(
      kernel,
      grid=(self.batch, self.heads // self.group, self.number),
      in_specs=[spec for spec, _ in inputs],
      out_specs=[spec for spec, _ in outputs],
      out_shape=[shape for _, shape in outputs],
      scratch_shapes=scratch,
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        vmem_limit_bytes=dispatch.tpu_vmem_bytes(),
      ),
      cost_estimate=self._cost(name, inputs, outputs),
      interpret=self.interpret,
      name=name,
    )(*(array for _, array in inputs))

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
    x = x.reshape(self.batch, -1, self.aside, self.number, self.size)
    shape = self._aside_shape(1)
    return self._matrix_spec(shape), jnp.moveaxis(x, 2, 3).reshape(shape)

  def row_out(self, like):
    shape = self._aside_shape(1)
    return self._matrix_spec(shape), jax.ShapeDtypeStruct(shape, like.dtype)

  def unflatten_row(self, x, like):
    x = x.reshape(self.batch, -1, self.number, self.aside, self.size)
    x = jnp.moveaxis(x, 3, 2).reshape(self.batch, self.heads, -1)
    return x[..., : self.length].mT.reshape(like.shape)

  def matrices(self, x):
    return self._matrix_spec(x.shape), x

  def starts_out(self, dtype):
    shape = self.batch, self.heads, self.number, self.value, self.key
    return self._matrix_spec(shape), jax.ShapeDtypeStruct(shape, dtype)

  def inverses_out(self, dtype):
    shape = self._aside_shape(self.size)
    return self._matrix_spec(shape), jax.ShapeDtypeStruct(shape, dtype)

  def _aside_shape(self, rows):
    groups = self.heads // self.aside
    return self.batch, groups, self.number, rows, self.aside * self.size

  def _matrix_spec(self, shape):
    number = shape[1] * self.group // self.heads
    block = 1, number, 1, *shape[3:]
    return pl.BlockSpec(block, lambda b, h, n: (b, h, self._at(n), 0, 0))

  def state(self, x):
    return self._state_spec(), x.mT

  def state_out(self):
    shape = self.batch, self.heads, self.value, self.key
    return self._state_spec(), jax.ShapeDtypeStruct(shape, jnp.float32)

  def state_scratch(self):
    return pltpu.VMEM((self.group, self.value, self.key), jnp.float32)

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
      * (decay_lib.num_levels(self.size) + 2)
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
  q_ref,
  k_ref,
  v_ref,
  g_ref,
  beta_ref,
  first_ref,
  o_ref,
  last_ref,
  *,
  scale,
):
  state_ref = last_ref.at[0]
  _start(first_ref, state_ref)
  heads = state_ref.shape[0]
  groups = _groups(q_ref, k_ref, g_ref, beta_ref, heads, scale)
  inverses = chunk_lib.inverses(groups)
  z, reads = _written(groups, inverses, v_ref, state_ref)
  outputs = []
  for c, own in zip(groups, z):
    own = c.dot(c.spread(c.pairs * c.beta), jnp.concatenate(own, axis=0))
    outputs += c.split(own)
  for head, (read, output) in enumerate(zip(reads, outputs)):
    _set_head(o_ref, head, heads, read[-len(output) :] + output)


def _states_kernel(
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
  heads = state_ref.shape[0]
  groups = _groups(None, k_ref, g_ref, beta_ref, heads, None)
  inverses = chunk_lib.inverses(groups)
  for head in range(heads):
    starts_ref[0, head, 0] = state_ref[head].astype(starts_ref.dtype)
  for index, inverse in enumerate(inverses):
    inverses_ref[0, index, 0] = inverse.astype(inverses_ref.dtype)
  _written(groups, inverses, v_ref, state_ref)


def _groups(q_ref, k_ref, g_ref, beta_ref, heads, scale):
  """One chunk of all heads of a grid step."""
  number = beta_ref.shape[1]
  groups = []
  for index in range(number):
    aside = heads // number
    members = [
      chunk_lib.Head(
        None if q_ref is None else _head(q_ref, head, heads),
        _head(k_ref, head, heads),
        _head(g_ref, head, heads),
        scale,
      )
      for head in range(index * aside, (index + 1) * aside)
    ]
    exact = k_ref.dtype == jnp.float32
    groups.append(chunk_lib.Aside(members, beta_ref[0, index, 0], exact))
  return groups


def _written(groups, inverses, v_ref, state_ref):
  """Updates the states; returns z per group, and what k and q read of them.

  All heads go in lockstep: the products of one hide the latency of another.
  """
  members = [(c, h) for c in groups for h in c.heads]
  states = [state_ref[i] for i in range(len(members))]
  reads = [c.dot(h.both_in, s, 1) for (c, h), s in zip(members, states)]
  rests = [
    _head(v_ref, i, len(members)).astype(jnp.float32) - reads[i][: c.size]
    for i, (c, _) in enumerate(members)
  ]
  z = []
  for c, inverse in zip(groups, inverses):
    own, rests = rests[: len(c.heads)], rests[len(c.heads) :]
    z.append(c.split(c.dot(c.spread(inverse), jnp.concatenate(own, axis=0))))
  scaled = [
    column * x
    for c, own in zip(groups, z)
    for column, x in zip(c.columns(c.beta), own)
  ]
  for i, ((c, h), s, x) in enumerate(zip(members, states, scaled)):
    state_ref[i] = h.whole * s + c.dot(x, h.k_out, 0, 0)
  return z, reads


def _backward_kernel(
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
  *,
  scale,
):
  dstate_ref = first_ref.at[0]
  heads = dstate_ref.shape[0]
  _start(last_ref, dstate_ref)
  groups = _groups(q_ref, k_ref, g_ref, beta_ref, heads, scale)
  for index, c in enumerate(groups):
    n = len(c.heads)
    members = range(index * n, (index + 1) * n)
    v, do = (
      [_head(x, i, heads).astype(jnp.float32) for i in members]
      for x in (v_ref, do_ref)
    )
    starts = [starts_ref[0, i, 0] for i in members]
    dstates = [dstate_ref[i] for i in members]
    grads = chunk_lib.gradients(
      c, v, do, starts, dstates, inverses_ref[0, index, 0]
    )
    for i, dq, dk, dv, dg, dstate in zip(members, *grads[:-1]):
      _set_head(dq_ref, i, heads, scale * dq)
      _set_head(dk_ref, i, heads, dk)
      _set_head(dv_ref, i, heads, dv)
      _set_head(dg_ref, i, heads, dg)
      dstate_ref[i] = dstate
    dbeta_ref[0, index, 0] = grads[-1]


def _start(first_ref, state_ref):
  @pl.when(pl.program_id(2) == 0)
  def _():
    state_ref[...] = first_ref[0]


def _head(ref, head, heads):
  width = ref.shape[-1] // heads
  return ref[0, :, head * width : (head + 1) * width]


def _set_head(ref, head, heads, value):
  width = ref.shape[-1] // heads
  ref[0, :, head * width : (head + 1) * width] = value.astype(ref.dtype)

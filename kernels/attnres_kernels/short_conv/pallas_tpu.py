# SPDX-License-Identifier: Apache-2.0
"""The convolution on TPU: each pass reads and writes its arrays once.

Heads are flat, [B, T, N H], as products write them and `kda` reads them. A grid
step has some tokens of some heads. Forward, it also reads the few tokens before
its own. Backward goes through time in reverse, and keeps what the next tokens
send to the last ones before them in scratch.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attnres_kernels import dispatch

_DTYPES = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
_LANES = 128
# Rows of a tile of bfloat16, which is how many earlier tokens a step reads, and
# of float32, which is how many are kept.
_BEFORE, _KEPT = 16, 8
_MOST_TOKENS, _MOST_CHANNELS = 512, 512


def why_not(function, x, taps, tail, same, *args, unit_eps):
  """The reason why these arguments cannot run, or None."""
  del function, same, args, unit_eps
  if x.dtype not in _DTYPES:
    return f"x must be bfloat16 or float32, got {x.dtype}"
  if tail is not None:
    return "it has no tail"
  if x.shape[-1] % _LANES:
    return f"heads must be multiples of {_LANES} wide, got x {x.shape}"
  if x.shape[1] % _BEFORE:
    return f"tokens must be a multiple of {_BEFORE}, got x {x.shape}"
  if taps.shape[0] > _KEPT:
    return f"at most {_KEPT} taps, got {taps.shape[0]}"
  return None


def forward(x, taps, tail, same, *, unit_eps, interpret=False):
  """Returns the features; see `api.short_conv`."""
  del tail
  call = _Call(x, taps, interpret)
  options = dict(taps=taps.shape[0], head=_head(x, unit_eps), eps=unit_eps)
  (y,) = call(
    functools.partial(_forward_kernel, **options), "short_conv_forward",
    x, taps, same, (), [call.tokens_out()],
    [pltpu.VMEM((call.size + _KEPT, call.width), jnp.float32)],
  )  # fmt: skip
  return y.reshape(x.shape)


def backward(x, taps, tail, same, dy, *, unit_eps, interpret=False):
  """Returns the gradients of x, taps and tail."""
  del tail
  call = _Call(x, taps, interpret)
  call.reverse = True
  options = dict(taps=taps.shape[0], head=_head(x, unit_eps), eps=unit_eps)
  dx, dtaps = call(
    functools.partial(_backward_kernel, **options), "short_conv_backward",
    x, taps, same, (dy,), [call.tokens_out(), call.taps_out()],
    [
      pltpu.VMEM((call.size + _KEPT, call.width), jnp.float32),
      pltpu.VMEM((taps.shape[0], _KEPT, call.width), jnp.float32),
    ],
  )  # fmt: skip
  dtaps = jnp.sum(dtaps, axis=0)[: taps.shape[0]]
  return dx.reshape(x.shape), dtaps.reshape(taps.shape).astype(taps.dtype), None


def _head(x, unit_eps):
  return None if unit_eps is None else x.shape[-1]


class _Call:
  """Shapes and block specs of a grid of (batch, channels, tokens)."""

  def __init__(self, x, taps, interpret):
    self.batch, self.length, heads, head = x.shape
    self.channels = heads * head
    self.dtype = x.dtype
    self.interpret = interpret
    self.reverse = False
    self.size = next(
      s for s in range(_MOST_TOKENS, 0, -_BEFORE) if self.length % s == 0
    )
    self.width = head * max(
      n
      for n in range(1, heads + 1)
      if heads % n == 0 and (n == 1 or n * head <= _MOST_CHANNELS)
    )
    self.number = self.length // self.size

  def __call__(self, kernel, name, x, taps, same, others, outputs, scratch):
    taps = jnp.pad(
      taps.reshape(taps.shape[0], -1).astype(jnp.float32),
      ((0, _KEPT - taps.shape[0]), (0, 0)),
    )
    flat = [a.reshape(self.batch, self.length, -1) for a in (x, *others)]
    tokens = self._spec(self.size, self._at)
    inputs = [
      (self._spec(_BEFORE, self._before), flat[0]),
      *((tokens, a) for a in flat),
      (pl.BlockSpec((_KEPT, self.width), lambda b, c, n: (0, c)), taps),
    ]
    if same is None:
      kernel = functools.partial(kernel, None)
    else:
      spec = pl.BlockSpec(
        (1, self.size, 1), lambda b, c, n: (b, self._at(n), 0)
      )
      inputs = [(spec, same[..., None]), *inputs]
    return pl.pallas_call(
      kernel,
      grid=(self.batch, self.channels // self.width, self.number),
      in_specs=[spec for spec, _ in inputs],
      out_specs=[spec for spec, _ in outputs],
      out_shape=[shape for _, shape in outputs],
      scratch_shapes=scratch,
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        vmem_limit_bytes=dispatch.tpu_vmem_bytes(),
      ),
      interpret=self.interpret,
      name=name,
    )(*(array for _, array in inputs))

  def _at(self, n):
    return self.number - 1 - n if self.reverse else n

  def _before(self, n):
    # Of the first tokens, these are not before them, and are not used.
    return jnp.maximum(self._at(n) * (self.size // _BEFORE) - 1, 0)

  def _spec(self, rows, at):
    return pl.BlockSpec((1, rows, self.width), lambda b, c, n: (b, at(n), c))

  def tokens_out(self):
    shape = self.batch, self.length, self.channels
    spec = self._spec(self.size, self._at)
    return spec, jax.ShapeDtypeStruct(shape, self.dtype)

  def taps_out(self):
    shape = self.batch, _KEPT, self.channels
    spec = pl.BlockSpec((1, _KEPT, self.width), lambda b, c, n: (b, 0, c))
    return spec, jax.ShapeDtypeStruct(shape, jnp.float32)


def _forward_kernel(same, before, x, taps_ref, y, rows, *, taps, head, eps):
  _fill(rows, before, x, first=pl.program_id(2) == 0)
  z = _convolve(same, rows, taps_ref, taps)
  y[0] = _over_heads(_feature, head, eps, z).astype(y.dtype)


def _backward_kernel(
  same, before, x, dy, taps_ref, dx, dtaps, rows, later, *, taps, head, eps
):
  last = pl.num_programs(2) - 1
  _fill(rows, before, x, first=pl.program_id(2) == last)
  z = _convolve(same, rows, taps_ref, taps)
  dz = _over_heads(_feature_gradient, head, eps, z, dy[0].astype(jnp.float32))
  size = dz.shape[0]

  @pl.when(pl.program_id(2) == 0)
  def _():
    later[...] = jnp.zeros_like(later)
    dtaps[...] = jnp.zeros_like(dtaps)

  sent = [_within(same, shift, dz) for shift in range(taps)]
  for shift in range(taps):
    i = taps - 1 - shift
    x_shifted = rows[pl.ds(_KEPT - shift, size), :]
    dtaps[0, i, :] += jnp.sum(sent[shift] * x_shifted, axis=0)
  total = jnp.zeros_like(dz)
  for shift in range(taps):
    i = taps - 1 - shift
    rows[pl.ds(0, size), :] = sent[shift]
    rows[pl.ds(size, _KEPT), :] = later[shift]
    total += taps_ref[i, :][None] * rows[pl.ds(shift, size), :]
    later[shift] = sent[shift][:_KEPT]
  dx[0] = total.astype(dx.dtype)


def _fill(rows, before, x, *, first):
  """Writes the last tokens before these, then these, in float32."""
  earlier = before[0, _BEFORE - _KEPT :, :].astype(jnp.float32)
  rows[pl.ds(0, _KEPT), :] = jnp.where(first, 0.0, earlier)
  rows[pl.ds(_KEPT, x.shape[1]), :] = x[0].astype(jnp.float32)


def _convolve(same, rows, taps_ref, taps):
  size = rows.shape[0] - _KEPT
  total = jnp.zeros((size, rows.shape[1]), jnp.float32)
  for shift in range(taps):
    shifted = _within(same, shift, rows[pl.ds(_KEPT - shift, size), :])
    total += taps_ref[taps - 1 - shift, :][None] * shifted
  return total


def _within(same, shift, rows):
  """Zero for tokens whose segment began after the token `shift` before."""
  if same is None:
    return rows
  reaches = (same[0] >> shift) & 1
  return jnp.where(reaches > 0, rows, 0.0)


def _over_heads(function, head, eps, *rows):
  """Applies to each head, or to all channels if heads do not matter."""
  if head is None:
    return function(None, *rows)
  width = rows[0].shape[1]
  parts = [
    function(eps, *(a[:, i : i + head] for a in rows))
    for i in range(0, width, head)
  ]
  return jnp.concatenate(parts, axis=1)


def _feature(eps, z):
  y = z * jax.nn.sigmoid(z)
  if eps is None:
    return y
  return y * jax.lax.rsqrt(jnp.sum(y * y, axis=1, keepdims=True) + eps)


def _feature_gradient(eps, z, dy):
  gate = jax.nn.sigmoid(z)
  if eps is not None:
    y = z * gate
    inverse = jax.lax.rsqrt(jnp.sum(y * y, axis=1, keepdims=True) + eps)
    along = jnp.sum(dy * y, axis=1, keepdims=True)
    dy = inverse * (dy - y * (inverse * inverse * along))
  return dy * gate * (1 + z * (1 - gate))

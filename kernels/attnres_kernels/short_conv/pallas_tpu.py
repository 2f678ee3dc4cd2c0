# SPDX-License-Identifier: Apache-2.0
"""The convolution on TPU: each pass reads and writes its arrays once.

Heads are flat, [B, T, N H], as products write them and `kda` reads them. A grid
step has some tokens of one head, eight to a register. Forward, it also reads
the few tokens before the step. Backward goes through time in reverse, and keeps
what the next tokens send to the last ones before them in scratch.

Everything is done register by register. The tokens before a register's tokens
are in it and in the register before, with their rows moved.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from attnres_kernels import platforms

_DTYPES = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
_LANES, _ROWS = 128, 8
# Rows of a tile of bfloat16, which is how many earlier tokens a step reads.
BEFORE = 16
_MOST_TOKENS = 2048


def why_not(
  function: str, x: jax.Array, taps: jax.Array, tail: jax.Array | None,
  same: jax.Array | None, *args: Any, unit_eps: Any,
) -> str | None:  # fmt: skip
  """The reason why these arguments cannot run, or None."""
  if x.dtype not in _DTYPES:
    return f"x must be bfloat16 or float32, got {x.dtype}"
  if tail is not None:
    return "it has no tail"
  if x.shape[-1] % _LANES:
    return f"heads must be multiples of {_LANES} wide, got x {x.shape}"
  if x.shape[1] % BEFORE:
    return f"tokens must be a multiple of {BEFORE}, got x {x.shape}"
  if taps.shape[0] > _ROWS:
    return f"at most {_ROWS} taps, got {taps.shape[0]}"
  return None


def forward(
  x: jax.Array, taps: jax.Array, tail: jax.Array | None, same: jax.Array | None,
  *, unit_eps: float | None, interpret: Any = False,
) -> jax.Array:  # fmt: skip
  """Returns the features; see `api.short_conv`."""
  call = Call(x, taps, unit_eps, interpret)
  options = dict(taps=taps.shape[0], eps=unit_eps)
  (y,) = call(
    functools.partial(_forward_kernel, **options), "short_conv_forward",
    x, taps, same, (), [call.tokens_out()], [],
  )  # fmt: skip
  return y.reshape(x.shape)


def backward(
  x: jax.Array, taps: jax.Array, tail: jax.Array | None, same: jax.Array | None,
  dy: jax.Array, *, unit_eps: float | None, interpret: Any = False,
) -> tuple[jax.Array | None, ...]:  # fmt: skip
  """Returns the gradients of x and taps; the others, as autodiff, get none."""
  call = Call(x, taps, unit_eps, interpret)
  # Later tokens first: they send gradients to earlier ones.
  call.reverse = True
  number = taps.shape[0]
  options = dict(taps=number, eps=unit_eps)
  later = pltpu.VMEM((number, _ROWS, call.width), jnp.float32)
  dx, dtaps = call(
    functools.partial(_backward_kernel, **options), "short_conv_backward",
    x, taps, same, (dy,), [call.tokens_out(), call.taps_out()], [later],
  )  # fmt: skip
  dtaps = jnp.sum(dtaps, axis=(0, 2))[:number]
  dtaps = dtaps.reshape(taps.shape).astype(taps.dtype)
  return dx.reshape(x.shape), dtaps, None, None


class Call:
  """Shapes and block specs of a grid of (batch, channels, tokens).

  The channels of a step are one head, or 128 if heads do not matter.
  """

  def __init__(
    self, x: jax.Array, taps: Any, unit_eps: float | None,
    interpret: Any = False,
  ):  # fmt: skip
    self.batch, self.length, heads, head = x.shape
    self.channels = heads * head
    self.width = _LANES if unit_eps is None else head
    self.number = taps.shape[0]
    self.dtype = x.dtype
    self.interpret = interpret
    self.reverse = False
    self.size = next(
      s for s in range(_MOST_TOKENS, 0, -BEFORE) if self.length % s == 0
    )
    self.steps = self.length // self.size
    self.grid = self.batch, self.channels // self.width, self.steps

  def __call__(
    self, kernel: Callable[..., None], name: str, x: jax.Array, taps: jax.Array,
    same: jax.Array | None, others: tuple[jax.Array, ...], outputs: list[Any],
    scratch: list[Any],
  ) -> Any:  # fmt: skip
    taps = taps.reshape(self.number, -1).astype(jnp.float32)
    flat = [a.reshape(self.batch, self.length, -1) for a in (x, *others)]
    tokens = self._spec(self.size, self._at)
    inputs = [
      (self._spec(BEFORE, self._before), flat[0]),
      *((tokens, a) for a in flat),
      (pl.BlockSpec((self.number, self.width), lambda b, c, n: (0, c)), taps),
    ]
    if same is None:
      kernel = functools.partial(kernel, None)
    else:
      # As many lanes as registers: token 8 k + j is in row j, lane k.
      rows = self.batch, self.steps, self.size // _ROWS, _ROWS
      spec = pl.BlockSpec(
        (1, 1, rows[3], rows[2]), lambda b, c, n: (b, self._at(n), 0, 0)
      )
      inputs = [(spec, same.reshape(rows).swapaxes(2, 3)), *inputs]
    return pl.pallas_call(
      kernel,
      grid=self.grid,
      in_specs=[spec for spec, _ in inputs],
      out_specs=[spec for spec, _ in outputs],
      out_shape=[shape for _, shape in outputs],
      scratch_shapes=scratch,
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"),
        vmem_limit_bytes=platforms.tpu_vmem_bytes(),
      ),
      interpret=self.interpret,
      name=name,
    )(*(array for _, array in inputs))

  def _at(self, n: Any) -> Any:
    return self.steps - 1 - n if self.reverse else n

  def _before(self, n: Any) -> Any:
    # Of the first tokens, these are not before them, and are not used.
    return jnp.maximum(self._at(n) * (self.size // BEFORE) - 1, 0)

  def _spec(self, rows: int, at: Callable[..., Any]) -> pl.BlockSpec:
    return pl.BlockSpec((1, rows, self.width), lambda b, c, n: (b, at(n), c))

  def tokens_out(self) -> tuple[pl.BlockSpec, jax.ShapeDtypeStruct]:
    shape = self.batch, self.length, self.channels
    return self._spec(self.size, self._at), jax.ShapeDtypeStruct(
      shape, self.dtype
    )

  def taps_out(self) -> tuple[pl.BlockSpec, jax.ShapeDtypeStruct]:
    """One register per tap, whose rows are still to be summed."""
    shape = self.batch, self.number, _ROWS, self.channels
    spec = pl.BlockSpec(
      (1, self.number, _ROWS, self.width), lambda b, c, n: (b, 0, 0, c)
    )
    return spec, jax.ShapeDtypeStruct(shape, jnp.float32)


def _registers(ref: Any) -> Iterator[jax.Array]:
  """The tokens of a step in float32, eight by eight."""
  tiles = ref.shape[1] // BEFORE
  for i in range(tiles):
    tile = ref[0, pl.ds(i * BEFORE, BEFORE), :].astype(jnp.float32)
    yield tile[:_ROWS]
    yield tile[_ROWS:]


def _write(
  ref: Any, k: int, ready: list[jax.Array], register: jax.Array
) -> None:
  """Writes register k with the one before, which waits in `ready`."""
  # Two registers of float32 fill one tile of bfloat16: a store of half a tile
  # would first have to read the other half.
  ready.append(register)
  if len(ready) == BEFORE // _ROWS:
    tile = jnp.concatenate(ready, axis=0)
    ref[0, pl.ds((k - 1) * _ROWS, BEFORE), :] = tile.astype(ref.dtype)
    ready.clear()


def _convolved(
  before: Any, x: Any, tap: list[jax.Array], reach: "_Reach", first: jax.Array
) -> Iterator[tuple[jax.Array, list[jax.Array]]]:
  """Yields z of each register, and the registers that its taps multiply.

  `before` has the tokens before the step, unless it is the first; `tap` has a
  row for each shift.
  """
  taps, row = len(tap), _row(x.shape[2])
  earlier = before[0, BEFORE - _ROWS :, :].astype(jnp.float32)
  earlier = jnp.where(first, 0.0, earlier)
  moved = [pltpu.roll(earlier, shift, 0) for shift in range(1, taps)]
  for k, register in enumerate(_registers(x)):
    last = moved
    # A rotation wraps around: its first `shift` rows hold this register's last
    # tokens. Below, these rows come from the register before.
    moved = [pltpu.roll(register, shift, 0) for shift in range(1, taps)]
    seen = [
      register,
      *(
        reach(shift, k, jnp.where(row < shift, a, b))
        for shift, a, b in zip(range(1, taps), last, moved)
      ),
    ]
    yield _sum_of_products(tap, seen), seen


def _sum_of_products(a: Sequence[Any], b: Sequence[Any]) -> jax.Array:
  return functools.reduce(jnp.add, map(jnp.multiply, a, b))


def _by_shift(taps_ref: Any, taps: int) -> list[jax.Array]:
  """The tap of the token `shift` before, as a row, for each shift."""
  return [taps_ref[taps - 1 - shift, :][None] for shift in range(taps)]


def _row(width: int) -> jax.Array:
  """The row of each number of a register."""
  return jax.lax.broadcasted_iota(jnp.int32, (_ROWS, width), 0)


class _Reach:
  """Zero for tokens whose segment began after the token `shift` before."""

  def __init__(self, same: Any, taps: Any):
    self.bits = None
    if same is not None:
      bits = same[0, 0]
      bit = lambda shift: ((bits >> shift) & 1).astype(jnp.float32)
      self.bits = [bit(shift) for shift in range(taps)]

  def __call__(self, shift: int, k: int, register: jax.Array) -> Any:
    if self.bits is None or not shift:
      return register
    return register * self.bits[shift][:, k : k + 1]


def _silu(z: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
  """silu(z) and the sigmoid of z.

  In bfloat16 by tanh, a single instruction of some units; how accurate that is
  in float32, the compiler does not say.
  """
  if dtype == jnp.bfloat16:
    half = 0.5 * z
    tanh = jnp.tanh(half)
    return half + half * tanh, 0.5 + 0.5 * tanh
  gate = jax.nn.sigmoid(z)
  return z * gate, gate


def _over_length(y: jax.Array, eps: float) -> jax.Array:
  """One over the length of each row, the eps added to its square."""
  return jax.lax.rsqrt(jnp.sum(y * y, axis=1, keepdims=True) + eps)


def _forward_kernel(
  same: Any, before: Any, x: Any, taps_ref: Any, y: Any, *, taps: int,
  eps: float | None,
) -> None:  # fmt: skip
  """Bits of segments [1, 1, 8, registers] or None, then rows [1, tokens, H].

  These are earlier tokens and the step's own. Then the taps [W, H], and the
  result, like the tokens.
  """
  first = pl.program_id(2) == 0
  ready = []
  tap, reach = _by_shift(taps_ref, taps), _Reach(same, taps)
  convolved = _convolved(before, x, tap, reach, first)
  for k, (z, _) in enumerate(convolved):
    feature, _ = _silu(z, x.dtype)
    if eps is not None:
      feature *= _over_length(feature, eps)
    _write(y, k, ready, feature)


def _backward_kernel(
  same: Any, before: Any, x: Any, dy: Any, taps_ref: Any, dx: Any, dtaps: Any,
  later: Any, *, taps: int, eps: float | None,
) -> None:  # fmt: skip
  """Refs of the forward pass, with the gradient of the result before the taps.

  Then the results: gradients of the tokens, and of the taps, summed over steps
  [1, W, 8, H]; and scratch: what later tokens send to the last ones [W, 8, H].
  """
  first = pl.program_id(2) == pl.num_programs(2) - 1
  tap, reach = _by_shift(taps_ref, taps), _Reach(same, taps)
  row = _row(x.shape[2])

  @pl.when(pl.program_id(2) == 0)
  def _():
    later[...] = jnp.zeros_like(later)
    dtaps[...] = jnp.zeros_like(dtaps)

  # What the step after this one sends to its last tokens: read before it is
  # replaced by what this step sends.
  after = [later[shift] for shift in range(1, taps)]
  total = [jnp.zeros((_ROWS, x.shape[2]), jnp.float32) for _ in range(taps)]
  current, moved, ready = None, [], []

  def gather(k, following):
    """The gradient of register k, from its own tokens and the next ones."""
    sent = [current]
    for shift, (a, b) in enumerate(zip(moved, following), 1):
      sent.append(jnp.where(row < _ROWS - shift, a, b))
    _write(dx, k, ready, _sum_of_products(tap, sent))

  convolved = _convolved(before, x, tap, reach, first)
  for k, ((z, seen), dfeature) in enumerate(zip(convolved, _registers(dy))):
    dz = _silu_gradient(z, dfeature, x.dtype, eps)
    for shift in range(taps):
      total[shift] += dz * seen[shift]
    # Row r of these is what token r + shift sends to token r; rows that wrap
    # around belong to the register before, so it is written one round later.
    following = [
      pltpu.roll(reach(shift, k, dz), _ROWS - shift, 0)
      for shift in range(1, taps)
    ]
    if k:
      gather(k - 1, following)
    else:
      for shift, a in enumerate(following, 1):
        later[shift] = a
    current, moved = dz, following
  gather(x.shape[1] // _ROWS - 1, after)
  for shift in range(taps):
    dtaps[0, taps - 1 - shift] += total[shift]


def _silu_gradient(
  z: jax.Array, dfeature: jax.Array, dtype: Any, eps: float | None
) -> jax.Array:
  """The gradient of z from the gradient of the feature."""
  y, gate = _silu(z, dtype)
  dy = dfeature
  if eps is not None:
    inverse = _over_length(y, eps)
    along = jnp.sum(dy * y, axis=1, keepdims=True)
    dy = (dy - y * (inverse * inverse * along)) * inverse
  # d silu / dz = gate + y (1 - gate)
  return dy * (gate + y - y * gate)

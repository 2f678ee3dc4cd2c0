# SPDX-License-Identifier: Apache-2.0
"""The operators of attnres_kernels as problems: a function and its arguments.

A problem is checked (values and all gradients against the reference, on the
device), timed, and compiled for chips that are not there: tests, benchmarks and
`experiments.first_hour` share it. `Problem.function` takes the name of an
implementation and the arrays, and returns a tuple of arrays.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import attnres_kernels
from attnres_kernels.depth_attention import shapes
from attnres_kernels.kda import shapes as kda_shapes

PASSES = "forward", "backward"
# What rounds to bfloat16 on the way may be off by this much with bfloat16
# inputs, as the tests on a CPU allow.
_BFLOAT16_ERROR = 1e-2


class Problem(NamedTuple):
  """An operator at one shape.

  Attributes:
    function: (implementation, *arrays) -> results.
    arrays: on the device.
    names: of the arrays, for messages.
    tolerance: relative error with bfloat16 inputs; 0 for twice that of storage.
    reference: the implementation that is right by inspection.
  """

  function: Callable[..., tuple[jax.Array, ...]]
  arrays: tuple[jax.Array, ...]
  names: tuple[str, ...]
  tolerance: float = 0.0
  reference: str = "reference"


class Operator(NamedTuple):
  """How problems of an operator are made.

  Attributes:
    build: (shape, dtype, draw) -> Problem.
    check: the shape at which it is checked.
    short: a tiny shape.
    timed: shapes that are timed.
    on_gpu: whether it has a GPU kernel.
    kernels: pass -> kernels of the compiled tables whose times add up to it.
  """

  build: Callable[..., Problem]
  check: Any
  short: Any
  timed: tuple[Any, ...]
  kernels: dict[str, tuple[str, ...]]
  on_gpu: bool = False


def draws(seed: int) -> Callable[..., jax.Array]:
  """Normal numbers of a shape and dtype, others at each call."""
  rng = np.random.default_rng(seed)

  def draw(*shape: int, dtype: Any = "float32") -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32)).astype(dtype)

  return draw


def arguments(
  problem: Problem, draw: Callable[..., jax.Array] | None = None
) -> tuple[jax.Array, ...]:
  """The arrays of a problem, then cotangents for `results`.

  Cotangents are exact in bfloat16, so that all implementations get equal ones.
  They are made here and not in `results`, which is timed.
  """
  draw = draw or draws(1)
  call = functools.partial(problem.function, problem.reference)
  return *problem.arrays, *(
    draw(*x.shape, dtype="bfloat16").astype(x.dtype)
    for x in jax.eval_shape(call, *problem.arrays)
  )


def results(problem: Problem, implementation: str, *given: jax.Array) -> Any:
  """Values by name, and gradients if cotangents follow the arrays."""
  arrays = given[: len(problem.names)]
  cotangents = given[len(problem.names) :]
  call = functools.partial(problem.function, implementation)
  if not cotangents:
    return {f"result {i}": x for i, x in enumerate(call(*arrays))}
  values, pull = jax.vjp(call, *arrays)
  pairs = zip(cotangents, values, strict=True)
  gradients = pull(tuple(c.astype(x.dtype) for c, x in pairs))
  named = {f"result {i}": x for i, x in enumerate(values)}
  return named | {f"d{n}": g for n, g in zip(problem.names, gradients)}


def _attention(shape: shapes.Shape, dtype: Any, draw: Any) -> Problem:
  token = shape.tokens, shape.width
  sources = [draw(*token, dtype=dtype) for _ in range(shape.sources)]
  query = 0.1 * draw(shape.queries, shape.rank or shape.width)
  options: Any = shape.options

  def run(implementation, query, *sources):
    return attnres_kernels.depth_attention(
      query, sources, implementation=implementation, **options
    )

  names = "query", *(f"source {i}" for i in range(shape.sources))
  return Problem(run, (query, *sources), names)


def _merge(shape: shapes.Shape, dtype: Any, draw: Any) -> Problem:
  """Merges as many partial sums as the shape has sources."""
  token, width = (shape.tokens, shape.width), shape.width
  lse = draw(shape.tokens, *[shape.heads] * (shape.heads > 1))
  out, *partials = (draw(*token, dtype=dtype) for _ in range(1 + shape.sources))

  def run(implementation, out, lse, query, *rest):
    *partials, gain = rest
    normed = attnres_kernels.depth_merge_norm(
      out, lse, query, partials if len(partials) > 1 else partials[0], gain,
      rank=shape.rank, implementation=implementation,
    )  # fmt: skip
    return (normed,)

  query = 0.1 * draw(shape.rank or width)
  arrays = out, lse, query, *partials, 1 + 0.1 * draw(width)
  names = [f"partial {i}" for i in range(shape.sources)]
  names = names if shape.sources > 1 else ["partial"]
  return Problem(run, arrays, ("out", "lse", "query", *names, "gain"))


def _norm(shape: shapes.Shape, dtype: Any, draw: Any) -> Problem:
  def run(implementation, x, gain):
    return (attnres_kernels.rms_norm(x, gain, implementation=implementation),)

  x = draw(shape.tokens, shape.width, dtype=dtype)
  gain = 1 + 0.1 * draw(shape.width)
  return Problem(run, (x, gain), ("x", "gain"), reference="xla")


def _kda(shape: kda_shapes.Shape, dtype: Any, draw: Any) -> Problem:
  token = shape.batch, shape.tokens, shape.heads
  q, k = (draw(*token, shape.key) for _ in range(2))
  k /= jnp.linalg.norm(k, axis=-1, keepdims=True)
  q, k = q.astype(dtype), k.astype(dtype)
  v = draw(*token, shape.value, dtype=dtype)
  g = -jax.nn.softplus(draw(*token, shape.key) - 3)
  beta = jax.nn.sigmoid(draw(*token))

  def run(implementation, *arrays):
    return attnres_kernels.kda(*arrays, implementation=implementation)

  names = "q", "k", "v", "g", "beta"
  return Problem(run, (q, k, v, g, beta), names, _BFLOAT16_ERROR)


def _conv(shape: kda_shapes.Shape, dtype: Any, draw: Any) -> Problem:
  x = draw(shape.batch, shape.tokens, shape.heads, shape.key, dtype=dtype)

  def run(implementation, x, taps):
    return (
      attnres_kernels.short_conv(
        x, taps, unit_eps=1e-6, implementation=implementation
      ),
    )

  arrays = x, draw(4, *x.shape[2:])
  return Problem(run, arrays, ("x", "taps"), _BFLOAT16_ERROR, "xla")


def _both(kernel: str, saving: bool = False) -> dict[str, tuple[str, ...]]:
  """A gradient is a forward pass, which may save more, and a backward pass."""
  forward = f"{kernel}_forward"
  first = f"{forward}_saving" if saving else forward
  return {"forward": (forward,), "backward": (first, f"{kernel}_backward")}


# Checked shapes have tokens that fill no tile and widths that are no multiples
# of 128 lanes, where the operator takes them.
OPERATORS = {
  "depth_attention": Operator(
    _attention,
    shapes.Shape("check", 6, 9, 520, 1168),
    shapes.Shape("short", 2, 3, 24, 160),
    (shapes.BLOCK_48B[-1], *shapes.TABLE),
    _both("depth_attention"),
    on_gpu=True,
  ),
  "depth_attention, heads": Operator(
    _attention,
    shapes.Shape("check", 4, 5, 520, 2048, heads=16),
    shapes.Shape("short", 2, 3, 24, 256, heads=4),
    shapes.HEADS[1:],
    _both("depth_attention"),
  ),
  "depth_merge_norm": Operator(
    _merge,
    shapes.Shape("check", 1, 1, 520, 1168),
    shapes.Shape("short", 1, 1, 24, 256),
    shapes.MERGE,
    _both("depth_merge"),
    on_gpu=True,
  ),
  "rms_norm": Operator(
    _norm,
    shapes.Shape("check", 1, 1, 1100, 1168),
    shapes.Shape("short", 1, 1, 16, 256),
    shapes.MERGE,
    _both("rms_norm"),
  ),
  "kda": Operator(
    _kda,
    kda_shapes.Shape("check", 2, 512, 8, 128, 128),
    kda_shapes.Shape("short", 1, 64, 1, 128, 128),
    kda_shapes.NAMED,
    _both("kda", saving=True),
  ),
  "short_conv": Operator(
    _conv,
    kda_shapes.Shape("check", 2, 512, 4, 128, 128),
    kda_shapes.Shape("short", 1, 32, 1, 128, 128),
    kda_shapes.NAMED,
    _both("short_conv"),
  ),
}

# SPDX-License-Identifier: Apache-2.0
"""The equations of a program, and the values that its gradient keeps."""

from collections.abc import Callable, Iterator
from typing import Any

import jax


def equations(jaxpr: Any) -> Iterator[Any]:
  """All equations of a (closed) jaxpr, including inner jaxprs."""
  jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
  for equation in jaxpr.eqns:
    yield equation
    for value in equation.params.values():
      for inner in value if isinstance(value, (tuple, list)) else (value,):
        if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
          yield from equations(inner)


def count(names: tuple[str, ...], function: Callable[..., Any], *args) -> int:
  """How many equations of `function(*args)` are of the named primitives."""
  jaxpr = jax.make_jaxpr(function)(*args)
  return sum(e.primitive.name in names for e in equations(jaxpr))


def depends(function: Callable[..., Any], argument: Any) -> bool:
  """Whether an output of a traced function depends on its argument."""
  jaxpr = jax.make_jaxpr(function)(argument).jaxpr
  reached = set(jaxpr.invars)
  for equation in jaxpr.eqns:
    if any(v in reached for v in equation.invars if not hasattr(v, "val")):
      reached |= set(equation.outvars)
  return any(v in reached for v in jaxpr.outvars if not hasattr(v, "val"))


def has(equation: Any, name: str) -> bool:
  """Whether a primitive is called anywhere within an equation."""
  inside = equations(equation.params.get("jaxpr"))
  return any(inner.primitive.name == name for inner in inside)


def arrays(jaxpr: Any) -> list[jax.ShapeDtypeStruct]:
  """Shapes and dtypes of all outputs of the equations."""
  return [
    jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
    for equation in equations(jaxpr)
    for v in equation.outvars
    if hasattr(v.aval, "shape")
  ]


def saved(function: Callable[..., Any], *args: Any) -> list[Any]:
  """The values that the forward pass of `function` keeps for backward.

  Arguments of the function cost nothing and are left out. A value that is kept
  under several names counts once.
  """
  leaves, tree = jax.tree.flatten(args)

  def pull_back(*leaves):
    unflattened = lambda *a: function(*jax.tree.unflatten(tree, a))
    return jax.vjp(unflattened, *leaves)[1]

  jaxpr = jax.make_jaxpr(pull_back)(*leaves).jaxpr
  given = [*jaxpr.invars, *jaxpr.constvars]
  origins = _origins(jaxpr, {v: v for v in given})
  origins = dict.fromkeys(v for v in origins if not hasattr(v, "val"))
  return [v.aval for v in origins if v not in given]


# Equations whose outputs are outputs of an inner jaxpr, and identities.
_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2")
_IDENTITIES = ("name", "reduce_precision", "optimization_barrier")


class _Value:
  """What one evaluation of an equation computes, compared by identity."""

  def __init__(self, aval: Any):
    self.aval = aval


def _origins(jaxpr: Any, origin_of: dict[Any, Any]) -> list[Any]:
  """For each output of `jaxpr`, the value that it is an alias of."""

  def of(v):
    return v if hasattr(v, "val") else origin_of[v]

  for equation in jaxpr.eqns:
    name, sources = equation.primitive.name, list(map(of, equation.invars))
    outputs = equation.outvars
    if name in _CALLS:
      inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
      constants = [(v, v) for v in getattr(inner, "jaxpr", inner).constvars]
      inner = getattr(inner, "jaxpr", inner)
      origins = _origins(
        inner, dict(zip(inner.invars, sources)) | dict(constants)
      )
    elif name in _IDENTITIES or "CheckpointName" in str(equation.params):
      origins = sources
    else:
      # An inner jaxpr can be called twice; its variables then have two values.
      origins = [_Value(v.aval) for v in outputs]
    origin_of.update(zip(outputs, origins))
  return list(map(of, jaxpr.outvars))


def nbytes(shape: Any) -> int:
  return shape.size * shape.dtype.itemsize

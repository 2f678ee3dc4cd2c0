# SPDX-License-Identifier: Apache-2.0
"""Counts a traced program: its matrix products, inputs and outputs.

`compiled.cost_analysis()` is not a substitute: it needs a compilation, counts
the body of a scan once, and counts every norm and activation.
"""

from collections.abc import Callable, Iterator
import math
from typing import Any

import jax
from jax.extend import core

from attnres_jax.models import linear

# Equations whose result is the operand, as far as memory is concerned.
_RENAMES = ("convert_element_type", "name", "copy", "reshape", "squeeze")


def flops(function: Callable[..., Any], *args: Any) -> dict[linear.Part, float]:
  """FLOPs of `function(*args)` by part; None for products outside any part.

  One multiply-add is two. Norms, activations and additions do not count. Calls
  through `linear.counted` count as declared there, as kernels have to.

  Raises:
    ValueError: it contains a kernel, or a loop of unknown length.
  """
  with linear.counting():
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
  total: dict[linear.Part, float] = {}
  met: set[Any] = set()
  for equation, times in _equations(jaxpr, 1):
    part, count = _cost(equation, met)
    if count:
      total[part] = total.get(part, 0) + times * count
  return total


class Constant(jax.ShapeDtypeStruct):
  """An array that does not depend on an argument, such as zeros."""


def moved(
  function: Callable[..., Any], *args: Any, least: int
) -> tuple[Any, tuple[int, int]]:
  """Traces a function and counts what it would read and write as one kernel.

  Each argument that it uses is read once, a `Constant` for nothing. Each result
  is written once, unless it is an argument or equal to another result. Arrays
  smaller than `least` do not count.

  Returns:
    The results, with constants marked, and the entries read and written.
  """
  with linear.counting():
    jaxpr, outs = jax.make_jaxpr(function, return_shape=True)(*args)
  jaxpr = jaxpr.jaxpr
  names: dict[Any, Any] = {}
  used: set[Any] = set()
  made: set[Any] = set()
  for equation in jaxpr.eqns:
    operands = [
      names.get(v, v)
      for v in equation.invars
      if not isinstance(v, core.Literal)
    ]
    if equation.primitive.name in _RENAMES and len(operands) == 1:
      names[equation.outvars[0]] = operands[0]
      continue
    used.update(operands)
    if operands:
      made.update(equation.outvars)
  free = [isinstance(leaf, Constant) for leaf in jax.tree.leaves(args)]
  read = used & {v for v, is_free in zip(jaxpr.invars, free) if not is_free}
  results = [names.get(v, v) for v in jaxpr.outvars]
  given = made | {*jaxpr.invars}
  outs = jax.tree.unflatten(
    jax.tree.structure(outs),
    [
      leaf if result in given else Constant(leaf.shape, leaf.dtype)
      for leaf, result in zip(jax.tree.leaves(outs), results)
    ],
  )
  sizes = [
    sum(v.aval.size for v in which if v.aval.size >= least)
    for which in (read, made & {*results})
  ]
  return outs, (sizes[0], sizes[1])


def _equations(jaxpr: Any, times: int) -> Iterator[tuple[Any, int]]:
  """All equations, including inner jaxprs, and how often they run."""
  for equation in jaxpr.eqns:
    name, params = equation.primitive.name, equation.params
    if name in ("while", "pallas_call"):
      raise ValueError(
        f"{name} {equation.source_info.name_stack}: its cost is not in the"
        " program; call it through attnres_jax.models.linear.counted"
      )
    yield equation, times
    if name == "cond":  # The branches of a switch cost about the same.
      yield from _equations(params["branches"][-1].jaxpr, times)
      continue
    repeats = params["length"] if name == "scan" else 1
    for inner in params.values():
      if isinstance(inner, (core.Jaxpr, core.ClosedJaxpr)):
        inner = getattr(inner, "jaxpr", inner)
        yield from _equations(inner, times * repeats)


def _cost(equation: Any, met: set[Any]) -> tuple[linear.Part, float]:
  name, params = equation.primitive.name, equation.params
  if name == linear.COUNTED.name:
    new = {*equation.invars[: params["num_scanned"]]} - met
    met |= new
    scanned = sum(2 * v.aval.size for v in new)
    return params["part"], params["flops"] + scanned
  if name == "dot_general":
    contracted, _ = params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    inner = math.prod(shape[i] for i in contracted[0])
    return None, 2 * inner * equation.outvars[0].aval.size
  if name == "ragged_dot_general":
    raise ValueError("ragged_dot_general: count it with linear.counted")
  if name == "conv_general_dilated":
    numbers = params["dimension_numbers"]
    shape = equation.invars[1].aval.shape
    inner = math.prod(shape) // shape[numbers.rhs_spec[0]]
    return None, 2 * inner * equation.outvars[0].aval.size
  return None, 0

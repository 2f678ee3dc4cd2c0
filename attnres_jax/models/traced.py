# SPDX-License-Identifier: Apache-2.0
"""Functions traced once, whose backward pass gets their arguments again.

What autodiff of a function saves contains its arguments, and much that follows
from them or from other saved values at little cost. A loop with a gradient rule
of its own would copy all of it into arrays of all steps, and out of them again.
Here, only the rest is kept.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

# Names of primitives whose results are not computed a second time.
_COSTLY = (
  *("dot", "pallas", "conv_", "scan", "while", "cond", "remat", "checkpoint"),
  *("custom", "sort", "top_k", "gather", "scatter", "cum", "shard_map", "name"),
)


class Traced:
  """A function, traced for its forward and its backward pass."""

  def __init__(self, function: Callable[..., Any], own: Any, others: Any):
    """Traces it.

    Args:
      function: of the trees in `own`, and then those in `others`.
      own: arguments with gradients, of these shapes.
      others: arguments without.
    """

    def run(own, others):
      results, pull = jax.vjp(lambda *own: function(*own, *others), *own)
      leaves, self._pull = jax.tree.flatten(pull)
      results, self._results = jax.tree.flatten(results)
      return results, leaves

    closed, shapes = jax.make_jaxpr(run, return_shape=True)(own, others)
    self._constants, self._jaxpr = closed.consts, closed.jaxpr
    count, self._dtypes = len(shapes[0]), [s.dtype for s in shapes[0]]
    self._outs = closed.jaxpr.outvars[:count]
    self._leaves = closed.jaxpr.outvars[count:]
    self._kept, self._equations, self._again = _sort(closed.jaxpr, self._leaves)

  def forward(self, own: Any, others: Any) -> tuple[Any, list[jax.Array]]:
    """The results, and what the backward pass needs beside the arguments."""
    given = jax.tree.leaves((own, others))
    found = self._evaluate(
      self._jaxpr.invars, given, self._jaxpr.eqns, [*self._outs, *self._kept]
    )
    count = len(self._outs)
    return jax.tree.unflatten(self._results, found[:count]), found[count:]

  def backward(
    self, own: Any, others: Any, kept: Sequence[jax.Array], gradients: Any
  ) -> Any:
    """The gradients of `own`, given those of the results."""
    given = [*jax.tree.leaves((own, others)), *kept]
    names = [*self._jaxpr.invars, *self._kept]
    again = self._evaluate(names, given, self._equations, self._again)
    values = dict(zip((*names, *self._again), (*given, *again)))
    leaves = [
      v.val if isinstance(v, core.Literal) else values[v] for v in self._leaves
    ]
    gradients, results = jax.tree.flatten(gradients)
    gradients = [g.astype(d) for g, d in zip(gradients, self._dtypes)]
    pull = jax.tree.unflatten(self._pull, leaves)
    return pull(jax.tree.unflatten(results, gradients))

  def _evaluate(self, names, given, equations, wanted):
    if not wanted:
      return []
    part = self._jaxpr.replace(
      invars=list(names),
      outvars=list(wanted),
      eqns=list(equations),
      debug_info=self._jaxpr.debug_info.with_unknown_names(),
    )
    return core.jaxpr_as_fun(core.ClosedJaxpr(part, self._constants))(*given)


class Static:
  """Something that is no array, as a leafless tree."""

  def __init__(self, value: Any):
    self.value = value


jax.tree_util.register_pytree_node(
  Static, lambda static: ((), static.value), lambda value, _: Static(value)
)


def _sort(jaxpr, leaves):
  """(what to keep, equations that give the rest again, the rest).

  Costly results are kept. What follows from arguments and from costly results
  that are kept anyway is computed again, and the others are kept.

  Args:
    jaxpr: of a function.
    leaves: what its backward pass needs.
  """
  leaves = dict.fromkeys(v for v in leaves if not isinstance(v, core.Literal))
  made = {v: e for e in jaxpr.eqns for v in e.outvars}
  wanted = [v for v in leaves if v in made]
  known = {*jaxpr.invars, *jaxpr.constvars}
  known |= {v for v in wanted if _costly(made[v])}
  kept = [v for v in wanted if v in known]
  reached = set()
  for equation in jaxpr.eqns:
    inputs = [v for v in equation.invars if not isinstance(v, core.Literal)]
    if known.issuperset(inputs) and not _costly(equation):
      reached.add(id(equation))
      known.update(equation.outvars)
  kept += [v for v in wanted if v not in known]
  again = [v for v in wanted if id(made[v]) in reached]
  needed, equations = set(again), []
  for equation in reversed(jaxpr.eqns):
    if id(equation) in reached and needed.intersection(equation.outvars):
      equations.append(equation)
      needed |= {v for v in equation.invars if not isinstance(v, core.Literal)}
  return kept, equations[::-1], again


def _costly(equation) -> bool:
  """Whether it is more than a few operations per element of its results."""
  inner = equation.params.get("jaxpr")
  if inner is not None and equation.primitive.name in ("jit", "pjit"):
    return any(map(_costly, inner.eqns))
  if any(part in equation.primitive.name for part in _COSTLY):
    return True
  size = lambda v: getattr(v.aval, "size", 1)
  return max(map(size, equation.outvars)) < max(
    map(size, equation.invars), default=1
  ) and equation.primitive.name not in ("squeeze", "slice", "dynamic_slice")

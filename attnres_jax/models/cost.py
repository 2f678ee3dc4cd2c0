# SPDX-License-Identifier: Apache-2.0
"""Declares the cost of operations whose program does not show it.

`attnres_jax.flops` counts the matrix products in the program of a module. Some
operations cost less than their products (causal attention computes both
triangles on most backends), some contain no product (a short convolution), and
some are kernels that differ between backends. These are called through
`counted`, which is a plain call except during counting.
"""

from collections.abc import Callable
import contextlib
from typing import Any

import jax
from jax.extend import core

# Part of the cost of a token, see `attnres_jax.flops.FlopsPerToken`; None is
# the part that the products of the same module belong to.
Part = str | None

_counting = jax.make_user_context(False)

COUNTED = core.Primitive("counted")
COUNTED.multiple_results = True
COUNTED.def_abstract_eval(lambda *operands, outs, **cost: outs)


def counting() -> contextlib.AbstractContextManager:
  """A context in which traced programs show `COUNTED` for counted calls."""
  return _counting(True)


def counted(
  function: Callable[..., Any],
  *args: Any,
  flops: float,
  part: Part = None,
  scanned: Any = (),
  outs: Any = None,
) -> Any:
  """Calls `function(*args)`, which counts as `flops` FLOPs.

  Args:
    function: of arrays.
    *args: its arguments.
    flops: of the call; a multiply-add is two.
    part: see `Part`.
    scanned: arrays that add two FLOPs per entry, the first time that a counted
      call uses each of them (the mean square of a depth source).
    outs: results, or arrays like them, if computing their shapes takes long.
  """
  if not _counting.value:
    return function(*args)
  if outs is None:
    outs = jax.eval_shape(function, *args)
  outs, tree = jax.tree.flatten(outs)
  scanned = jax.tree.leaves(scanned)
  results = COUNTED.bind(
    *scanned,
    *(x for x in jax.tree.leaves(args) if not any(x is y for y in scanned)),
    outs=tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in outs),
    flops=flops,
    part=part,
    num_scanned=len(scanned),
  )
  return jax.tree.unflatten(tree, results)

# SPDX-License-Identifier: Apache-2.0
"""What an operation costs, said beside it where its program cannot tell.

`attnres_jax.flops` counts the matrix products in the program of a module. Some
operations cost less than their products (causal attention computes both halves
of a triangle on most backends), some contain none (a short convolution), and
some are kernels that differ from backend to backend. These are called through
`counted`, which is a plain call unless somebody counts.
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
  """Programs traced within it show `COUNTED` in place of counted calls."""
  return _counting(True)


def counted(
  function: Callable[..., Any],
  *args: Any,
  flops: float,
  part: Part = None,
  scanned: Any = (),
  outs: Any = None,
) -> Any:
  """`function(*args)`, which counts as so many FLOPs.

  Args:
    function: of arrays.
    *args: its arguments.
    flops: of the call; a multiply-add is two.
    part: see `Part`.
    scanned: arrays that add two FLOPs per entry on top, the first time that a
      counted call meets each of them (the mean square of a depth source).
    outs: its results, or what is like them, where finding out takes long.
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

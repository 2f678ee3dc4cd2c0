# SPDX-License-Identifier: Apache-2.0
"""Loops over sublayers (`depth_scan`), and parts of arrays in them."""

from typing import Any

import jax
import jax.numpy as jnp

from attnres_jax import scopes
from attnres_jax.models import depth_places


def over(step, carry, pattern, xs=None, *, reverse=False):
  """A scan over the repeats of a pattern, or one step.

  Args:
    step: maps a carry, and places of sublayers and more, to a carry and what to
      stack.
    carry: the first one.
    pattern: of the sublayers.
    xs: more, stacked over the repeats if there are several.
    reverse: whether the last step comes first.
  """
  if len(pattern.at) == 1:
    return step(carry, (pattern.at[0], xs))

  def run(carry, both):
    table_PN, xs = both
    own = [depth_places.At(*table_PN[p]) for p in range(len(pattern.kinds))]
    return step(carry, (own, xs))

  table_GPN = jnp.asarray(pattern.table_GPN)
  return jax.lax.scan(run, carry, (table_GPN, xs), reverse=reverse)


def when(wanted, of_all_steps, function, carry):
  """`function(carry, 0)` if wanted, else the carry.

  As a loop, since a conditional would copy what it leaves as it is.

  Args:
    wanted: 0 or 1, possibly known at run time only.
    of_all_steps: its values in all steps.
    function: see above. The compiler does not know that its 0 is one.
    carry: a tree of arrays.
  """
  mean = sum(of_all_steps) / len(of_all_steps)
  if mean in (0, 1):
    return function(carry, 0) if mean else carry
  with scopes.mean_trips(mean):
    return jax.lax.fori_loop(0, wanted, lambda i, c: function(c, i), carry)


def empty_like(a: jax.Array) -> jax.Array:
  """Room for an array; on a TPU, nothing is written."""
  return jax.lax.empty(a.shape, a.dtype)


def cut(tree: Any, first: Any, size: int, *, axis: int = 0) -> Any:
  """`size` rows of each array, from row `first` on."""
  return jax.tree.map(
    lambda a: jax.lax.dynamic_slice_in_dim(a, first, size, axis), tree
  )


def one(tree: Any, index: Any, *, axis: int = 0) -> Any:
  """One row of each array, without the axis of rows."""
  return jax.tree.map(
    lambda a: jax.lax.dynamic_index_in_dim(a, index, axis, keepdims=False), tree
  )


def put(tree: Any, part: Any, first: Any, *, axis: int = 0) -> Any:
  """Each array with other rows from row `first` on, in its own dtype."""
  return jax.tree.map(
    lambda a, b: jax.lax.dynamic_update_slice_in_dim(
      a, b.astype(a.dtype), first, axis
    ),
    tree,
    part,
  )

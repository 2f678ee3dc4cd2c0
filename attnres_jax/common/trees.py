# SPDX-License-Identifier: Apache-2.0
"""Trees of arrays as flat dicts: the names of weights in files."""

from collections.abc import Mapping
from typing import Any

import jax


def to_flat(tree: Any) -> dict[str, Any]:
  """Any pytree as {"path/of/leaf": leaf}.

  Raises:
    ValueError: two leaves have the same path.
  """
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  flat = {_name(path): leaf for path, leaf in leaves}
  if len(flat) != len(leaves):
    raise ValueError("two leaves of the tree have the same path")
  return flat


def from_flat(like: Any, flat: Mapping[str, Any]) -> Any:
  """The tree of `like` with the leaves of `flat`."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: flat[_name(path)], like
  )


def _name(path: Any) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")

# SPDX-License-Identifier: Apache-2.0
"""Which parameter is trained how, in one table.

Every parameter has exactly one row, found by its path in the model. A row says

  axes    of a matrix: those that count matrices (depth, experts), those of its
          rows and those of its columns, as in `L|D|NH`. Muon sees a projection
          onto N heads of width H as ONE matrix of D rows and N H columns.
          Empty for what is no matrix to Muon: AdamW trains it.
  decays  whether weight decay applies to it
  load    it is a selection bias of experts, whose "gradient" is their load:
          clipping, norms and both optimisers pass it by

The choices behind it (Moonlight, arXiv:2502.16982, where nothing else is said):

  matrices of mixers, MLPs, experts, routers   Muon, each expert by itself
  embedding, head, gains of norms              AdamW with decay; Moonlight finds
                                               decay of the gains important
  short convolutions                           AdamW with decay (our choice)
  a_log, dt_bias                               AdamW, no decay (our choice)
  residual scheme: pseudo-queries, key gains   AdamW, no decay: it would pull
                                               every depth softmax back to
                                               uniform (our choice)
"""

import math
import re
from typing import Any, NamedTuple

import jax


class Row(NamedTuple):
  """How the parameters whose paths match are trained."""

  path: str  # A regular expression for the whole path.
  axes: str = ""
  decays: bool = True
  load: bool = False


# L: sublayers of one kind; E: experts; the other letters as in `models`.
TABLE = (
  Row(r"embedding\.(table|head)"),
  Row(r"final_norm\.gain"),
  Row(r"residual\..*", decays=False),
  Row(r"sublayers\.\w+\.norm\.gain"),
  # Attention with grouped queries.
  Row(r"sublayers\.attention\.core\.(query|key|value)", "L|D|NH"),
  Row(r"sublayers\.attention\.core\.output", "L|NH|D"),
  # KDA.
  Row(r"sublayers\.kda\.core\.(query|key|value)", "L|D|NH"),
  Row(r"sublayers\.kda\.core\.(decay|gate)_down", "L|D|R"),
  Row(r"sublayers\.kda\.core\.(decay|gate)_up", "L|R|NH"),
  Row(r"sublayers\.kda\.core\.beta", "L|D|N"),
  Row(r"sublayers\.kda\.core\.output", "L|NH|D"),
  Row(r"sublayers\.kda\.core\.(query|key|value)_conv"),
  Row(r"sublayers\.kda\.core\.out_norm\.gain"),
  Row(r"sublayers\.kda\.core\.(a_log|dt_bias)", decays=False),
  # MLA.
  Row(r"sublayers\.mla\.core\.query", "L|D|NH"),
  Row(r"sublayers\.mla\.core\.compress", "L|D|R"),
  Row(r"sublayers\.mla\.core\.expand", "L|R|NH"),
  Row(r"sublayers\.mla\.core\.output", "L|NH|D"),
  Row(r"sublayers\.mla\.core\.latent_norm\.gain"),
  # Dense MLPs, and the shared expert, which is one.
  Row(r"sublayers\.(mlp\.core|moe\.core\.shared)\.(gate|up)", "L|D|F"),
  Row(r"sublayers\.(mlp\.core|moe\.core\.shared)\.down", "L|F|D"),
  # Routed experts.
  Row(r"sublayers\.moe\.core\.router", "L|D|E"),
  Row(r"sublayers\.moe\.core\.(gate|up)", "LE|D|F"),
  Row(r"sublayers\.moe\.core\.down", "LE|F|D"),
  Row(r"sublayers\.moe\.core\.selection_bias", decays=False, load=True),
)


def path_name(path: Any) -> str:
  """`sublayers.kda.core.query` of a path of `jax.tree_util`."""
  name = jax.tree_util.keystr(path, simple=True, separator=".")
  return name.removesuffix(".value")


def row_of(path: Any) -> Row:
  """The row of a parameter.

  Raises:
    ValueError: no row or several match; the table has to be made to.
  """
  name = path_name(path)
  rows = [row for row in TABLE if re.fullmatch(row.path, name)]
  if len(rows) != 1:
    raise ValueError(
      f"{name} has {len(rows)} rows in attnres_jax.optimizer.groups.TABLE,"
      " expected 1"
    )
  return rows[0]


def as_matrices(x: jax.Array, axes: str) -> jax.Array:
  """`x` [*batch, *rows, *columns] as [*batch, R, C], by a row's `axes`.

  Raises:
    ValueError: `x` has another number of axes.
  """
  batch, rows, columns = map(len, axes.split("|"))
  if x.ndim != batch + rows + columns:
    raise ValueError(f"axes {axes!r} do not fit an array of shape {x.shape}")
  row_count = math.prod(x.shape[batch : batch + rows])
  return x.reshape(*x.shape[:batch], row_count, -1)


def decays(params: Any) -> Any:
  """Tree of booleans: which parameters weight decay applies to."""
  return _map(lambda row: row.decays, params)


def matrices(params: Any) -> Any:
  """Tree of booleans: which parameters Muon trains."""
  return _map(lambda row: bool(row.axes), params)


def loads(params: Any) -> Any:
  """Tree of booleans: which are selection biases."""
  return _map(lambda row: row.load, params)


def trained(tree: Any) -> Any:
  """The tree (of parameters or gradients) without its selection biases."""
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: None if row_of(path).load else leaf, tree
  )


def _map(value: Any, params: Any) -> Any:
  return jax.tree_util.tree_map_with_path(
    lambda path, _: value(row_of(path)), params
  )

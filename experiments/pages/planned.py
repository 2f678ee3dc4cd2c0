# SPDX-License-Identifier: Apache-2.0
"""Rows of configs/plans.csv, which `attnres_jax.plan.search` compiled."""

from collections.abc import Mapping, Sequence

Row = Mapping[str, str]


def origin(rows: Sequence[Row]) -> str:
  """What compiled them, a sentence."""

  def each(column: str) -> str:
    return ", ".join(dict.fromkeys(row[column] for row in rows))

  return (
    f"Compiled up to the schedule, not run: jax {each('jax')}, libtpu"
    f" {each('libtpu')}, commits {each('commit')}."
  )

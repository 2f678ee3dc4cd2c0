# SPDX-License-Identifier: Apache-2.0
"""Rows of configs/plans.csv in tables: what `attnres_jax.aot.plan` compiled."""

from collections.abc import Mapping, Sequence

Row = Mapping[str, str]


def mesh(row: Row) -> str:
  """Its mesh, in words."""
  return f"{row['data']} x {row['fsdp']} x {row['expert']}"


def origin(rows: Sequence[Row]) -> str:
  """What compiled them, a sentence."""

  def each(column: str) -> str:
    return ", ".join(dict.fromkeys(row[column] for row in rows))

  return (
    f"Compiled up to the schedule, not run: jax {each('jax')}, libtpu"
    f" {each('libtpu')}, commits {each('commit')}."
  )

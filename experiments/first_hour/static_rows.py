# SPDX-License-Identifier: Apache-2.0
"""The committed rows of the kernels' schedules."""

from collections.abc import Mapping
import functools
import pathlib

from attnres_jax import csv_rows

RESULTS = pathlib.Path(__file__).parents[2] / "kernels/benchmarks/results"

Row = Mapping[str, str]


@functools.cache
def by_kernel() -> dict[tuple[str, str, str], Row]:
  """The rows of all tables, by kernel, chip and shape."""
  return {
    (row["kernel"], row["chip"], row["shape"]): row
    for name in ("tpu_static", "kda_static", "streams_static")
    for row in csv_rows.read(RESULTS / f"{name}.csv")
  }

# SPDX-License-Identifier: Apache-2.0
"""Text of the standard library in the format of FineWeb-Edu's files."""

import itertools
import pathlib

import numpy as np
import pyarrow
from pyarrow import parquet

from attnres_jax.data import stdlib


def texts(num_bytes: int) -> list[str]:
  """Different documents of a few kilobytes, so many bytes in all."""
  pieces, size = [], 0
  for turn in itertools.count():
    for document in stdlib.StdlibDocuments().iterate():
      text = document.text.decode(errors="replace")
      for start in range(0, len(text), 4000):
        if size >= num_bytes:
          return pieces
        pieces.append(f"{document.key} {turn}\n{text[start : start + 4000]}")
        size += len(pieces[-1])
  raise AssertionError


def fineweb_edu(folder: pathlib.Path, pieces: list[str]) -> None:
  """HuggingFaceFW/fineweb-edu, sample/10BT: Parquet."""
  folder = folder / "fineweb_edu" / "sample" / "10BT"
  folder.mkdir(parents=True)
  for number, part in enumerate(np.array_split(np.arange(len(pieces)), 4)):
    columns = {
      "text": [pieces[i] for i in part],
      "id": [f"<urn:uuid:{i}>" for i in part],
      "score": [3.5] * len(part),
    }
    parquet.write_table(
      pyarrow.table(columns),
      folder / f"{number:03d}_00000.parquet",
      row_group_size=1000,
    )

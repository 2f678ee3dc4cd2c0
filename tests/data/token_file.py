# SPDX-License-Identifier: Apache-2.0
"""Writes token files of uint16 ids."""

import json

import numpy as np


def write(path, ids, **fields):
  """The file, with a sidecar of its type, its length and these fields."""
  path.parent.mkdir(exist_ok=True)
  path.write_bytes(np.asarray(ids, "<u2").tobytes())
  sidecar = {"dtype": "uint16", "count": len(ids)} | fields
  path.with_suffix(".json").write_text(json.dumps(sidecar))

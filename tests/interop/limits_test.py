# SPDX-License-Identifier: Apache-2.0
"""Any value of any key of a config.json is read, or refused in one line.

Before anything of that size is built.
"""

import json
import math
import resource
import time

import pytest

from attnres_jax import config as config_lib
from attnres_jax.interop import families
from attnres_jax.interop import huggingface
from attnres_jax.interop import tensor_files
from tests import tiers
from tests.interop import small_checkpoint

SIZES = (300_000_000, 10**12)
MORE = (
  0, -1, 2**31 - 1, 10**30, 10**400, 1.5, math.nan, math.inf, None, True, "x",
  "\x1b[31m", [], [[1]], {}, {"x": 1}, *SIZES,
)  # fmt: skip


def _places(values):
  """All objects in a JSON object, each with each of its keys."""
  for key, value in list(values.items()):
    if isinstance(value, dict):
      yield from _places(value)
    yield values, key, value


@tiers.parametrize("family", families.FAMILIES, first=["attnres", "llama"])
@pytest.mark.parametrize(
  "given", [SIZES, pytest.param(MORE, marks=pytest.mark.slow)]
)
def test_every_value_is_read_or_refused(family, given, tmp_path):
  small_checkpoint.write(tmp_path, family)
  path = tmp_path / huggingface.CONFIG
  values = json.loads(path.read_text())
  if family == "llama":
    given = MORE
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  for place, key, good in _places(values):
    is_number = type(good) is int
    for value in given if is_number or given is MORE else ():
      place[key] = value
      path.write_text(json.dumps(values))
      start = time.process_time()
      try:
        huggingface.read(tmp_path)
      except (config_lib.ConfigError, tensor_files.TensorFileError) as error:
        message = str(error)
        assert message.isprintable() and str(tmp_path) in message, (key, value)
      else:
        # Such as the longest position, which no array has.
        limited = is_number and type(value) is int and not key.endswith("_id")
        assert not limited or value < 2**31, (key, value)
      assert time.process_time() - start < 2, (key, value)
    place[key] = good
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  assert peak - before < 200_000, f"{peak - before} kB"  # Of memory.

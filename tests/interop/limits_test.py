# SPDX-License-Identifier: Apache-2.0
"""No number in a config.json makes an import build anything of that size."""

import json
import resource
import time

import pytest

from attnres_jax import config as config_lib
from attnres_jax.interop import families
from attnres_jax.interop import huggingface
from attnres_jax.interop import tensor_files
from tests.interop import small_checkpoint

SIZES = (300_000_000, 10**12)
MORE_SIZES = (0, -1, 2**31 - 1, 10**400)


def _numbers(values, place=()):
  """The places of all whole numbers in a JSON object."""
  for key, value in values.items() if isinstance(values, dict) else ():
    if isinstance(value, dict):
      yield from _numbers(value, (*place, key))
    elif type(value) is int:
      yield (*place, key)


def _with(values, place, number):
  """A copy with another number in a place."""
  copied = json.loads(json.dumps(values))
  node = copied
  for key in place[:-1]:
    node = node[key]
  node[place[-1]] = number
  return copied


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize(
  "sizes", [SIZES, pytest.param(MORE_SIZES, marks=pytest.mark.slow)]
)
def test_every_number_has_a_limit(family, sizes, tmp_path):
  small_checkpoint.write(tmp_path, family)
  path = tmp_path / huggingface.CONFIG
  values = json.loads(path.read_text())
  places = list(_numbers(values))
  assert "num_hidden_layers" in {place[-1] for place in places}
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  for place in places:
    for size in sizes:
      text = json.dumps(_with(values, place, 12345)).replace(
        "12345", str(size), 1
      )
      path.write_text(text)
      start = time.process_time()
      try:
        huggingface.read(tmp_path)
      except (config_lib.ConfigError, tensor_files.TensorFileError) as error:
        message = str(error)
        assert len(message.splitlines()) == 1, message
        assert str(tmp_path) in message, (place, size, message)
      else:
        # Such as the longest position, which no array has.
        assert size < 2**31 or place[-1].endswith("_id"), (place, size)
      assert time.process_time() - start < 2, (place, size)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  assert peak - before < 200_000, f"{peak - before} kB"  # Of memory.

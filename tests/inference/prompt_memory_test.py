# SPDX-License-Identifier: Apache-2.0
"""The numbers of the paper's section 4.2, as the specification has them."""

import pytest

from attnres_jax import config as config_lib
from attnres_jax.inference import prompt_memory

TOKENS, CHUNK, DEVICES = 131072, 16384, 8


def _config(name="block_attnres", **fields):
  residual = config_lib.ResidualConfig(name, num_blocks=8)
  sizes = dict(width=7168, num_layers=16, num_heads=56, dtype="bfloat16")
  return config_lib.ModelConfig(residual=residual, **sizes | fields)


@pytest.mark.parametrize(
  ("where", "gigabytes", "with_embedding"),
  [
    ({}, 15.03, 16.9),
    (dict(devices=DEVICES), 1.879, 2.11),
    (dict(devices=DEVICES, chunk=CHUNK), 0.235, 0.264),
  ],
)
def test_numbers_of_the_paper(where, gigabytes, with_embedding):
  found = prompt_memory.block_bytes(_config(), TOKENS, **where)
  assert float(f"{found / 1e9:.4g}") == pytest.approx(gigabytes, rel=5e-4)
  found = prompt_memory.block_bytes(_config(), TOKENS, embedding=True, **where)
  assert found / 1e9 == pytest.approx(with_embedding, rel=3e-3)


def test_other_schemes_and_sizes():
  bytes_of = prompt_memory.block_bytes
  assert bytes_of(_config("prenorm"), TOKENS, embedding=True) == 0
  # A value per sublayer; float32; tokens that the devices do not divide.
  full = _config("full_attnres", num_layers=2, dtype="float32")
  assert bytes_of(full, 10, devices=4) == 4 * 3 * 7168 * 4
  assert bytes_of(full, 10, chunk=20) == 4 * 10 * 7168 * 4
  with pytest.raises(config_lib.ConfigError, match="devices: got 0"):
    bytes_of(full, 10, devices=0)

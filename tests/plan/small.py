# SPDX-License-Identifier: Apache-2.0
"""A language model that fills tiles of a TPU and compiles fast."""

from attnres_jax import config as config_lib

FIELDS = {
  "model.vocab_size": 260,
  "model.num_layers": 2,
  "model.residual.num_blocks": 2,
  "data.batch_size": 8,
}


def config(**fields) -> config_lib.RunConfig:
  """A config of two transformer blocks and eight rows, with these changes."""
  return config_lib.load_config("configs/lm.py:size=tiny", FIELDS | fields)

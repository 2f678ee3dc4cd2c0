# SPDX-License-Identifier: Apache-2.0
r"""The language models of `lm.py`, split over the ranks of a pipeline.

  JAX_NUM_CPU_DEVICES=4 python -m attnres_jax.main \
    --config=configs/pipeline.py:size=micro --workdir=runs/pipeline

This is `configs/lm.py:size=micro` on 4 ranks with 2 virtual stages each and
8 microbatches. It takes about 40 s of processor time (Intel Xeon, jax 0.10.2)
and ends at a validation loss of 2.86 nats per byte, the same as without the
pipeline.

Takes the arguments of `lm.py`. The same overrides turn any other config into a
pipeline; see docs/pipeline.md.
"""

import pathlib

from attnres_jax import config as c
from attnres_jax.config import load

_LM = load.load_file(str(pathlib.Path(__file__).with_name("lm.py")))

ARGUMENTS = _LM.ARGUMENTS


def get_config(arg=None):
  """Config of one run; see the module docstring."""
  config = _LM.get_config(arg)
  config.unlock()
  name = config.name.replace("lm_", "pipeline_", 1)
  name = name.removesuffix(config.model.residual.name) + "{}"
  config.name = c.follow(config, "model.residual.name", name.format)
  config.mesh.stage = 4
  config.pipeline.virtual_stages = 2
  config.pipeline.microbatches = 8
  config.data.batch_size = 8 * -(-config.data.batch_size // 8)
  config.lock()
  return config

# SPDX-License-Identifier: Apache-2.0
"""Arms of a seed share all but the scheme; differences are taken in pairs."""

import dataclasses

import pytest

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.interop import upcycle
from experiments.upcycle import run


@pytest.mark.parametrize("arm", run.ARMS)
def test_every_arm_begins_as_its_source(arm):
  config = config_lib.load_config(f"{run.SOURCE},runlocal").model
  model = models.build_model(dataclasses.replace(config, vocab_size=257))
  assert upcycle.upcycle(model, run.ARMS[arm][0]).config != model.config

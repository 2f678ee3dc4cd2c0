# SPDX-License-Identifier: Apache-2.0
"""Arms of a seed share all but the scheme; differences are taken in pairs."""

import dataclasses

import pytest

from attnres_jax import config as config_lib
from attnres_jax.interop import upcycle
from experiments.upcycle import run


@pytest.mark.parametrize("arm", run.ARMS)
def test_every_arm_begins_as_its_source(arm):
  source = config_lib.load_config(f"{run.SOURCE},runlocal").model
  residual = run.ARMS[arm][0]
  if residual.name == "block_attnres":
    read = dataclasses.replace(residual.read, scale="sum")
    residual = dataclasses.replace(residual, read=read)
  config = dataclasses.replace(source, residual=residual)
  upcycle.check_begins_as_prenorm(config)

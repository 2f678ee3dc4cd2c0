# SPDX-License-Identifier: Apache-2.0
"""Options of the compiler."""

import types

import numpy as np
import pytest

from attnres_jax import compiler
from attnres_jax import config as config_lib


def _options(kind, *given):
  train = config_lib.TrainConfig(compiler_options=given)
  device = types.SimpleNamespace(device_kind=kind)
  mesh = types.SimpleNamespace(devices=np.array([device]))
  return compiler.options(types.SimpleNamespace(train=train), mesh)


def test_kinds_of_devices():
  name = "xla_tpu_enable_async_all_to_all"
  assert _options("TPU v5")[name] == _options("TPU v6 lite")[name] == "true"
  assert not _options("cpu")
  changed = _options("TPU v5", f"{name}=false", "xla_other=a=b")
  assert changed == _options("TPU v5") | {name: "false", "xla_other": "a=b"}


@pytest.mark.parametrize("option", ["xla_flag", "xla_flag=", "=true", "a b=c"])
def test_bad_options(option):
  with pytest.raises(config_lib.ConfigError, match="options with values"):
    config_lib.TrainConfig(compiler_options=(option,))

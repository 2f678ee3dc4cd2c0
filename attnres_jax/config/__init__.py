# SPDX-License-Identifier: Apache-2.0
"""The description of a run: a locked ConfigDict, then frozen dataclasses.

A file in `configs/` returns a `ConfigDict` (`get_config(arg)`), users override
fields on the command line, and `build_run_config` converts the result into a
`RunConfig`. Every dataclass checks itself when it is built, so a bad value
stops a run before anything compiles, with one line that names the field, the
value and what is accepted. Derived values (head width, number of blocks) are
computed where they are used, because overrides arrive after `get_config` has
returned.

This package imports neither JAX nor anything else of the library.
"""

from attnres_jax.config.errors import ConfigError
from attnres_jax.config.errors import RunError
from attnres_jax.config.errors import choose
from attnres_jax.config.errors import fail
from attnres_jax.config.errors import fail_argument
from attnres_jax.config.load import build_run_config
from attnres_jax.config.load import default_config
from attnres_jax.config.load import differences
from attnres_jax.config.load import flatten
from attnres_jax.config.load import load_config
from attnres_jax.config.load import parse_arg
from attnres_jax.config.load import parse_field
from attnres_jax.config.load import to_dict
from attnres_jax.config.load import to_json
from attnres_jax.config.model import KdaConfig
from attnres_jax.config.model import MlaConfig
from attnres_jax.config.model import ModelConfig
from attnres_jax.config.model import MoeConfig
from attnres_jax.config.model import ResidualConfig
from attnres_jax.config.run import BYTE_VOCAB_SIZE
from attnres_jax.config.run import CheckpointConfig
from attnres_jax.config.run import DataConfig
from attnres_jax.config.run import LogConfig
from attnres_jax.config.run import LossConfig
from attnres_jax.config.run import MeshConfig
from attnres_jax.config.run import OptimConfig
from attnres_jax.config.run import PipelineConfig
from attnres_jax.config.run import RunConfig
from attnres_jax.config.run import TrainConfig

__all__ = [
  "BYTE_VOCAB_SIZE",
  "CheckpointConfig",
  "ConfigError",
  "DataConfig",
  "KdaConfig",
  "LogConfig",
  "LossConfig",
  "MeshConfig",
  "MlaConfig",
  "ModelConfig",
  "MoeConfig",
  "OptimConfig",
  "PipelineConfig",
  "ResidualConfig",
  "RunConfig",
  "RunError",
  "TrainConfig",
  "build_run_config",
  "choose",
  "default_config",
  "differences",
  "fail",
  "fail_argument",
  "flatten",
  "load_config",
  "parse_arg",
  "parse_field",
  "to_dict",
  "to_json",
]

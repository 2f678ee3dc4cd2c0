# SPDX-License-Identifier: Apache-2.0
"""The description of a run: a locked ConfigDict, then frozen dataclasses.

The room exceeds its budget of 1,500 lines: almost a third are docstrings, from
which --help_config describes fields, and each field has one-line errors.

A file in `configs/` returns a `ConfigDict` (`get_config(arg)`), users override
fields on the command line, and `build_run_config` converts the result into a
`RunConfig`. Every dataclass checks itself when it is built, so a bad value
stops a run before anything compiles, with one line that names the field, the
value and what is accepted. Derived values (head width, number of blocks) are
computed where they are used, because overrides arrive after `get_config` has
returned.

This package imports neither JAX nor anything else of the library, but for
`load_config`, which at its end builds what a config describes.
"""

from attnres_jax.config.dicts import affecting as affecting
from attnres_jax.config.dicts import affects as affects
from attnres_jax.config.dicts import difference_lines as difference_lines
from attnres_jax.config.dicts import differences as differences
from attnres_jax.config.dicts import flatten as flatten
from attnres_jax.config.dicts import from_json as from_json
from attnres_jax.config.dicts import to_dict as to_dict
from attnres_jax.config.dicts import to_json as to_json
from attnres_jax.config.errors import ConfigError as ConfigError
from attnres_jax.config.errors import RunError as RunError
from attnres_jax.config.errors import choose as choose
from attnres_jax.config.errors import fail as fail
from attnres_jax.config.errors import fail_argument as fail_argument
from attnres_jax.config.load import Source as Source
from attnres_jax.config.load import build_run_config as build_run_config
from attnres_jax.config.load import default_config as default_config
from attnres_jax.config.load import follow as follow
from attnres_jax.config.load import load_config as load_config
from attnres_jax.config.load import parse_arg as parse_arg
from attnres_jax.config.load import parse_field as parse_field
from attnres_jax.config.load import parse_values as parse_values
from attnres_jax.config.load import residual_config as residual_config
from attnres_jax.config.load import under as under
from attnres_jax.config.model import ActivationConfig as ActivationConfig
from attnres_jax.config.model import AttentionConfig as AttentionConfig
from attnres_jax.config.model import KdaConfig as KdaConfig
from attnres_jax.config.model import MlaConfig as MlaConfig
from attnres_jax.config.model import ModelConfig as ModelConfig
from attnres_jax.config.model import MoeConfig as MoeConfig
from attnres_jax.config.model import RopeConfig as RopeConfig
from attnres_jax.config.residual import (
  DepthAttentionConfig as DepthAttentionConfig,
)
from attnres_jax.config.residual import DepthReadConfig as DepthReadConfig
from attnres_jax.config.residual import ResidualConfig as ResidualConfig
from attnres_jax.config.run import BYTE_VOCAB_SIZE as BYTE_VOCAB_SIZE
from attnres_jax.config.run import CheckpointConfig as CheckpointConfig
from attnres_jax.config.run import DataConfig as DataConfig
from attnres_jax.config.run import LossConfig as LossConfig
from attnres_jax.config.run import MeshConfig as MeshConfig
from attnres_jax.config.run import OptimConfig as OptimConfig
from attnres_jax.config.run import PipelineConfig as PipelineConfig
from attnres_jax.config.run import RunConfig as RunConfig
from attnres_jax.config.run import TrainConfig as TrainConfig

# SPDX-License-Identifier: Apache-2.0
"""The folder of a run that has weights only: what imports and upcycling write.

`sample` takes it unchanged. `main` trains on from it, in another folder:

  python -m attnres_jax.main --config=FOLDER/config.py --workdir=runs/tuned

config.py, which is written with it, is the network with `train.start_from`.
`interop.json` says what was imported, and which files came with it. Networks of
our own runs have none: their texts open and end as in training.
"""

from collections.abc import Mapping
import dataclasses
import json
import os
import pathlib
from typing import Annotated, Any

from etils import epath
import ml_collections

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.common import files
from attnres_jax.common import records
from attnres_jax.config import fields
from attnres_jax.interop import config_table
from attnres_jax.interop import tensor_files
from attnres_jax.train import checkpoint
from attnres_jax.train import run_folder

FACTS = "interop.json"
_CONFIG_FILE = "config.py"
_CONFIG_TEXT = '''\
"""Trains on from the network of this folder.

  python -m attnres_jax.main --config={path} --workdir=runs/tuned
"""

from attnres_jax.interop import weights_folder


def get_config(arg=None):
  return weights_folder.continued(__file__, arg)
'''
# Longer sequences, if the network has them, are asked for.
_LENGTH, _BATCH_SIZE, _RATE = 1024, 8, 2e-5


def check_new(name: str, path: str) -> pathlib.Path:
  """A local folder that has nothing in it, or does not exist.

  Raises:
    ConfigError: it is something else; the message says `name`.
  """
  folder = files.check_folder(name, path)
  if files.is_remote(folder):
    config_lib.fail_argument(name, path, "a local folder")
  if folder.exists() and any(folder.iterdir()):
    config_lib.fail_argument(name, path, "a new or empty folder")
  return pathlib.Path(folder)


def write(
  folder: pathlib.Path,
  config: config_lib.RunConfig,
  model: models.Transformer,
  facts: Mapping[str, Any],
  also: Mapping[str, bytes],
) -> None:
  """Writes a network as the checkpoint of step 0 of a finished run.

  The folder is new or empty. `facts` are about the import of the network, none
  if it is ours, and `also` has further files, such as the tokenizer's.
  """
  folder.mkdir(parents=True, exist_ok=True)
  for name, content in also.items():
    files.write(folder / name, content)
  run_folder.write_network(folder, config, model)
  if facts or also:
    values = dict(facts) | {"files": sorted(also)}
    files.write(folder / FACTS, json.dumps(values, indent=2) + "\n")
  path = folder / _CONFIG_FILE
  files.write(path, _CONFIG_TEXT.format(path=path))


def continued(file: str, arg: str | None = None) -> ml_collections.ConfigDict:
  """The config of a run that trains on from the folder of `file`."""
  config_lib.parse_arg(arg)
  folder = pathlib.Path(file).absolute().parent
  run = records.read(folder / run_folder.CONFIG, config_lib.RunConfig)
  config = ml_collections.ConfigDict(config_lib.to_dict(run))
  config.name = f"{run.name}_continued"
  config.train.start_from = str(folder)
  config.data.sequence_length = min(_LENGTH, run.data.sequence_length)
  config.data.batch_size = _BATCH_SIZE
  config.optim.peak_lr = _RATE
  config.lock()
  return config


def origin(
  workdir: str | os.PathLike, config: config_lib.RunConfig
) -> tuple[dict[str, Any], dict[str, bytes]]:
  """The facts about the network that a run began with, and their files.

  Follows `train.start_from`; both are empty if it began with new weights.

  Raises:
    ConfigError: a file about the origin is damaged; names it.
  """
  folder, seen = epath.Path(workdir), set()
  while str(folder) not in seen:
    seen.add(str(folder))
    if (folder / FACTS).exists():
      return _read_facts(folder)
    if not config.train.start_from:
      break
    folder = epath.Path(config.train.start_from)
    if folder.parent.name == checkpoint.CHECKPOINTS:
      folder = folder.parent.parent
    described = folder / run_folder.CONFIG
    if described.exists():
      config = records.read(described, config_lib.RunConfig)
  return {}, {}


_DTYPE = Annotated[
  str,
  fields.Accepted(
    lambda name: name in tensor_files.DTYPES, " or ".join(tensor_files.DTYPES)
  ),
]


@dataclasses.dataclass(frozen=True)
class Facts(records.Record):
  """interop.json: what a network began with; `files` are beside it."""

  others = True
  format: str | None = None
  family: str | None = None
  source: str | None = None
  dtype: _DTYPE | None = None
  dtypes: dict[str, _DTYPE] | None = None
  config: dict[str, Any] | None = None
  upcycled_from: str | None = None
  files: tuple[records.FileName, ...] = ()

  def __post_init__(self):
    super().__post_init__()
    for key in config_table.LENGTHS:
      length = (self.config or {}).get(key)
      fields.accept(f"config.{key}", length, fields.Size | None)


def _read_facts(folder: epath.Path) -> tuple[dict[str, Any], dict[str, bytes]]:
  path, contents = folder / FACTS, {}
  try:
    facts = records.read(path, Facts)
    for name in facts.files:
      if os.path.islink(folder / name):
        raise ValueError(f"{name!r} is a link, which may lead elsewhere")
      contents[name] = files.read(folder / name)
  except config_lib.ConfigError:
    raise
  except (OSError, ValueError) as error:
    config_lib.fail_argument(
      "--workdir", str(folder), f"a folder with a readable {FACTS} ({error})"
    )
  return config_lib.to_dict(facts), contents

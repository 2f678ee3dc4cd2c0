# SPDX-License-Identifier: Apache-2.0
"""A run before it touches its folder: everything that can be wrong is found."""

import dataclasses
from typing import Any

from etils import epath
import jax

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.common import environment
from attnres_jax.common import plans as plans_lib
from attnres_jax.common import processes
from attnres_jax.common import sharding
from attnres_jax.train import run_folder
from attnres_jax.train import train_state


@dataclasses.dataclass(frozen=True)
class Prepared:
  """A run that can begin.

  Attributes:
    datasets: train and validation, as far as this process reads them.
    descriptions: of both, for data.json.
    program: the state's shapes and the steps, not compiled. Its config has the
      plan and the tokenizer's vocabulary, its mesh all devices.
  """

  datasets: dict[str, data.Dataset]
  descriptions: dict[str, dict[str, Any]]
  program: train_state.Program


def prepare(config: config_lib.RunConfig, plans: epath.PathLike) -> Prepared:
  """Builds all parts of a run without arrays; all processes call it.

  The file of plans is for `optim.accumulate_steps=0`.

  Raises:
    ConfigError: the first part that cannot be built.
  """
  vocab_size = data.make_tokenizer(config.data).vocab_size
  config = config.with_vocab_size(vocab_size)
  config = plans_lib.resolve(config, jax.devices(), plans)
  mesh = sharding.make_mesh(config.mesh)
  part, parts = sharding.share_of_rows(mesh, jax.process_index())
  datasets = {
    split: data.open_dataset(
      config.data, split, process_index=part, process_count=parts
    )
    for split in ("train", "validation")
  }
  data.check(config, datasets["train"])
  prepared = Prepared(
    datasets,
    {split: dataset.describe() for split, dataset in datasets.items()},
    train_state.make_program(config, mesh),
  )
  environment.check_size(prepared.program.abstract_state)
  fingerprints = run_folder.fingerprints(prepared.descriptions)
  # Before any check that hosts with another text would fail alone.
  if not processes.is_same(str(fingerprints)):
    where = config.data.path or list(config.data.paths)
    config_lib.fail("data.path", where, "the same text on all hosts")
  return prepared

# SPDX-License-Identifier: Apache-2.0
r"""Trained networks that come with the library.

  from attnres_jax import load_trained
  model = load_trained("block_attnres")

Commands take such a network wherever they take the folder of a finished run:

  python -m attnres_jax.inference.sample --prompt="def " \
    --workdir=attnres_jax:trained/block_attnres

attnres_jax/trained/NAME has

  config.json        of the run, all fields
  model.safetensors  weights in bfloat16, by their paths in the network
  origin.json        text and its licence, loss, steps, versions, commit

which this command writes from a run (docs/start.md trains them):

  python -m attnres_jax.inference.packaged --workdir=runs/trained/RUN \
    --licence="PSF-2.0, the standard library of Python"
"""

import argparse
from collections.abc import Sequence
import json
import pathlib
import sys
from typing import TYPE_CHECKING

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax.common import command_line
from attnres_jax.common import files
from attnres_jax.common import records
from attnres_jax.config import errors

if TYPE_CHECKING:
  from attnres_jax import models

PREFIX = "attnres_jax:trained/"
FOLDER = pathlib.Path(__file__).parents[1] / "trained"
CONFIG, WEIGHTS, ORIGIN = "config.json", "model.safetensors", "origin.json"
# Of the last row of a run's start, in `metrics.jsonl`.
_ORIGIN = ("hardware", "commit", "python", "jax")


def names() -> list[str]:
  """The networks that there are."""
  return sorted(path.parent.name for path in FOLDER.glob(f"*/{WEIGHTS}"))


def load_trained(name: str) -> "models.Transformer":
  """A trained network, by its name such as "block_attnres".

  Its matrices are float32, of values that bfloat16 can hold. `model.config`
  says what it is, and its tokens are bytes.

  Raises:
    ConfigError: there is no such network; says which there are.
  """
  return load("name", name)[1]


def load(
  argument: str, name: str
) -> "tuple[config_lib.RunConfig, models.Transformer]":
  """Config and network, by the name that an argument has.

  Raises:
    ConfigError: there is no such network.
  """
  import jax
  import jax.numpy as jnp
  from safetensors import flax as safetensors

  from attnres_jax import models
  from attnres_jax.common import trees

  errors.check_in(argument, name, names())
  path = FOLDER / name
  config = config_lib.load_config(str(path / CONFIG))
  abstract = jax.eval_shape(lambda: models.build_model(config.model))
  flat = safetensors.load_file(path / WEIGHTS)
  leaves = {
    name: jnp.asarray(flat[name], leaf.dtype)
    for name, leaf in trees.to_flat(abstract).items()
  }
  return config, trees.from_flat(abstract, leaves)


def write(
  workdir: epath.PathLike, licence: str, folder: pathlib.Path = FOLDER
) -> pathlib.Path:
  """Packages the network of a finished run; returns its folder.

  The run has read bytes, with this licence. A packaged network of the same
  scheme in `folder` is replaced.

  Raises:
    ConfigError: the run is not finished, or its tokens are no bytes.
  """
  import jax.numpy as jnp
  from safetensors import flax as safetensors

  from attnres_jax.common import trees
  from attnres_jax.train import checkpoint
  from attnres_jax.train import metrics
  from attnres_jax.train import run_folder

  workdir = epath.Path(workdir)
  config, model = checkpoint.load_model(workdir)
  if config.data.tokenizer != "bytes":
    config_lib.fail("data.tokenizer", config.data.tokenizer, "'bytes'")
  summary = run_folder.finished_summary(workdir)
  if summary is None:
    config_lib.fail_argument("--workdir", str(workdir), "a finished run")
  data = records.read_object(workdir / run_folder.DATA)
  rows = metrics.read_rows(workdir)
  start = next(r for r in rows if r.get("event") == "start")
  origin = {
    "licence_of_text": licence,
    "text": data["train"],
    "steps": summary["step"],
    # Of the run, whose weights were float32.
    "validation_loss": summary["validation_loss"],
    **{name: start[name] for name in _ORIGIN},
  }
  made = folder / config.model.residual.name
  made.mkdir(parents=True, exist_ok=True)
  leaves = trees.to_flat(model)
  flat = {name: jnp.asarray(a, jnp.bfloat16) for name, a in leaves.items()}
  files.write(epath.Path(made) / WEIGHTS, safetensors.save(flat))
  files.write(epath.Path(made) / CONFIG, config_lib.to_json(config))
  text = json.dumps(origin, indent=2) + "\n"
  files.write(epath.Path(made) / ORIGIN, text)
  return made


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = command_line.Parser(
    "python -m attnres_jax.inference.packaged", __doc__
  )
  parser.add_argument("--workdir", required=True, help="of a finished run")
  parser.add_argument("--licence", required=True, help="of its text")
  return command_line.run(_write, parser.parse_args(argv))


def _write(options: argparse.Namespace) -> None:
  workdir = files.check_folder("--workdir", options.workdir)
  print(write(workdir, options.licence))


if __name__ == "__main__":
  sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Loss and gradients of the same networks, here and in eager PyTorch.

  python -m experiments.step_cost.pytorch [--rounds=5]

Needs the extra `torch`. For each scheme, exports a random network of the size
`large` (d=512, 24 sublayers, T=512, 2 rows), loads it as the class in PyTorch
that an export comes with, checks that both give the same loss and the same
length of the gradient, and times both in turn, in one process with all cores.
PreNorm is timed in both forms, as one scan and unrolled. Writes a row per
scheme to pytorch.csv beside this file and fills the README.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
import importlib.metadata
import math
import os
import pathlib
import sys
import tempfile
from typing import Any
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.common import command_line
from attnres_jax.interop import huggingface
from experiments import measure as measure_lib
from experiments import publish
from experiments.step_cost import run

_FILE = pathlib.Path(__file__).absolute().with_name("pytorch.csv")
SCHEMES = ("prenorm", "prenorm unrolled", "block_attnres", "full_attnres")
# Relative; both compute in float32.
_TOLERANCE = 1e-3
_SIZE = "large"

Step = Callable[[], tuple[float, float]]


def steps(scheme: str) -> tuple[Step, Step]:
  """Ours and PyTorch's: loss and length of the gradient."""
  config = run.config_of(_SIZE, scheme)
  model = models.build_model(config.with_vocab_size(256).model)
  shape = (config.data.batch_size, config.data.sequence_length)
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 256, shape, dtype=np.int32)
  return _ours(model, tokens), _theirs(model, tokens)


def _ours(model: models.Transformer, tokens: np.ndarray) -> Step:
  def loss(model):
    log_p_BTV = jax.nn.log_softmax(model(tokens)[:, :-1])
    return -jnp.mean(
      jnp.take_along_axis(log_p_BTV, tokens[:, 1:, None], axis=-1)
    )

  def step(model):
    value, gradient = jax.value_and_grad(loss)(model)
    squares = jax.tree.map(lambda x: jnp.sum(jnp.square(x)), gradient)
    return value, jnp.sqrt(sum(jax.tree.leaves(squares))), gradient

  # The gradients are outputs, so that they have to be made.
  compiled = jax.jit(step).lower(model).compile()

  def call():
    value, length, _ = jax.block_until_ready(compiled(model))
    return float(value), float(length)

  return call


def _theirs(model: models.Transformer, tokens: np.ndarray) -> Step:
  import torch
  import transformers

  torch.set_num_threads(len(os.sched_getaffinity(0)))
  with tempfile.TemporaryDirectory() as folder:
    export = pathlib.Path(folder) / "export"
    huggingface.export(
      model, export, dtype="F32", facts={}, card="", family="attnres"
    )
    os.environ["HF_MODULES_CACHE"] = f"{folder}/code"
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      twin = transformers.AutoModelForCausalLM.from_pretrained(
        export, trust_remote_code=True, dtype="float32"
      )
  ids = torch.tensor(tokens).long()

  def call():
    twin.zero_grad()
    loss = twin(ids, labels=ids, use_cache=False).loss
    loss.backward()
    # The query of the first read has no gradient: it has one source.
    gradients = [p.grad for p in twin.parameters() if p.grad is not None]
    length = math.sqrt(sum(float(x.square().sum()) for x in gradients))
    return float(loss.detach()), length

  return call


def rows(schemes: Sequence[str], rounds: int) -> Iterator[dict[str, Any]]:
  """A row per scheme: ours over PyTorch."""
  for scheme in schemes:
    ours, theirs = steps(scheme)
    found, expected = ours(), theirs()
    if not np.allclose(found, expected, rtol=_TOLERANCE):
      raise RuntimeError(
        f"{scheme}: loss and length of the gradient are {found}, and"
        f" {expected} in PyTorch"
      )
    times = measure_lib.in_turn({"ours": ours, "torch": theirs}, rounds)
    columns = measure_lib.ratios(times["ours"], times["torch"])
    base = measure_lib.ratios(times["torch"], times["torch"])
    yield (
      {"size": _SIZE, "scheme": scheme}
      | columns
      | {
        "torch_seconds": base["seconds"],
        "torch_cpu_seconds": base["cpu_seconds"],
        "torch": importlib.metadata.version("torch"),
      }
    )


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = command_line.Parser(
    "python -m experiments.step_cost.pytorch", __doc__
  )
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--schemes", default=",".join(SCHEMES))
  parser.add_argument("--output", default=str(_FILE))
  return command_line.run(_main, parser.parse_args(argv))


def _main(options: argparse.Namespace) -> None:
  schemes = options.schemes.split(",")
  for scheme in schemes:
    config_lib.choose("--schemes", scheme, dict.fromkeys(SCHEMES))
  measure_lib.record(options.output, rows(schemes, options.rounds))
  if pathlib.Path(options.output).absolute() == _FILE:
    publish.publish(run.PUBLISHED)


if __name__ == "__main__":
  sys.exit(main())

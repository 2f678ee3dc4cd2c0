# SPDX-License-Identifier: Apache-2.0
"""What every residual scheme keeps, moves, costs and mixes, without training.

  python -m experiments.residual_zoo.run [--schemes=mhc,mudd]

Writes a row per registered scheme to `results.csv` beside this file, and fills
the table and the figure of the README from these rows. With --schemes, the rows
of other schemes do not change. Nothing is timed: all numbers are counted in
programs, or come from a small network.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import functools
import inspect
import json
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from attnres_jax import analysis
from attnres_jax import config as config_lib
from attnres_jax import flops
from attnres_jax import models
from attnres_jax.common import command_line
from attnres_jax.config import errors
from attnres_jax.flops import parameters
from attnres_jax.flops import traffic
from attnres_jax.models import residuals
from experiments.residual_zoo import report

# Costs are counted at d=512 with 24 sublayers in 8 blocks, in bfloat16.
COST = "configs/lm.py:size=small,residual="
LENGTH = 512
# Matrices come from a small network with random parameters of the scheme.
SMALL = config_lib.ModelConfig(
  vocab_size=64,
  width=32,
  num_layers=6,
  num_heads=2,
  mlp_width=96,
  init_std=0.2,
  residual=config_lib.residual_config(block_size=4),
)
# Standard deviation of what is added to the parameters of a scheme.
SPREAD = 0.3
# The largest difference of normalised states that counts as the same function.
SAME = 1e-3


def facts(name: str) -> dict[str, Any]:
  """The row of a scheme, without its origin."""
  fields = {
    "model.dtype": "bfloat16", "model.vocab_size": 257,
    "model.residual.num_blocks": 8,
  }  # fmt: skip
  model = config_lib.load_config(COST + name, fields, by_hand=False).model
  scheme = residuals.scheme_of(model)
  counted = flops.flops_per_token(model, LENGTH)
  network, tokens = _moved(name), _tokens()
  matrix, norms = (
    analysis.mixing_matrix(network, tokens, norms=norms)
    for norms in (False, True)
  )
  listed = lambda matrix: json.dumps(np.round(matrix, 4).tolist())
  return {
    "scheme": name,
    "family": scheme.__module__.rpartition(".")[2],
    "source": _source(scheme),
    "parameters": parameters.of_parts(model)["residual"].total,
    "residual_flops": counted.residual,
    "flops_share": f"{counted.residual / counted.forward:.5f}",
    "moved_vectors": f"{traffic.of_scheme(model).total:.3f}",
    "state_vectors": f"{_state_vectors(model):.3f}",
    "rank": _rank(network),
    "starts_as_prenorm": _starts_as_prenorm(name),
    "matrix": listed(matrix),
    "norms": listed(norms),
  }


def _source(scheme: type[residuals.Residual]) -> str:
  """The first arXiv number in the docstring of the class or of its file."""
  for text in (scheme.__doc__, inspect.getmodule(scheme).__doc__):
    match = re.search(r"arXiv:(\d{4}\.\d{5})", text or "")
    if match:
      return match[1]
  return ""


def _state_vectors(model: config_lib.ModelConfig) -> float:
  """The most that the state holds between two sublayers, in model vectors."""
  scheme = residuals.abstract_residual(model)
  vector = jax.ShapeDtypeStruct((1, 8, model.width), model.dtype)
  sizes = []

  def run(scheme, embedding_BTD):
    state = scheme.init(embedding_BTD)
    for start, stop in scheme.segments():
      for l in range(start, stop):
        carry, slots = scheme.open(state, l, l + 1)
        slot = jax.tree.map(lambda leaf: leaf[0], slots)
        residuals.base.before_norm(scheme, carry, slot)
        carry = scheme.write(carry, slot, embedding_BTD)
        state = scheme.close(state, carry, l + 1)
        sizes.append(sum(leaf.size for leaf in jax.tree.leaves(state)))
    return state

  jax.eval_shape(run, scheme, vector)
  return max(sizes) / vector.size


def _config(name: str) -> config_lib.ModelConfig:
  residual = config_lib.under(SMALL.residual, name)
  return dataclasses.replace(SMALL, residual=residual)


def _tokens() -> np.ndarray:
  rng = np.random.default_rng(0)
  return rng.integers(0, SMALL.vocab_size, (2, 16), dtype=np.int32)


def _moved(name: str) -> models.Transformer:
  """A network in which the scheme has random parameters."""
  network = models.build_model(_config(name))
  rng = np.random.default_rng(1)
  network.residual = jax.tree.map(
    lambda a: a + jnp.asarray(SPREAD * rng.standard_normal(a.shape), a.dtype),
    network.residual,
  )
  return network


def _rank(network: models.Transformer) -> int | str:
  """Rank of one channel's matrix at the first token; "" if channels mix."""
  token = _tokens()[:1, :1]
  matrix, other = (
    analysis.mixing_matrix(network, token, channel=0, probe=probe)
    for probe in (0, 1)
  )
  if np.abs(matrix - other).max() > 1e-3 * np.abs(matrix).max():
    return ""
  return analysis.semiseparable_rank(matrix, 1e-4)


def _starts_as_prenorm(name: str) -> bool:
  """Whether the new network is the same function as with PreNorm."""
  hidden, prenorm = map(_hidden, map(_config, (name, "prenorm")))
  return bool(jnp.max(jnp.abs(hidden - prenorm)) < SAME)


@functools.cache
def _hidden(config: config_lib.ModelConfig) -> jax.Array:
  """What the head reads in a new network."""
  network = models.build_model(config)
  return jax.jit(lambda network: network.hidden(_tokens()))(network)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = command_line.Parser(
    "python -m experiments.residual_zoo.run", __doc__
  )
  parser.add_argument("--schemes", help="only these, separated by commas")
  return command_line.run(_main, parser.parse_args(argv))


def _main(options: argparse.Namespace) -> None:
  names = list(residuals.RESIDUALS)
  if options.schemes is not None:
    names = options.schemes.split(",")
  for name in names:
    errors.check_in("--schemes", name, residuals.RESIDUALS)
  rows = map(facts, tqdm.tqdm(names, unit="scheme"))
  report.PUBLISHED.measure(rows, ["scheme"])


if __name__ == "__main__":
  sys.exit(main())

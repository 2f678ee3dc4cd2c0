# SPDX-License-Identifier: Apache-2.0
"""The loss of finished networks with rounded weights and caches.

  python -m experiments.quantisation.losses --workdir=runs/quantisation

evaluates every finished run of the sweep on every fourth row of the validation
split, and adds a row for each form of its weights and cache to losses.csv
beside this file. Runs that have their rows are left out; `--again` evaluates
them too.

Text is read as it is generated, one token at a time, so that everything but the
newest token is read from the cache.
"""

import argparse
from collections.abc import Iterator, Sequence
import dataclasses
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import checkpoint
from attnres_jax import command_line
from attnres_jax import csv_rows
from attnres_jax import data
from attnres_jax import environment
from attnres_jax import models
from attnres_jax.models import rounded
from attnres_jax.models.mixers import cache as cache_lib
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import state as state_lib
from experiments import publish

FILE = pathlib.Path(__file__).absolute().with_name("losses.csv")
# (dtype of the model, bits of its weights or 0, cache); the first is exact.
FORMS = (
  ("float32", 0, "model"),
  ("bfloat16", 0, "model"),
  ("float32", 8, "model"),
  ("float32", 0, "int8"),
  ("float32", 8, "int8"),
  ("float32", 4, "model"),
)
# Every so many rows of the split are read, all at the same time.
_EVERY = 4


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = command_line.Parser(
    "python -m experiments.quantisation.losses", __doc__
  )
  add = parser.add_argument
  add("--workdir", default="runs/quantisation", help="of the sweep")
  add("--again", action="store_true", help="also runs that have their rows")
  return command_line.run(_main, parser.parse_args(argv))


def _main(options: argparse.Namespace) -> None:
  origin = environment.facts()
  known = csv_rows.read(FILE) if FILE.exists() and not options.again else []
  have = {(row["variant"], row["seed"]) for row in known}
  key = "variant", "seed", "dtype", "bits", "cache"
  for run, folder in _finished(pathlib.Path(options.workdir)):
    about = dict(variant=run["variant"], seed=run["seed"])
    if (about["variant"], str(about["seed"])) in have:
      continue
    exact: np.ndarray | None = None
    found = []
    for (dtype, bits, cache), losses in _losses(folder):
      exact = losses if exact is None else exact
      row = about | dict(
        dtype=dtype, bits=bits, cache=cache,
        loss=f"{losses.mean():.6f}",
        cost=f"{(losses - exact).mean():.7f}",
        # Of the choice of the text, over its rows.
        error=f"{(losses - exact).std(ddof=1) / len(losses) ** 0.5:.7f}",
      )  # fmt: skip
      print(", ".join(f"{k} {v}" for k, v in row.items()), flush=True)
      found.append(row | origin)
    for row in found:
      csv_rows.put(FILE, row, key)
  publish.publish(publish.load("quantisation"))


def _finished(
  folder: pathlib.Path,
) -> Iterator[tuple[dict[str, Any], pathlib.Path]]:
  for run in folder_lib.read(folder):
    path = folder / run.name
    if state_lib.read(path).status == state_lib.DONE:
      yield dict(run.overrides), path


def _losses(
  workdir: pathlib.Path,
) -> Iterator[tuple[tuple[str, int, str], np.ndarray]]:
  """For each form, the mean loss of every row of the split."""
  config, model = checkpoint.load_model(workdir)
  dataset = data.open_dataset(config.data, "validation")
  batches = dataset.batches()
  try:
    tokens_BT = np.concatenate([batch["tokens"] for batch in batches])
  finally:
    batches.close()
  for dtype, bits, cache in FORMS:
    changed = _in_dtype(model, dtype)
    if bits:
      changed = jax.jit(_as_rounded, static_argnums=1)(changed, bits)
    losses = _of_rows(changed, tokens_BT[::_EVERY], cache=cache)
    yield (dtype, bits, cache), np.asarray(losses)


def _in_dtype(model: models.Transformer, dtype: Any) -> models.Transformer:
  """The same weights, with activations in another dtype."""
  config = dataclasses.replace(model.config, dtype=dtype)
  like = jax.eval_shape(lambda: models.build_model(config))
  return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(model))


def _as_rounded(model: models.Transformer, bits: int) -> models.Transformer:
  """Rounded weights in float32: all forms share a program."""
  is_rounded = lambda node: isinstance(node, rounded.Matrix)

  def dense(node):
    if is_rounded(node):
      return rounded.dense(node[...], jnp.float32)
    return node

  weights = jax.tree.map(
    dense, rounded.round_weights(model, bits), is_leaf=is_rounded
  )
  return jax.tree.unflatten(jax.tree.structure(model), jax.tree.leaves(weights))


@jax.jit(static_argnames="cache")
def _of_rows(model, tokens_BT, *, cache):
  """The mean loss of every row, one token at a time."""
  rows, length = tokens_BT.shape

  def one(state, tokens_B2):
    out = model.extend(tokens_B2[:, :1], state)
    log_p_BV = jax.nn.log_softmax(model.embedding.decode(out.hidden_BTD)[:, 0])
    picked_B1 = jnp.take_along_axis(log_p_BV, tokens_B2[:, 1:], axis=1)
    return cache_lib.append(state, out.added), -picked_B1[:, 0]

  pairs_TB2 = jnp.stack([tokens_BT[:, :-1].T, tokens_BT[:, 1:].T], axis=-1)
  state = cache_lib.kept_as(model.init_cache(rows, length), cache)
  _, losses_TB = jax.lax.scan(one, state, pairs_TB2)
  return jnp.mean(losses_TB, axis=0)


if __name__ == "__main__":
  sys.exit(main())

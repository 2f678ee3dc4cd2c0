# SPDX-License-Identifier: Apache-2.0
r"""Trains all seeds of an arm at once, on one accelerator.

  python -m experiments.laptop_gain.together --part=gain --data=runs/gain.npz
  python -m experiments.laptop_gain.together --part=gain --data=runs/gain.npz \
    --out=runs/gain.csv

`jax.vmap` maps the training step of a run over the seeds, because these
networks leave most of an accelerator idle. A seed starts from the same weights
and reads the same batches as the run of the sweep; only the order of sums
differs. The first command reads the text and writes the batches to a file, so
that a machine with another Python can train on the same text. The second one
trains, and writes a row per seed after each arm; rerun it to continue.
"""

from collections.abc import Iterator, Mapping, Sequence
import itertools
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import data as data_lib
from attnres_jax import models
from attnres_jax import optimizer
from attnres_jax.common import command_line
from attnres_jax.common import csv_rows
from attnres_jax.common import environment
from attnres_jax.common import sharding
from attnres_jax.train import train_state
from experiments.laptop_gain import config as config_file

FILE = "experiments/laptop_gain/config.py"

Arrays = Mapping[str, np.ndarray]


def groups(arg: str) -> dict[str, list[int]]:
  """Argument of the config -> the seeds of its runs, in the sweep's order."""
  found: dict[str, list[int]] = {}

  def add(seed: int, **given: Any) -> None:
    named = given | {"runlocal": "runlocal=True" in arg}
    named.pop("data.seed")
    text = ",".join(f"{name}={value}" for name, value in named.items())
    found.setdefault(text, []).append(seed)

  config_file.sweep(add, arg)
  return found


def load(arg: str, seed: int) -> config_lib.RunConfig:
  """The configuration of one run."""
  return config_lib.load_config(
    f"{FILE}:{arg}", {"seed": seed, "data.seed": seed}
  )


def read(arg: str) -> dict[str, np.ndarray]:
  """What the runs of a part read, as ordinary runs would.

  tokens and counts [seeds, steps, B, T+1], of the seeds in increasing order;
  validation_tokens and validation_counts [batches, B, T+1].
  """
  found = groups(arg)
  seeds = sorted({seed for own in found.values() for seed in own})
  configs = [load(next(iter(found)), seed) for seed in seeds]
  splits: dict[str, list[Any]] = {"tokens": [], "counts": []}
  for config in configs:
    dataset = data_lib.open_dataset(config.data, "train")
    rows = list(itertools.islice(dataset.batches(), config.train.steps))
    for name, each in splits.items():
      each.append(np.stack([row[name] for row in rows]))
    print(f"seed {config.seed}: {len(rows):,} batches", flush=True)
  arrays = {name: np.stack(each) for name, each in splits.items()}
  fingerprint = dataset.describe()["fingerprint"][:12]
  dataset = data_lib.open_dataset(configs[0].data, "validation")
  rows = list(
    itertools.islice(dataset.batches(), configs[0].train.eval_batches)
  )
  arrays |= {
    f"validation_{name}": np.stack([row[name] for row in rows])
    for name in ("tokens", "counts")
  }
  arrays = {name: a.astype(np.uint16) for name, a in arrays.items()}
  facts = environment.commit(), fingerprint
  return arrays | {"seeds": np.array(seeds), "facts": np.array(facts)}


def train(
  config: config_lib.RunConfig, seeds: Sequence[int], arrays: Arrays
) -> Iterator[tuple[int, np.ndarray]]:
  """Yields steps and validation losses [seeds] after each evaluation."""
  tokenizer = data_lib.make_tokenizer(config.data)
  config = config.with_vocab_size(tokenizer.vocab_size)
  program = train_state.make_program(
    config, sharding.make_mesh(config.mesh, jax.devices()[:1])
  )
  known = list(arrays["seeds"])
  places = np.array([known.index(seed) for seed in seeds])

  def init(seed: jax.Array) -> train_state.TrainState:
    key: Any = jax.random.key(seed)
    model: Any = models.build_model(config.model, key)
    zero = jnp.zeros((), jnp.int32)
    opt_state = optimizer.make_optimizer(config.optim).init(model)
    return train_state.TrainState(zero, zero, model, opt_state)

  def several(states: Any, batches: Any) -> Any:
    def one(states: Any, batch: Any) -> Any:
      return jax.vmap(program.train_step)(states, _wide(batch))[0], None

    return jax.lax.scan(one, states, batches)[0]

  def evaluate(states: Any, batches: Any) -> jax.Array:
    def one(sums: Any, batch: Any) -> Any:
      step = jax.vmap(program.eval_step, in_axes=(0, None))
      found = step(states.model, _wide(batch))
      return (sums[0] + found["loss_sum"], sums[1] + found["tokens"]), None

    zeros = (jnp.zeros(len(seeds)), jnp.zeros(len(seeds)))
    total, tokens = jax.lax.scan(one, zeros, batches)[0]
    return total / tokens

  # With a sharding, as later states have: else `several` is compiled twice.
  states = jax.jit(
    jax.vmap(init), out_shardings=sharding.replicated(program.mesh)
  )(jnp.array(seeds))
  several = jax.jit(several, donate_argnums=0)
  evaluate = jax.jit(evaluate)
  validation = {
    name: arrays[f"validation_{name}"] for name in ("tokens", "counts")
  }
  every = config.train.eval_every
  for start in range(0, config.train.steps, every):
    # [steps, seeds, B, T+1]
    batches = {
      name: arrays[name][places, start : start + every].swapaxes(0, 1)
      for name in ("tokens", "counts")
    }
    states = several(states, batches)
    yield start + every, np.asarray(evaluate(states, validation))


def _wide(batch: Any) -> Any:
  return jax.tree.map(lambda a: a.astype(jnp.int32), batch)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns its exit status."""
  parser = command_line.Parser(
    "python -m experiments.laptop_gain.together", __doc__
  )
  parser.add_argument("--part", default="gain", help="of the sweep")
  parser.add_argument("--data", required=True, help="file of batches")
  parser.add_argument("--out", default="", help="table of results")
  parser.add_argument("--only", default="", help="arms, comma-separated")
  parser.add_argument(
    "--runlocal", action="store_true", help="tiny networks, in seconds"
  )
  return command_line.run(_main, parser.parse_args(argv))


def _main(options: Any) -> None:
  arg = f"part={options.part}" + ",runlocal=True" * options.runlocal
  path = pathlib.Path(options.data)
  if not path.exists():
    np.savez_compressed(path, allow_pickle=False, **read(arg))
  if not options.out:
    return
  out = pathlib.Path(options.out)
  rows: list[dict[str, Any]] = list(csv_rows.read(out) if out.exists() else [])
  done = {row["arguments"] for row in rows}
  with np.load(path) as file:
    arrays = dict(file)
  only = options.only.split(",") if options.only else list(config_file.ARMS)
  for text, seeds in groups(arg).items():
    config = load(text, seeds[0])
    if text in done or config.name.removeprefix(config_file.NAME) not in only:
      continue
    rows += _rows(text, config, seeds, arrays)
    csv_rows.write(out, rows)


def _rows(
  text: str,
  config: config_lib.RunConfig,
  seeds: Sequence[int],
  arrays: Arrays,
) -> Iterator[dict[str, Any]]:
  """Trains a group; a row per seed."""
  start, losses = time.perf_counter(), {}
  # Products in float32, as on the CPU that chose the rates.
  with jax.default_matmul_precision("highest"):
    for step, found in train(config, seeds, arrays):
      losses[step] = found
      seconds = time.perf_counter() - start
      print(
        f"{seconds:5.0f} s {text}: step {step:,}/{config.train.steps:,},"
        f" validation {', '.join(f'{loss:.4f}' for loss in found)}",
        flush=True,
      )
  commit, fingerprint = map(str, arrays["facts"])
  facts = environment.facts()
  *earlier, last = losses
  for i, seed in enumerate(seeds):
    yield {
      "arguments": text,
      "arm": config.name.removeprefix(config_file.NAME),
      "rate": config.optim.peak_lr,
      "seed": seed,
      "data.seed": seed,
      "residual": config.model.residual.name,
      "sublayers": config.model.num_sublayers,
      "tokens": config.train.steps
      * config.data.batch_size
      * config.data.sequence_length,
      **{
        f"loss_{place}": f"{losses[step][i]:.6f}"
        for place, step in zip(config_file.PLACES, earlier, strict=True)
      },
      "validation_loss": f"{losses[last][i]:.6f}",
      "seconds": f"{seconds / len(seeds):.1f}",
      **{name: facts[name] for name in ("hardware", "python", "jax")},
      "commit": commit,
      "data": fingerprint,
    }


if __name__ == "__main__":
  sys.exit(main())

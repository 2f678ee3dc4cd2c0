# SPDX-License-Identifier: Apache-2.0
"""What a residual scheme costs: step and compile time as ratios to PreNorm.

  python -m experiments.step_cost.run [--size=demo|large] [--rounds=5]

All schemes are compiled first, then run in turn, round after round, in one
process on the same tokens; a round's ratio is the scheme's time over PreNorm's
in that round, and the median over rounds is reported with its range. Ratios
survive what absolute times do not: a shared or throttled machine. `cpu_ratio`
is the same of processor time, which other processes disturb less. Writes one
row per size, scheme and pass to `results.csv` beside this file (or --output).

Compile time is that of the whole training step (forward, backward, AdamW) with
a cold cache.
"""

import dataclasses
import pathlib
import statistics
import time
from typing import Any

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import csv_rows
from attnres_jax import environment
from attnres_jax import sharding
from attnres_jax import train_state

_SIZE = flags.DEFINE_multi_enum(
  "size", ["demo", "large"], ["demo", "large"], "which network"
)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "timed rounds, after one warm-up")
_SCHEMES = flags.DEFINE_list("schemes", None, "only these, beside prenorm")
_UNROLL = flags.DEFINE_bool("unroll", False, "no scan over layers")
_OUTPUT = flags.DEFINE_string(
  "output", str(pathlib.Path(__file__).with_name("results.csv")), "rows go here"
)

# Size -> config file argument and overrides.
SIZES = {
  "demo": ("configs/lm.py:size=tiny", {}),
  "large": (
    "configs/lm.py:size=small",  # d=512, 24 sublayers, T=512, 8 blocks
    {"data.batch_size": 2},
  ),
}
SCHEMES: dict[str, dict[str, Any]] = {
  "prenorm": {},
  "rescaled": {},
  "block_attnres": {},
  "full_attnres": {},
  "block_attnres one_softmax": {"form": "one_softmax"},
  "full_attnres one_softmax": {"form": "one_softmax"},
}


def measure(size: str, rounds: int, schemes: list[str]) -> list[dict]:
  """Compiles and times the schemes; returns rows, PreNorm's first."""
  programs = {name: _programs(size, name) for name in schemes}
  passes = ("forward", "forward_backward")
  seconds = {name: {kind: [] for kind in passes} for name in schemes}
  for round_index in range(rounds + 1):
    # Alternate the order, so that a drift does not favour a position.
    order = schemes if round_index % 2 else schemes[::-1]
    for name in order:
      for kind, times in seconds[name].items():
        call, arguments = programs[name][kind]
        start = time.perf_counter(), time.process_time()
        jax.block_until_ready(call(*arguments))
        stop = time.perf_counter(), time.process_time()
        if round_index:
          times.append((stop[0] - start[0], stop[1] - start[1]))
  rows = []
  for name in schemes:
    for kind, times in seconds[name].items():
      pairs = list(zip(times, seconds["prenorm"][kind], strict=True))
      ratios = [own[0] / base[0] for own, base in pairs]
      rows.append(
        dict(
          size=size,
          scheme=name,
          unrolled=_UNROLL.value,
          measure=kind,
          ratio=round(statistics.median(ratios), 4),
          ratio_min=round(min(ratios), 4),
          ratio_max=round(max(ratios), 4),
          cpu_ratio=round(statistics.median(a[1] / b[1] for a, b in pairs), 4),
          seconds=round(statistics.median(wall for wall, _ in times), 4),
        )
      )
    compile_seconds = programs[name]["compile_seconds"]
    ratio = compile_seconds / programs["prenorm"]["compile_seconds"]
    rows.append(
      dict(
        size=size,
        scheme=name,
        unrolled=_UNROLL.value,
        measure="compile_train_step",
        ratio=round(ratio, 3),
        ratio_min=round(ratio, 3),
        ratio_max=round(ratio, 3),
        cpu_ratio=round(
          programs[name]["compile_cpu_seconds"]
          / programs["prenorm"]["compile_cpu_seconds"],
          3,
        ),
        seconds=round(compile_seconds, 2),
      )
    )
  return rows


def _programs(size: str, scheme: str) -> dict:
  """The two timed programs, and the train step's compile time."""
  config = _config(size, scheme)
  mesh = sharding.make_mesh(config_lib.MeshConfig(data=1))
  state = train_state.init_state(config, mesh)
  rng = np.random.default_rng(0)
  shape = (config.data.batch_size, config.data.sequence_length + 1)
  tokens = rng.integers(0, config.model.vocab_size, shape).astype(np.int32)
  batch = sharding.shard_batch({"tokens": tokens}, mesh)

  step = train_state.make_train_step(config, mesh)
  start = time.perf_counter(), time.process_time()
  step.lower(state, batch).compile()
  stop = time.perf_counter(), time.process_time()

  def trunk_loss(model):
    # The head is the same for all schemes and is left out of the ratio's base.
    return jnp.mean(jnp.square(model.hidden(batch["tokens"][:, :-1])))

  return dict(
    compile_seconds=stop[0] - start[0],
    compile_cpu_seconds=stop[1] - start[1],
    forward=(jax.jit(trunk_loss), (state.model,)),
    forward_backward=(jax.jit(jax.grad(trunk_loss)), (state.model,)),
  )


def _config(size: str, scheme: str) -> config_lib.RunConfig:
  spec, overrides = SIZES[size]
  name = scheme.split()[0]
  config = config_lib.load_config(f"{spec},residual={name}", overrides)
  residual = dataclasses.replace(config.model.residual, **SCHEMES[scheme])
  model = dataclasses.replace(
    config.model, residual=residual, scan_layers=not _UNROLL.value
  )
  return dataclasses.replace(config, model=model)


def main(argv):
  del argv
  wanted = _SCHEMES.value or list(SCHEMES)
  for name in wanted:
    config_lib.choose("schemes", name, SCHEMES)
  schemes = ["prenorm", *(name for name in wanted if name != "prenorm")]
  rows, facts = [], environment.facts()
  for size in _SIZE.value:
    for row in measure(size, _ROUNDS.value, schemes):
      rows.append(row | facts)
      print(
        f"{row['size']:6} {row['scheme']:26} {row['measure']:19}"
        f" {row['ratio']:7.3f} [{row['ratio_min']:.3f}, {row['ratio_max']:.3f}]"
        f" cpu {row['cpu_ratio']:.3f} {row['seconds']:8.3f} s",
        flush=True,
      )
  csv_rows.write(_OUTPUT.value, rows)


if __name__ == "__main__":
  app.run(main)

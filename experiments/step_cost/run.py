# SPDX-License-Identifier: Apache-2.0
"""What a residual scheme costs: step and compile time as ratios to PreNorm.

  python -m experiments.step_cost.run [--size=demo|large] [--rounds=5]

Compiles all schemes first, then runs them in turn, round after round, in one
process on the same tokens. PreNorm and Rescaled, which a scan over layers can
run, are measured in both forms: as one scan and unrolled. The baseline is the
faster form of PreNorm, separately for each size and measure. A round's ratio is
the scheme's time over the baseline's time in that round; a row holds the median
over rounds and the range. Ratios are robust where absolute times are not, on a
shared or throttled machine. `cpu_ratio` is the same ratio of processor time,
which other processes disturb less.

Writes one row per size, scheme and measure to `results.csv` beside this file,
then fills the table in the README beside it and the sentence in the main
README from these rows. --output=FILE writes the rows elsewhere and leaves both
READMEs alone.

Compile time is that of the whole training step (forward, backward, AdamW) with
a cold cache.
"""

from collections.abc import Mapping, Sequence
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
from experiments.step_cost import publish

_SIZE = flags.DEFINE_multi_enum(
  "size", ["demo", "large"], ["demo", "large"], "which network"
)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "timed rounds, after one warm-up")
_SCHEMES = flags.DEFINE_list(
  "schemes", None, "only these, besides both forms of PreNorm"
)
_OUTPUT = flags.DEFINE_string(
  "output", str(publish.RESULTS), "CSV file to write the rows to"
)

# Size -> config file argument and overrides.
SIZES = {
  "demo": ("configs/lm.py:size=tiny", {}),
  "large": (
    "configs/lm.py:size=small",  # d=512, 24 sublayers, T=512, 8 blocks
    {"data.batch_size": 2},
  ),
}


@dataclasses.dataclass(frozen=True)
class Form:
  """A residual scheme, and how its layers run.

  Attributes:
    residual: a key of `RESIDUALS`.
    fields: fields of the residual config that differ from their defaults.
    scan: whether repeated layers may be one `lax.scan`.
  """

  residual: str
  fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  scan: bool = True


ONE_SOFTMAX = {"form": "one_softmax"}
SCHEMES = {
  "prenorm": Form("prenorm"),
  "prenorm unrolled": Form("prenorm", scan=False),
  "rescaled": Form("rescaled"),
  "rescaled unrolled": Form("rescaled", scan=False),
  "block_attnres": Form("block_attnres"),
  "full_attnres": Form("full_attnres"),
  "block_attnres one_softmax": Form("block_attnres", ONE_SOFTMAX),
  "full_attnres one_softmax": Form("full_attnres", ONE_SOFTMAX),
}
PASSES = ("forward", "forward_backward")
COMPILE = "compile_train_step"


def measure(size: str, rounds: int, schemes: Sequence[str]) -> list[dict]:
  """Compiles and times the schemes, which must include a form of PreNorm."""
  programs = {name: _programs(size, name) for name in schemes}
  times = {
    name: {COMPILE: [program.pop(COMPILE)]} | {kind: [] for kind in PASSES}
    for name, program in programs.items()
  }
  for round_index in range(rounds + 1):
    # Alternate the order, so that a drift does not favour a position.
    order = schemes if round_index % 2 else schemes[::-1]
    for name in order:
      for kind, (call, arguments) in programs[name].items():
        start = _now()
        jax.block_until_ready(call(*arguments))
        if round_index:
          times[name][kind].append(_now() - start)
  return [
    {"size": size, "scheme": name} | row
    for name in schemes
    for row in ratios(times, name)
  ]


def ratios(
  times: Mapping[str, Mapping[str, Sequence[np.ndarray]]], scheme: str
) -> list[dict]:
  """A row for each measure of a scheme.

  Args:
    times: of each scheme and measure, per round, [2] in seconds: wall-clock
      time and processor time.
    scheme: a key of `times`.
  """
  rows = []
  for kind, own in times[scheme].items():
    forms = [name for name in times if name in publish.BASELINES]
    wall = {
      name: statistics.median(t[0] for t in times[name][kind])
      for name in (*forms, scheme)
    }
    baseline = min(forms, key=wall.__getitem__)
    found = [a / b for a, b in zip(own, times[baseline][kind], strict=True)]
    rows.append(
      {
        "measure": kind,
        "baseline": baseline,
        "ratio": round(statistics.median(r[0] for r in found), 4),
        "ratio_min": round(min(r[0] for r in found), 4),
        "ratio_max": round(max(r[0] for r in found), 4),
        "cpu_ratio": round(statistics.median(r[1] for r in found), 4),
        "seconds": round(wall[scheme], 4),
      }
    )
  return rows


def _now() -> np.ndarray:
  return np.array([time.perf_counter(), time.process_time()])


def _programs(size: str, scheme: str) -> dict[str, Any]:
  """The two timed programs, and the time to compile the training step."""
  config = _config(size, scheme)
  mesh = sharding.make_mesh(config_lib.MeshConfig(data=1))
  program = train_state.make_program(config, mesh)
  state = program.init_state()
  rng = np.random.default_rng(0)
  shape = (config.data.batch_size, config.data.sequence_length + 1)
  tokens = rng.integers(0, config.model.vocab_size, shape).astype(np.int32)
  batch = sharding.shard_batch({"tokens": tokens}, mesh)

  step = program.train_step
  start = _now()
  step.lower(state, batch).compile()
  compile_time = _now() - start

  def trunk_loss(model):
    # The head, the same for all schemes, is left out of the ratios.
    return jnp.mean(jnp.square(model.hidden(batch["tokens"][:, :-1])))

  return {
    COMPILE: compile_time,
    "forward": (jax.jit(trunk_loss), (state.model,)),
    "forward_backward": (jax.jit(jax.grad(trunk_loss)), (state.model,)),
  }


def _config(size: str, scheme: str) -> config_lib.RunConfig:
  spec, overrides = SIZES[size]
  form = SCHEMES[scheme]
  config = config_lib.load_config(f"{spec},residual={form.residual}", overrides)
  model = dataclasses.replace(
    config.model,
    residual=dataclasses.replace(config.model.residual, **form.fields),
    scan_layers=form.scan,
  )
  return dataclasses.replace(config, model=model)


def main(argv):
  del argv
  wanted = _SCHEMES.value or list(SCHEMES)
  for name in wanted:
    config_lib.choose("schemes", name, SCHEMES)
  schemes = list(dict.fromkeys([*publish.BASELINES, *wanted]))
  rows, facts = [], environment.facts()
  for size in _SIZE.value:
    for row in measure(size, _ROUNDS.value, schemes):
      rows.append(row | facts)
      print(
        f"{row['size']:6} {row['scheme']:26} {row['measure']:19}"
        f" {row['ratio']:7.3f} [{row['ratio_min']:.3f}, {row['ratio_max']:.3f}]"
        f" of {row['baseline']:16} cpu {row['cpu_ratio']:.3f}"
        f" {row['seconds']:8.3f} s",
        flush=True,
      )
  csv_rows.write(_OUTPUT.value, rows)
  if pathlib.Path(_OUTPUT.value).absolute() == publish.RESULTS:
    publish.main()


if __name__ == "__main__":
  app.run(main)

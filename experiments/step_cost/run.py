# SPDX-License-Identifier: Apache-2.0
r"""What a residual scheme costs: step and compile time as ratios to PreNorm.

  python -m experiments.step_cost.run [--size=demo|large|paired] [--rounds=5]
  python -m experiments.step_cost.run --schemes=mhc,ohc --output=FILE
  python -m experiments.step_cost.run --output=FILE \
    --schemes="block_attnres,block_attnres depth_scan"

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

from collections.abc import Iterator, Mapping, Sequence
import functools
import itertools
import pathlib
import statistics
from typing import Any

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.models import residuals
from attnres_jax.train import train_state
from experiments import measure as measure_lib
from experiments import publish
from experiments.pages import readme
from experiments.step_cost import report

_RESULTS = pathlib.Path(__file__).absolute().with_name("results.csv")
PUBLISHED = readme.Published(
  _RESULTS.parent,
  [
    readme.Place(report.table),
    readme.Place(report.sentence, "cost", document="../../README.md"),
    readme.Place(report.pytorch, "pytorch", rows="pytorch"),
  ],
)

_SIZE = flags.DEFINE_multi_enum(
  "size",
  ["demo", "large"],
  ["demo", "large", "paired"],
  "which network; paired is that of trained comparisons (configs/paired.py)",
)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "timed rounds, after one warm-up")
_SCHEMES = flags.DEFINE_list(
  "schemes",
  None,
  "these residual schemes, besides both forms of PreNorm, in place of those of"
  " AttnRes; with ' unrolled', not as a scan; Block and Full AttnRes with"
  " ' depth_scan', a scan over depth",
)
_OUTPUT = flags.DEFINE_string(
  "output", str(_RESULTS), "CSV file to write the rows to"
)

# Size -> config file argument and overrides.
SIZES = {
  "demo": ("configs/lm.py:size=tiny", {}),
  "large": (
    "configs/lm.py:size=small",  # d=512, 24 sublayers, T=512, 8 blocks
    {"data.batch_size": 2},
  ),
  "paired": ("configs/paired.py:scale=laptop", {}),
}


# A residual scheme and how it runs -> overrides.
_UNROLLED = {"model.scan_layers": False}
_ONE_SOFTMAX = {"model.residual.form": "one_softmax"}
SCHEMES = {
  "prenorm": {},
  "prenorm unrolled": _UNROLLED,
  "rescaled": {},
  "rescaled unrolled": _UNROLLED,
  "block_attnres": {},
  "full_attnres": {},
  "block_attnres one_softmax": _ONE_SOFTMAX,
  "full_attnres one_softmax": _ONE_SOFTMAX,
}
_DEPTH_SCAN = {"model.depth_loop": "scan"}
# What --schemes may name.
FORMS = (
  {
    f"{name}{form}": overrides
    for name in residuals.RESIDUALS
    for form, overrides in (("", {}), (" unrolled", _UNROLLED))
  }
  | SCHEMES
  | {
    f"{name} depth_scan": _DEPTH_SCAN
    for name in ("block_attnres", "full_attnres")
  }
)
COMPILE = "compile_train_step"

Times = Mapping[str, Mapping[str, Sequence[measure_lib.Seconds]]]


def measure(
  size: str, rounds: int, schemes: Sequence[str]
) -> Iterator[dict[str, Any]]:
  """Compiles and times the schemes, which must include a form of PreNorm."""
  programs = {name: _programs(size, name) for name in schemes}
  times = {
    name: {COMPILE: [own.pop(COMPILE)]} for name, own in programs.items()
  }
  calls = {
    (name, kind): call
    for name, own in programs.items()
    for kind, call in own.items()
  }
  for (name, kind), found in measure_lib.in_turn(calls, rounds).items():
    times[name][kind] = found
  for name in schemes:
    for row in ratios(times, name):
      yield {"size": size, "scheme": name} | row


def ratios(times: Times, scheme: str) -> Iterator[dict[str, Any]]:
  """A row for each measure of a scheme.

  Args:
    times: of each scheme and measure, a value per round.
    scheme: a key of `times`.
  """
  forms = [name for name in times if name in report.BASELINES]
  for kind, own in times[scheme].items():
    wall = {
      name: statistics.median(one.wall for one in times[name][kind])
      for name in forms
    }
    baseline = min(forms, key=wall.__getitem__)
    found = measure_lib.ratios(own, times[baseline][kind])
    yield {"measure": kind, "baseline": baseline} | found


def _programs(size: str, scheme: str) -> dict[str, Any]:
  """The two timed programs, and the time to compile the training step."""
  config = config_of(size, scheme)
  mesh = sharding.make_mesh(config_lib.MeshConfig(data=1))
  program = train_state.make_program(config, mesh)
  state = program.init_state()
  rng = np.random.default_rng(0)
  shape = (config.data.batch_size, config.data.sequence_length + 1)
  tokens = rng.integers(0, config.model.vocab_size, shape).astype(np.int32)
  batch = sharding.shard_batch({"tokens": tokens}, mesh)

  step = program.train_step

  def compile_step():
    step.lower(state, batch).compile()

  def trunk_loss(model):
    # The head, the same for all schemes, is left out of the ratios.
    return jnp.mean(jnp.square(model.hidden(batch["tokens"][:, :-1])))

  return {
    COMPILE: measure_lib.timed(compile_step),
    "forward": functools.partial(jax.jit(trunk_loss), state.model),
    "forward_backward": functools.partial(
      jax.jit(jax.grad(trunk_loss)), state.model
    ),
  }


def config_of(size: str, scheme: str) -> config_lib.RunConfig:
  """The config of a key of `SIZES` and one of `FORMS`."""
  spec, overrides = SIZES[size]
  return config_lib.load_config(
    f"{spec},residual={scheme.partition(' ')[0]}", overrides | FORMS[scheme]
  )


def main(argv):
  del argv
  wanted = _SCHEMES.value or list(SCHEMES)
  for name in wanted:
    config_lib.choose("schemes", name, FORMS)
  schemes = list(dict.fromkeys([*report.BASELINES, *wanted]))
  found = (measure(size, _ROUNDS.value, schemes) for size in _SIZE.value)
  measure_lib.record(_OUTPUT.value, itertools.chain.from_iterable(found))
  if pathlib.Path(_OUTPUT.value).absolute() == _RESULTS:
    publish.publish(PUBLISHED)


if __name__ == "__main__":
  app.run(main)

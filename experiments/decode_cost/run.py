# SPDX-License-Identifier: Apache-2.0
"""Tokens per second on this machine, of all schemes in one process.

  python -m experiments.decode_cost.run [--rounds=5]

Compiles a step that decodes one token for full caches of some length, a step
that computes a whole prompt, and for one row the step that a program without
caches needs: the forward pass of all tokens. Then all schemes run in turn,
round after round. Every scheme runs in all forms: as scans, where Block and
Full read in two phases; unrolled, where they read all sources in one operation;
and, while decoding, with layers in arrays of their own, as the engine has them
on a CPU. The baseline is the faster form of PreNorm, for each number of rows
and tokens. A ratio is the median over rounds.

Writes results.csv beside this file and fills the documents from it and from
tpu.csv.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import itertools
import pathlib
import statistics
import sys
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.common import command_line
from attnres_jax.models import layer_stacks
from attnres_jax.models.mixers import cache as cache_lib
from experiments import measure as measure_lib
from experiments import publish
from experiments.decode_cost import report
from experiments.pages import readme

_RESULTS = pathlib.Path(__file__).absolute().with_name("results.csv")
PUBLISHED = readme.Published(
  _RESULTS.parent,
  [
    readme.Place(report.measured),
    readme.Place(report.compiled, "compiled", rows="tpu"),
    readme.Place(report.prompts, "prompts", rows="prompts"),
    readme.Place(
      report.summary,
      "latency",
      rows="tpu",
      document="../../docs/inference.md",
    ),
  ],
)

CONFIG = config_lib.ModelConfig(
  vocab_size=4096, width=256, num_layers=4, num_heads=4, mlp_width=688
)
BLOCKS = 4
SCHEMES = ("prenorm", "block_attnres", "full_attnres")
# How a scheme runs -> `model.scan_layers`.
SEPARATE = "separate"
FORMS = {"scanned": True, "unrolled": False, SEPARATE: False}
# Rows and tokens of each step.
DECODE = ((1, 128), (1, 2048), (8, 512), (64, 512))
RECOMPUTE = ((1, 128), (1, 2048))
PREFILL = ((1, 2048),)


def main() -> None:
  parser = command_line.Parser("python -m experiments.decode_cost.run", __doc__)
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--output", default=str(_RESULTS))
  options = parser.parse_args()
  nets = {
    f"{scheme} {how}": _model(scheme, how)
    for scheme, how in itertools.product(SCHEMES, FORMS)
  }
  found = (
    measure(step, rows, tokens, nets, options.rounds)
    for step, sizes in (
      ("decode", DECODE),
      ("recompute", RECOMPUTE),
      ("prefill", PREFILL),
    )  # fmt: skip
    for rows, tokens in sizes
  )
  measure_lib.record(options.output, itertools.chain.from_iterable(found))
  if pathlib.Path(options.output).absolute() == _RESULTS:
    publish.publish(PUBLISHED)


def measure(
  step: str,
  rows: int,
  tokens: int,
  nets: Mapping[str, models.Transformer],
  rounds: int,
) -> Iterator[dict[str, Any]]:
  """A row for each form, of the same step."""
  calls = {
    form: STEPS[step](net, rows, tokens)
    for form, net in nets.items()
    if step == "decode" or not form.endswith(SEPARATE)
  }
  times = measure_lib.in_turn(calls, rounds)
  median = lambda form: statistics.median(t.wall for t in times[form])
  baseline = min((f for f in calls if f.startswith("prenorm")), key=median)
  made = rows * tokens if step == "prefill" else rows
  for form, own in times.items():
    ratios = measure_lib.ratios(own, times[baseline])
    yield {
      "step": step,
      "batch": rows,
      "context": tokens,
      "form": form,
      "tokens_per_second": round(made / median(form), 2),
      "baseline": baseline,
    } | ratios


def decode(
  net: models.Transformer, rows: int, tokens: int
) -> Callable[[], jax.Array]:
  """A step of one token for each row, whose caches are full but for one."""

  @functools.partial(jax.jit, donate_argnums=1)
  def step(net, cache, ids_B):
    out = net.extend(ids_B[:, None], cache)
    logits_BV = net.embedding.decode(out.hidden_BTD)[:, 0]
    cache = cache_lib.append(cache, out.added)
    start_B = jnp.full(rows, tokens - 1, jnp.int32)
    return cache._replace(length_B=start_B), jnp.argmax(logits_BV, axis=-1)

  cache = net.init_cache(rows, tokens)
  if isinstance(next(iter(net.sublayers.values())), nnx.List):
    cache = jax.jit(cache_lib.separated)(cache)
  cache = cache._replace(length_B=jnp.full(rows, tokens - 1, jnp.int32))
  state: list[Any] = [cache, jnp.zeros(rows, jnp.int32)]

  def call():
    state[0], ids_B = step(net, *state)
    state[1] = ids_B.astype(jnp.int32)
    return state[1]

  return call


def recompute(
  net: models.Transformer, rows: int, tokens: int
) -> Callable[[], jax.Array]:
  """The next token of each row, from all of its tokens."""

  @jax.jit
  def step(net, tokens_BT):
    hidden_BTD = net.hidden(tokens_BT)
    logits_BV = net.embedding.decode(hidden_BTD[:, -1:])[:, 0]
    return jnp.argmax(logits_BV, axis=-1)

  return functools.partial(step, net, _tokens(rows, tokens))


def prefill(
  net: models.Transformer, rows: int, tokens: int
) -> Callable[[], jax.Array]:
  """A prompt as one chunk: its cache and its first token."""

  @jax.jit
  def step(net, tokens_BT):
    cache = net.init_cache(rows, tokens)
    out = net.extend(tokens_BT, cache, context=0)
    logits_BV = net.embedding.decode(out.hidden_BTD[:, -1:])[:, 0]
    return cache_lib.append(cache, out.added), jnp.argmax(logits_BV, axis=-1)

  return functools.partial(step, net, _tokens(rows, tokens))


STEPS = {"decode": decode, "recompute": recompute, "prefill": prefill}


def _model(scheme: str, how: str) -> models.Transformer:
  residual = config_lib.ResidualConfig(scheme, num_blocks=BLOCKS)
  config = dataclasses.replace(
    CONFIG, residual=residual, scan_layers=FORMS[how]
  )
  model = models.build_model(config)
  if how == SEPARATE:
    model.sublayers = layer_stacks.separated(model.sublayers)
  return model


def _tokens(rows: int, tokens: int) -> jax.Array:
  rng = np.random.default_rng(0)
  drawn = rng.integers(0, CONFIG.vocab_size, (rows, tokens))
  return jnp.asarray(drawn, jnp.int32)


if __name__ == "__main__":
  sys.exit(command_line.run(main))

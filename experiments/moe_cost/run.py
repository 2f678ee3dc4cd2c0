# SPDX-License-Identifier: Apache-2.0
"""What routed experts cost, against running every expert on every token.

  python -m experiments.moe_cost.run [--rounds=5]

Three forms of one MoE sublayer, with the same routing, on the same tokens:

  grouped as in `Moe`: rows sorted by expert, a loop over pieces dense one
  einsum over all experts, then a mask ragged_dot as `grouped`, with
  `jax.lax.ragged_dot` in place of the loop

All are compiled first and then run in turn in one process. A ratio is a form's
time over that of `grouped` in the same round; rows have the median over rounds
and its range, and the same for processor time. Writes `results.csv` beside this
file. `ragged_dot` runs at the smaller size only: on a CPU it makes one masked
copy of all rows per expert.
"""

from collections.abc import Iterator
import functools
import itertools
import pathlib
from typing import Any
from unittest import mock

from absl import app
from absl import flags
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.models import grouped_matmul
from attnres_jax.models import moe
from experiments import measure as measure_lib

_ROUNDS = flags.DEFINE_integer("rounds", 5, "timed rounds, after one warm-up")
_TOKENS = flags.DEFINE_integer("tokens", 2048, "tokens of the batch")
_OUTPUT = flags.DEFINE_string(
  "output",
  str(pathlib.Path(__file__).with_name("results.csv")),
  "CSV file to write the rows to",
)

WIDTH, HIDDEN, TOP_K = 256, 128, 8
FORMS = {64: ("grouped", "dense", "ragged_dot"), 256: ("grouped", "dense")}


def measure(experts: int, tokens: int, rounds: int) -> Iterator[dict[str, Any]]:
  """Compiles and times the forms; yields rows, first those of `grouped`."""
  config = config_lib.ModelConfig(
    width=WIDTH,
    num_layers=1,
    moe=config_lib.MoeConfig(
      num_experts=experts, top_k=TOP_K, expert_width=HIDDEN, num_shared=0
    ),
  )
  module = moe.Moe(config, rngs=nnx.Rngs(params=0))
  x_BTD = jax.random.normal(jax.random.key(1), (1, tokens, WIDTH))
  programs = {}
  for form in FORMS[experts]:
    forward = functools.partial(_apply, form)
    loss = lambda module, x, f=forward: jnp.sum(jnp.square(f(module, x)))
    for kind, function in (
      ("forward", forward),
      ("forward_backward", jax.grad(loss, argnums=(0, 1))),
    ):
      programs[form, kind] = jax.jit(function).lower(module, x_BTD).compile()
  _check(programs, module, x_BTD)
  calls = {
    key: functools.partial(program, module, x_BTD)
    for key, program in programs.items()
  }
  times = measure_lib.in_turn(calls, rounds)
  for form, kind in programs:
    yield (
      dict(experts=experts, tokens=tokens, form=form, measure=kind)
      | measure_lib.ratios(times[form, kind], times["grouped", kind])
      | dict(gigaflops=round(_useful_flops(tokens, kind) / 1e9, 2))
    )


def _apply(form, module, x_BTD):
  if form == "dense":
    return _dense(module, x_BTD[0])[None]
  if form == "grouped":
    return module(x_BTD)
  ragged = lambda operands, _, tpu: tpu(*operands)
  with (
    mock.patch.object(grouped_matmul.dispatch, "by_platform", ragged),
    mock.patch.object(grouped_matmul, "_fits_kernel", lambda rows: False),
  ):
    return module(x_BTD)


def _dense(module, x_UD):
  weight_UK, expert_UK = module.route(x_UD)
  rows_U1 = jnp.arange(x_UD.shape[0])[:, None]
  weight_UE = jnp.zeros((x_UD.shape[0], module.router[...].shape[1]))
  weight_UE = weight_UE.at[rows_U1, expert_UK].set(weight_UK)
  gate_EUF = jnp.einsum("UD,EDF->EUF", x_UD, module.gate[...])
  up_EUF = jnp.einsum("UD,EDF->EUF", x_UD, module.up[...])
  hidden_EUF = jax.nn.silu(gate_EUF) * up_EUF * weight_UE.T[..., None]
  return jnp.einsum("EUF,EFD->UD", hidden_EUF, module.down[...])


def _check(programs, module, x_BTD):
  """The forms; all compute the same function."""
  outputs = {
    form: np.asarray(program(module, x_BTD))
    for (form, kind), program in programs.items()
    if kind == "forward"
  }
  for found in outputs.values():
    np.testing.assert_allclose(found, outputs["grouped"], rtol=0, atol=1e-5)


def _useful_flops(tokens, kind):
  """FLOPs of the chosen experts' products; backward has two for each."""
  passes = 1 if kind == "forward" else 3
  return passes * 3 * 2 * tokens * TOP_K * WIDTH * HIDDEN


def main(argv):
  del argv
  found = (measure(n, _TOKENS.value, _ROUNDS.value) for n in FORMS)
  measure_lib.record(_OUTPUT.value, itertools.chain.from_iterable(found))


if __name__ == "__main__":
  app.run(main)

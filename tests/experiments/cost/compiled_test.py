# SPDX-License-Identifier: Apache-2.0
"""Bytes, time and kernels of a compiled program."""

import os
import subprocess
import sys

import pytest

from attnres_jax.common import chips
from attnres_jax.common import csv_rows
from attnres_jax.plan import hlo
from experiments.cost import compiled
from experiments.cost import run
from tests import tiny_run


def test_cost_of_a_kernel():
  """A kernel whose source is on the core counts its bytes as time only."""
  name = 'metadata={op_name="jit(f)/part<residual>/pallas_call"}'
  text = f"""\
ENTRY %main (x: bf16[8,128]) -> bf16[8,128] {{
  %x = bf16[8,128]{{1,0:T(8,128)(2,1)S(1)}} parameter(0)
  %made = bf16[8,128]{{1,0:T(8,128)(2,1)S(1)}} negate(%x), metadata={{op_name="jit(f)/part<mlp>/neg"}}, backend_config={{"window_config":{{"estimated_cycles":"3000"}}}}
  ROOT %read = bf16[8,128]{{1,0:T(8,128)(2,1)}} custom-call(%made), custom_call_target="tpu_custom_call", {name}
}}
"""  # noqa: E501
  chip = chips.CHIPS["TPU v5 lite"]
  array, start = 2 * 8 * 128, compiled.START_SECONDS
  for start_seconds, kernel in (
    (start, start + 2 * array / chip.hbm_bytes_per_second),
    (None, array / chip.hbm_bytes_per_second),
  ):
    total, depth = compiled.costs(hlo.Program(text), chip, start_seconds)
    assert (total.nbytes, depth.nbytes) == (array, array)
    assert (total.kernels, depth.kernels) == (1, 1)
    assert depth.seconds == pytest.approx(kernel)
    assert total.seconds == pytest.approx(kernel + 3000 / chip.clock_hz)


@pytest.mark.slow
@pytest.mark.needs("libtpu")
@pytest.mark.parametrize(
  "what",
  [
    "identity --networks=stack16 --tokens=256",
    "step --networks=tiny",
    "decode --networks=tiny --tokens=128",
    "prefill --networks=tiny --tokens=128",
  ],
)
def test_the_command_compiles(what, tmp_path):
  # In processes of their own: tests compile with less care.
  command = [sys.executable, "-m", "experiments.cost.run", *what.split()]
  command += ["--chips=v5e", "--batch=1", "--arms=prenorm;block_attnres"]
  environment = os.environ | tiny_run.environment()
  rows = []
  for mode in ([], ["--bytes_only"]):
    path = tmp_path / f"rows{len(mode)}.csv"
    subprocess.run(
      [*command, f"--out={path}", *mode], check=True, cwd=tiny_run.ROOT,
      env=environment,
    )  # fmt: skip
    rows.append(csv_rows.read(path))
    if what.split()[0] not in ("identity", "step"):
      break
  assert all(float(row["ms"]) > 0 for row in rows[0])
  # Bytes before machine code are those after.
  assert len({tuple(row["GB"] for row in group) for group in rows}) == 1


def test_the_least_of_decoding_is_its_own_cache():
  """One layer of four keeps 512 + 64 numbers of a token."""
  least = [
    compiled._least(compiled.Case("decode", "v5e", "48b", "prenorm", 1, tokens))
    for tokens in (1, 32_769)
  ]
  first, last = (float(row["least_GB"]) for row in least)
  assert last - first == pytest.approx(32_768 * 576 * 2 / 1e9, abs=2e-4)


@pytest.mark.more
def test_blocks_of_a_prompt_on_one_chip():
  """One chip holds as many as each of eight with eight times the tokens."""
  case = compiled.Case(
    "prefill", "v5p", "paper", "block_attnres", 1, 16_384, length=131_072
  )
  assert compiled._least(case) == {"blocks_GB": "1.879"}


@pytest.mark.slow
@pytest.mark.needs("libtpu")
def test_the_command_compiles_experts(tmp_path):
  out = tmp_path / "rows.csv"
  what = ["experts", "--networks=194m", "--chips=v6e-16", "--bytes_only"]
  assert run.main([*what, f"--out={out}"]) == 0
  (row,) = csv_rows.read(out)
  assert (row["mesh"], row["device_tokens"]) == ("1 x 1 x 16", "8192")
  assert float(row["GB"]) > float(row["least_GB"]) > float(row["fused_GB"])
  # Tokens and their gradients come in from 15 devices, sums and the gradients
  # of tokens go out, and routing: the backward pass takes tokens once more, for
  # which the compiler keeps what came in.
  vectors = float(row["sent_GB"]) * 1e9 / (8192 * 15 * 896 * 2)
  assert 4 < vectors < 4.2

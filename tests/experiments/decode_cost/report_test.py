# SPDX-License-Identifier: Apache-2.0
"""Tables of the experiment, and what a compiled step counts as."""

import pytest

from attnres_jax.common import chips
from attnres_jax.plan import hlo
from experiments.decode_cost import report
from experiments.decode_cost import tpu

FACTS = {"jax": "0.10", "python": "3.11", "commit": "abc", "hardware": "a CPU"}


def _row(scheme, batch, megabytes, micros, depth=0.0, fits=True):
  row = dict(step="decode", chip="v5e", batch=batch, context=1024)
  row |= dict(scheme=scheme, fits=fits, least_MB=1000.0)
  if fits:
    row |= dict(MB=megabytes, estimate_us=micros, depth_us=depth)
  return {name: str(value) for name, value in (row | FACTS).items()}


ROWS = [
  _row("block_attnres", 8, 1010.0, 2100.0, 42.0),
  _row("prenorm", 8, 1000.0, 2000.0),
  _row("prenorm", 64, 2000.0, 4000.0),
  _row("block_attnres", 64, 2010.0, 4000.0, 20.0),
  _row("full_attnres", 64, 0.0, 0.0, fits=False),
]


def test_compiled():
  text = report.compiled(ROWS)
  cells = "| decode | v5e | 8 | 1K | Block AttnRes | 1.010 | 1.000 | 1.0100"
  assert f"{cells} | 2.100 | 1.050 | 2.0 % |" in text
  # PreNorm first, fewer rows first.
  order = [line.split(" | ")[2:5:2] for line in text.splitlines()[2:7]]
  assert order[0] == ["8", "PreNorm"] and order[2] == ["64", "PreNorm"]
  assert "| Full AttnRes | does not fit |" in text and "commit abc" in text


def test_summary():
  text = report.summary(ROWS)
  assert (
    "| decode | v5e | Block AttnRes | 1.005 to 1.010 | 1.000 to 1.050 | 2.0 % |"
  ) in text
  assert "Full" not in text


def test_measured():
  row = dict(step="decode", batch=1, context=128, form="prenorm unrolled")
  row |= dict(tokens_per_second=1234.5, ratio=1.0, ratio_min=1.0, ratio_max=1.0)
  other = row | dict(form="full_attnres", ratio=1.5, ratio_max=2.0)
  rows = [{k: str(v) for k, v in (r | FACTS).items()} for r in (row, other)]
  text = report.measured(rows)
  assert "| PreNorm, unrolled | 1,234 | 1.00 |" in text
  assert "| Full AttnRes, scanned | 1,234 | 1.50 (1.00 to 2.00) |" in text


def test_prompts():
  row = dict(network="paper", scheme="block_attnres", devices=8, chunk=16384)
  row |= dict(cached=0, blocks_GB="0.235", temporary_GB="1.000")
  row |= dict(all_gather=32, reduce_scatter=33, all_reduce=0, others=0)
  text = report.prompts([{k: str(v) for k, v in (row | FACTS).items()}])
  expected = "| paper | Block AttnRes | 8 | 16384 | 0 | 0.235 | 1.000 | 32 | 33"
  assert expected in text


def test_cost_of_a_kernel():
  """A kernel whose source is on the core counts its bytes as time only."""
  name = 'metadata={op_name="jit(f)/part<residual>/pallas_call"}'
  text = f"""\
HloModule jit_f, is_scheduled=true

ENTRY %main (x: bf16[8,128]) -> bf16[8,128] {{
  %x = bf16[8,128]{{1,0:T(8,128)(2,1)S(1)}} parameter(0)
  %made = bf16[8,128]{{1,0:T(8,128)(2,1)S(1)}} negate(%x), metadata={{op_name="jit(f)/part<mlp>/neg"}}, backend_config={{"window_config":{{"estimated_cycles":"3000"}}}}
  ROOT %read = bf16[8,128]{{1,0:T(8,128)(2,1)}} custom-call(%made), custom_call_target="tpu_custom_call", {name}
}}
"""  # noqa: E501
  chip = chips.CHIPS["TPU v5 lite"]
  total, depth = tpu.costs(hlo.Program(text), chip)
  array = 2 * 8 * 128
  assert (total.nbytes, depth.nbytes) == (array, array)
  assert (total.kernels, depth.kernels, total.instructions) == (1, 1, 2)
  kernel = tpu.START_SECONDS
  kernel += 2 * array / chip.hbm_bytes_per_second
  assert depth.seconds == pytest.approx(kernel)
  assert total.seconds == pytest.approx(kernel + 3000 / chip.clock_hz)

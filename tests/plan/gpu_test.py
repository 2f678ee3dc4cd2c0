# SPDX-License-Identifier: Apache-2.0
"""Programs for GPUs: products, launches and the time of a step."""

import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import chips
from attnres_jax.common import gpus
from attnres_jax.common import topology
from attnres_jax.plan import gpu
from attnres_jax.plan import hlo
from attnres_jax.plan import report
from attnres_jax.plan import search
from attnres_jax.plan import text as text_lib

KIND = gpus.TARGETS["h100"].name
CHIP = chips.chip_of(KIND)

PROGRAM = """
%product (a: bf16[256,512], b: bf16[512,128]) -> f32[256,128] {
  %a = bf16[256,512]{1,0} parameter(0)
  %b = bf16[512,128]{1,0} parameter(1)
  ROOT %dot.1 = f32[256,128]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%update (p: bf16[12,8,64], i: s32[], x: bf16[8,64]) -> bf16[12,8,64] {
  %p = bf16[12,8,64]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = bf16[8,64]{1,0} parameter(2)
  %view = bf16[1,8,64]{2,1,0} bitcast(%x)
  %zero = s32[] constant(0)
  ROOT %new = bf16[12,8,64]{2,1,0} dynamic-update-slice(%p, %view, %i, %zero, %zero)
}

%body (t: (s32[], bf16[12,8,64])) -> (s32[], bf16[12,8,64]) {
  %t = (s32[], bf16[12,8,64]{2,1,0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %bank = bf16[12,8,64]{2,1,0} get-tuple-element(%t), index=1
  %row = bf16[8,64]{1,0} broadcast(%n), dimensions={}
  %start = ((bf16[12,8,64]{2,1,0}, s32[], bf16[8,64]{1,0}), bf16[12,8,64]{2,1,0}, u32[]) fusion-start(%bank, %n, %row), kind=kLoop, calls=%update
  %done = bf16[12,8,64]{2,1,0} fusion-done(%start)
  ROOT %out = (s32[], bf16[12,8,64]{2,1,0}) tuple(%n, %done)
}

%condition (t: (s32[], bf16[12,8,64])) -> pred[] {
  %t = (s32[], bf16[12,8,64]{2,1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (a: bf16[256,512], b: bf16[512,128], q: bf16[2,64,4,32], k: bf16[2,64,2,32], t: (s32[], bf16[12,8,64])) -> f32[256,128] {
  %a = bf16[256,512]{1,0} parameter(0)
  %b = bf16[512,128]{1,0} parameter(1)
  %q = bf16[2,64,4,32]{3,2,1,0} parameter(2)
  %k = bf16[2,64,2,32]{3,2,1,0} parameter(3)
  %t = (s32[], bf16[12,8,64]{2,1,0}) parameter(4)
  %attend = (bf16[2,64,4,32]{3,2,1,0}, u8[0]{0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"mask_type": "CAUSAL"}
  %pull = (bf16[2,64,4,32]{3,2,1,0}, u8[0]{0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={"mask_type": "NO_MASK"}
  %blas = f32[256,128]{1,0} custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %loop = (s32[], bf16[12,8,64]{2,1,0}) while(%t), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"12"}}
  ROOT %dot = f32[256,128]{1,0} fusion(%a, %b), kind=kCustom, calls=%product
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def program():
  return hlo.Program(PROGRAM)


@pytest.mark.parametrize(
  "name,flops",
  [
    ("%attend", 2 * (2 * 2 * 4 * 64 * 64 * 32) / 2),
    ("%pull", 5 * (2 * 2 * 4 * 64 * 64 * 32)),
    ("%blas", 2 * 256 * 512 * 128),
    ("%dot", 0),  # The product is inside.
  ],
)
def test_products(program, name, flops):
  instruction = program.computations["%main"][name]
  assert program.product_flops(instruction) == flops


def test_the_product_of_a_fusion(program):
  inner = program.inside(program.computations["%main"]["%dot"])
  assert sum(map(program.product_flops, inner)) == 2 * 256 * 512 * 128


def test_launches_and_updates_in_place(program):
  """A loop runs as often as it says; an update moves its own part."""
  times = gpu.of_program(program, CHIP, KIND)
  assert times["launches"] == 4 + 12 * 2
  (start,) = (
    (count, nbytes)
    for count, op, nbytes in program.instructions()
    if op.name == "%start"
  )
  assert start == (12, 2 * 8 * 64 * 2 + 4 + 4)


@pytest.mark.parametrize(
  "rows,waves",
  [
    (4224, 4),  # 33 x 16 tiles of 128 x 256 are four waves of 132 cores.
    (4225, 4.5),  # 34 x 32 tiles of half the size are nine.
    (128, 4 * 16 / 528),  # Fewer tiles than cores share the work.
    (1, 0),  # bound by memory
  ],
)
def test_a_launch_takes_the_longer_of_bytes_and_products(rows, waves):
  text = f"""
ENTRY %main (a: bf16[{rows},4096], b: bf16[4096,4096]) -> f32[{rows},4096] {{
  %a = bf16[{rows},4096]{{1,0}} parameter(0)
  %b = bf16[4096,4096]{{1,0}} parameter(1)
  ROOT %dot = f32[{rows},4096]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}
}}
"""
  # Of normal numbers.
  wave = 2 * 132 * 128 * 256 * 4096 / (812.25e12 * 257 / 295)
  nbytes = 4096 * (2 * rows + 2 * 4096 + 4 * rows)
  times = gpu.of_program(hlo.Program(text), CHIP, KIND)
  assert times["work_seconds"] == pytest.approx(
    max(waves * wave, nbytes / CHIP.hbm_bytes_per_second)
  )
  assert CHIP.hbm_bytes_per_second == pytest.approx(2872.3e9)


@pytest.mark.parametrize(
  "dtype,precision,rate",
  [
    ("f32", ", operand_precision={highest,highest}", 132 * 256 * 1.98e9),
    ("f32", "", 812.25e12 * 257 / 295 / 2),
    ("bf16", "", 812.25e12 * 257 / 295),
  ],
)
def test_products_by_precision(dtype, precision, rate):
  text = f"""
ENTRY %main (a: {dtype}[16896,8192], b: {dtype}[8192,1024]) -> f32[16896,1024] {{
  %a = {dtype}[16896,8192]{{1,0}} parameter(0)
  %b = {dtype}[8192,1024]{{1,0}} parameter(1)
  ROOT %dot = f32[16896,1024]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}{precision}
}}
"""  # noqa: E501
  times = gpu.of_program(hlo.Program(text), CHIP, KIND)
  # Tiles of 128 x 128 are eight whole waves.
  assert times["work_seconds"] == pytest.approx(
    2 * 16896 * 8192 * 1024 / rate, rel=1e-3
  )


@pytest.mark.parametrize(
  "length,backward,tflops", [(1024, "", 410), (3000, "Backward", 465)]
)
def test_attention_has_the_published_rate(length, backward, tflops):
  shape = f"bf16[8,{length},8,128]"
  text = f"""
ENTRY %main (q: {shape}) -> {shape} {{
  %q = {shape}{{3,2,1,0}} parameter(0)
  ROOT %attend = {shape}{{3,2,1,0}} custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax{backward}", backend_config={{"mask_type": "CAUSAL"}}
}}
"""  # noqa: E501
  times = gpu.of_program(hlo.Program(text), CHIP, KIND)
  flops = 2 * 8 * 8 * length**2 * 128 * (2.5 if backward else 1)
  assert times["work_seconds"] == pytest.approx(flops / (tflops * 1e12))


def test_exposed_transfers_are_part_of_a_step():
  fields = dict(work_seconds=3.0, launch_seconds=1.0)
  both = lambda links, exposed: gpu.step_seconds(
    fields | dict(link_seconds=links, exposed_seconds=exposed)
  )
  assert both(2.0, 0.5) == 4.5
  assert both(7.0, 0.5) == 7.0


CONFIG = "configs/lm.py:size=tiny"
FIELDS = {
  "model.vocab_size": 260, "model.num_layers": 2,
  "model.residual.num_blocks": 2, "data.batch_size": 16,
  # Without a GPU to time them, XLA has no form for some products of float32.
  "model.dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.needs("jax-cuda13-plugin")
@pytest.mark.parametrize("slice_name,nodes", [("h100-8", 1), ("h100-2x8", 2)])
def test_a_step_on_gpus(slice_name, nodes):
  config = config_lib.load_config(CONFIG, FIELDS | {"mesh.data": 8 * nodes})
  plan = report.make_report(config, topology.devices(slice_name))
  assert plan["fits"] and plan["launches"] > 100
  assert plan["devices"] == 8 * nodes
  (gradients, *_) = plan["collectives"]
  assert gradients["kind"] == "all-reduce" and gradients["axes"] == "data"
  # Every gradient once, and parameters are float32.
  share = 2 * (8 * nodes - 1) / (8 * nodes)
  assert plan["sent_bytes"] == pytest.approx(
    share * plan["parameter_bytes"], rel=0.01
  )
  # The network between hosts is slower than NVLink.
  rate = 450e9 if nodes == 1 else 50e9
  assert plan["link_seconds"] >= plan["sent_bytes"] / rate
  assert plan["flops_ratio"] < 1.6
  parts = {row["part"] for row in plan["parts"]}
  assert {"attention", "mlp", "residual", "head and loss"} <= parts
  text = text_lib.to_text(plan)
  assert "launches" in text and "NVIDIA H100" in text


@pytest.mark.needs("jax-cuda13-plugin")
def test_search_chooses_by_memory(capsys, tmp_path):
  """A plan is saved, and a run with `planned` fields takes it."""
  plans = tmp_path / "plans.csv"
  fields = FIELDS | {"optim.accumulate_steps": 0}
  argv = [f"--config={CONFIG}", "--topology=h100-8"]
  argv += [f"--config.{name}={value}" for name, value in fields.items()]
  argv += ["--tries=1", "--save", f"--plans={plans}"]
  assert search.main(argv) == 0
  assert "remat" in capsys.readouterr().out
  row = plans.read_text().splitlines()[1]
  assert "NVIDIA H100 80GB HBM3" in row and "h100-8" in row and "gpu " in row

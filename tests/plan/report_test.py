# SPDX-License-Identifier: Apache-2.0
"""Reports of the training step, compiled for a slice, are consistent."""

import json

import jax
import pytest

from attnres_jax import config as config_lib
from attnres_jax import flops
from attnres_jax.common import chips
from attnres_jax.common import topology
from attnres_jax.plan import report
from attnres_jax.plan import text as text_lib
from tests.plan import small

pytestmark = pytest.mark.needs("libtpu")


def _config(**fields):
  mesh = {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
  return small.config(**{"model.remat": "full"} | mesh | fields)


@pytest.fixture(scope="module")
def devices():
  return topology.devices("v5e:2x4")


@pytest.fixture(scope="module")
def trained(devices):
  """The report of the training step."""
  return report.make_report(_config(), devices)


def test_numbers_of_a_step(trained):
  config, plan = _config(), trained
  json.dumps(plan)
  assert plan["fits"] and plan["headroom_bytes"] > 15 * 2**30
  # Every parameter of two dimensions is cut four ways, and Adam keeps two.
  assert plan["optimiser_bytes"] == pytest.approx(
    2 * plan["parameter_bytes"], rel=0.01
  )
  vector = 8 * 256 // 8 * config.model.width
  # Outputs of four sublayers in float32; the embedding and both blocks.
  assert plan["running_state_bytes"] == 4 * 4 * vector
  assert plan["block_bytes"] == 3 * 4 * vector
  # Forward twice, for checkpointing; attention is in a kernel and not counted.
  per_token = flops.flops_per_token(config.model, 256)
  products = 1 - per_token.attention / per_token.forward
  assert 1.1 < plan["flops"] / (products * plan["analytic_flops"]) < 1.5
  axes = {row["axes"] for row in plan["collectives"]}
  assert {"data", "tensor"} <= axes
  # Some of what is sent is overlapped, but not all.
  for row in plan["collectives"]:
    assert 0 <= row["overlapped_bytes"] <= row["sent_bytes"]
  hidden = sum(row["overlapped_bytes"] for row in plan["collectives"])
  assert 0 < hidden < plan["sent_bytes"]
  sizes = [row["bytes"] for row in plan["largest"]]
  assert sizes == sorted(sizes, reverse=True)
  assert sizes[0] <= plan["temporary_bytes"]
  text = text_lib.to_text(plan)
  assert "by estimate, bound by" in text and "2 data x 2 fsdp" in text
  for label in ("activations kept for backward", "cached blocks", "headroom"):
    assert label in text
  assert plan["largest"][0]["array"] in text
  moved = [row["bytes"] for row in plan["busiest"]]
  assert moved == sorted(moved, reverse=True)
  assert 0 < sum(moved) < plan["traffic_bytes"]
  assert plan["busiest"][0]["source"] in text.split("moves most")[1]


def test_parts_of_a_step(trained):
  rows = {row["part"]: row for row in trained["parts"]}
  assert set(rows) == {
    "embedding", "attention", "mlp", "residual", "norms", "head and loss",
    "optimiser", "other",
  }  # fmt: skip
  for name, total_name in (
    ("moved_bytes", "traffic_bytes"), ("flops", "flops"),
    ("sent_bytes", "sent_bytes"), ("least_flops", "least_flops"),
  ):  # fmt: skip
    total = sum(row[name] or 0.0 for row in rows.values())
    assert total == pytest.approx(trained[total_name]), name
  assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
  # Nearly all of it is attributed, and so is everything it computes.
  assert rows["other"]["moved_bytes"] < 0.1 * trained["traffic_bytes"]
  assert rows["other"]["flops"] == 0
  # Kernels are charged what they need at least; products are as many as needed.
  attention, mlp = rows["attention"], rows["mlp"]
  assert attention["kernels"] > 0 and rows["residual"]["kernels"] > 0
  assert attention["charged_flops"] >= attention["least_flops"]
  assert mlp["kernels"] == 0 and mlp["charged_flops"] == mlp["flops"]
  assert 0.8 < mlp["flops"] / mlp["least_flops"] <= 1
  # One all-reduce has the scalars and the gradients of the norms' gains, and
  # belongs to either.
  scalars = rows["optimiser"]["sent_bytes"] + rows["norms"]["sent_bytes"]
  assert scalars < 10_000
  assert rows["attention"]["sent_bytes"] > 0


def test_the_verdict_takes_the_larger_count_of_flops(trained):
  peak = chips.CHIPS["TPU v5 lite"].peak_flops_per_second
  larger = max(trained["charged_flops"], trained["analytic_flops"])
  assert trained["compute_seconds"] == larger / peak
  assert "warning" not in text_lib.to_text(trained)
  text = text_lib.to_text(trained | dict(flops_ratio=1.3))
  assert "warning: it computes 1.30 times the FLOPs that it needs" in text


def test_a_pipeline(devices):
  """What its plan keeps, and the traffic of one chunk per slot."""
  fields = {
    "model.num_layers": 1,
    "model.residual.num_blocks": 1,
    "mesh.stage": 2,
    "mesh.fsdp": 1,
    "mesh.tensor": 1,
    "mesh.data": 4,
    "pipeline.microbatches": 2,
  }
  config = _config(**fields)
  plan = report.make_report(config, devices)
  # A running sum of float32 and an embedding, of two microbatches in flight.
  vector = 8 // 4 // 2 * 256 * config.model.width
  assert plan["running_state_bytes"] % (4 * vector) == 0
  assert plan["block_bytes"] % (4 * vector) == 0
  assert plan["running_state_bytes"] + plan["block_bytes"] >= 2 * 4 * vector
  # Forward, again for backward, and once more for checkpointing: 5 passes for
  # 3, without attention's kernels. Units in every tick would be 3 times that.
  share = plan["flops"] / plan["analytic_flops"]
  assert 1 < share < 5 / 3
  sent = {row["kind"]: row["axes"] for row in plan["collectives"]}
  assert sent["collective-permute"] == "stage"
  rows = {row["part"]: row for row in plan["parts"]}
  assert rows["pipeline"]["sent_bytes"] > 0 and "mlp" in rows
  # A chunk is recomputed as a whole, and for checkpointing.
  assert 0.6 < rows["mlp"]["flops"] / rows["mlp"]["least_flops"] <= 1.05
  assert "in 2 microbatches" in text_lib.to_text(plan)


def test_a_decode_step(devices, trained):
  """One token per row, without optimiser state, and with a note."""
  config, train = _config(), trained
  plan = report.make_report(config, devices, "decode")
  assert plan["fits"] and "optimiser_bytes" not in plan
  # Forward only, at the end of 256 tokens.
  ratio = 3 * 256 * plan["analytic_flops"] / train["analytic_flops"]
  assert 1 < ratio < 1.5
  assert 0.7 < plan["flops"] / plan["analytic_flops"] < 1.5
  # What is read at least: all weights, of this device, once.
  assert plan["traffic_bytes"] > plan["parameter_bytes"]
  text = text_lib.to_text(plan)
  assert "decode step on 8" in text and "whose cache is full" in text
  message = r"step: got 'prefill', expected one of decode, train"
  with pytest.raises(config_lib.ConfigError, match=message):
    report.make_report(config, devices, "prefill")


def test_a_program_that_jaxlib_cannot_read(devices, monkeypatch):
  """Its memory is still known."""

  def refuse(compiled):
    raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure\nand more")

  monkeypatch.setattr(jax.stages.Compiled, "as_text", refuse)
  plan = report.make_report(_config(), devices, "decode")
  assert plan["fits"] and plan["peak_bytes"] > 0
  assert "collectives" not in plan
  text = text_lib.to_text(plan)
  assert "cannot read the program: INTERNAL: RET_CHECK failure" in text
  assert "headroom" in text and "and more" not in text


def test_a_step_that_does_not_fit(devices):
  large = {"model.width": 8192, "model.mlp_width": 65536, "model.num_heads": 32}
  plan = report.make_report(
    _config(**large, **{"mesh.fsdp": 1, "mesh.tensor": 1, "mesh.data": 8}),
    devices,
  )
  assert not plan["fits"]
  text = text_lib.to_text(plan)
  assert "exceeds available HBM" in text or "Ran out of memory" in text

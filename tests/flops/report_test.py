# SPDX-License-Identifier: Apache-2.0
"""The command: its output and its errors."""

import pathlib

import pytest

from attnres_jax import config as config_lib
from attnres_jax import flops
from attnres_jax.flops import __main__ as command
from attnres_jax.flops import report
from attnres_jax.models import residuals
from tests import tiny_network

ROOT = pathlib.Path(__file__).parents[2]
SPEC = f"{ROOT}/configs/kimi_linear.py:size=48b"


@pytest.fixture(scope="module")
def numbers():
  return flops.make_report(config_lib.load_config(SPEC))


@pytest.mark.more
def test_modules_add_up(numbers):
  rows = numbers["parameters"]
  for row in rows.values():
    assert row["total"] == row["number"] * row["each"]
    for name in ("total", "active"):
      modules = row.get("modules", {}).values()
      assert not modules or sum(m[name] for m in modules) == row[name]
  totals = numbers["totals"]
  assert totals["all"]["total"] == sum(row["total"] for row in rows.values())
  assert totals["without embedding and head"]["active"] == sum(
    row["active"]
    for name, row in rows.items()
    if name not in ("embedding", "head")
  )


def test_scheme_without_a_block_size_is_left_out():
  model = tiny_network.config("prenorm", num_blocks=0)
  counts = flops.make_report(config_lib.RunConfig(model=model))
  left_out = set(residuals.headline()) - set(counts["schemes"])
  assert left_out == {"block_attnres"}


def test_options_of_its_scheme_leave_the_usual_ones():
  model = tiny_network.config("laurel_lr", rank=3)
  counts = flops.make_report(config_lib.RunConfig(model=model))
  assert list(counts["schemes"]) == [*residuals.headline(), "laurel_lr"]


def test_unknown_vocabulary():
  with pytest.raises(config_lib.ConfigError, match=r"model\.vocab_size: got 0"):
    flops.make_report(config_lib.RunConfig())


def test_command(numbers, capsys):
  assert command.main([f"--config={SPEC}"]) == 0
  printed = capsys.readouterr()
  assert (printed.out, printed.err) == (report.to_text(numbers) + "\n", "")


def _sizes_row(size):
  run = config_lib.load_config(f"{ROOT}/configs/kimi_linear.py:size={size}")
  counts, model = flops.make_report(run), run.model
  totals = counts["totals"]["without embedding and head"]
  block, plain = (
    counts["schemes"][name] for name in ("block_attnres", "prenorm")
  )
  more = block["flops"]["train"] / plain["flops"]["train"] - 1
  caches = counts["cache"].values()
  cells = [
    size,
    f"{model.num_layers} x {model.width}",
    str(model.num_heads),
    str(model.moe.expert_width),
    f"{totals['total'] / 1e9:.3f}B",
    f"{totals['active'] / 1e6:,.2f}M",
    f"{block['parameters']:,}",
    f"{block['flops']['train'] / 1e9:.3f}G (+{100 * more:.2f} %)",
    f"{sum(c['token_bytes'] for c in caches):,}",
    f"{sum(c['sequence_bytes'] for c in caches) / 1e6:.1f} MB",
  ]
  return f"| {' | '.join(cells)} |"


@pytest.mark.more
def test_sizes_in_the_docs():
  text = (ROOT / "docs" / "kimi_linear.md").read_text()
  table = text.partition("<!-- sizes -->")[2].partition("<!-- /sizes -->")[0]
  rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
  sizes = ("194m", "241m", "296m", "436m", "528m", "48b")
  expected = [_sizes_row(size) for size in sizes]
  assert rows == expected, "\n".join(["write these:", *expected])

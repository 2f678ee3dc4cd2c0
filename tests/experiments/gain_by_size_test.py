# SPDX-License-Identifier: Apache-2.0
"""Sizes, the corpus without copies, and what a gain is worth."""

import json
import zipfile

import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import csv_rows
from attnres_jax.scaling import architecture
from attnres_jax.scaling import fit as fit_lib
from attnres_jax.scaling import grid
from experiments.gain_by_size import config
from experiments.gain_by_size import corpus
from experiments.gain_by_size import report

SPEC = "experiments/gain_by_size/config.py"
# PreNorm's law, and what Block gains in it: the loss of 1.3 times the price.
EXPONENT, WORTH, SLOWER = 0.1, 1.3, 1.1


@pytest.mark.parametrize("size", config.SIZES)
def test_parameters_and_tokens_are_those_of_the_network(size):
  run = config_lib.load_config(f"{SPEC}:size={size},residual=block_attnres")
  of_size = config.SIZES[size]
  plain = config_lib.load_config(f"{SPEC}:size={size}").model
  gains = architecture.active_params(plain) - of_size.parameters
  assert 0 < gains == plain.width * (2 * plain.num_layers + 1)
  tokens = run.train.steps * run.data.batch_size * run.data.sequence_length
  assert tokens == pytest.approx(20 * of_size.parameters, rel=0.01)
  # What trains seeds together asks for these.
  assert not (run.train.eval_every or run.train.depth_every)
  assert run.train.steps % run.train.log_every == 0
  assert run.optim.peak_lr * run.model.width == pytest.approx(
    config.RATES["block_attnres"] * 64
  )


def test_runs_of_both_parts():
  rates, gain = config.PARTS.values()
  assert len({run.name for run in grid.load(SPEC)}) == 4 * 3 + 3
  assert len(gain) == 4 * 4 * len(config.SIZES)
  assert {run["seed"] for run in gain}.isdisjoint(r["seed"] for r in rates)


def test_own_rates_have_the_lowest_loss_and_are_at_no_end():
  rows = csv_rows.read("experiments/gain_by_size/rates.csv")
  for scheme in config.SCHEMES:
    losses = {
      float(row["peak_lr"]): float(row["validation_loss"])
      for row in rows
      if row["residual"] == scheme
    }
    best = min(losses, key=losses.__getitem__)
    assert config.RATES[scheme] == best
    assert min(losses) < best < max(losses)


def test_a_corpus_has_no_copies(tmp_path):
  lines = [f"value_{i} = compute_something({i})" for i in range(60)]
  old, new = lines[:40], lines[40:]
  texts = {
    "a.py": old,
    "b.py": old,  # A copy.
    "c.py": old[:12] + new[:8],  # More than half of it is.
    "d.py": old[:8] + new[8:],  # Less.
    "e.py": ["x = 1"],  # Short.
    "f.txt": new,
  }
  wheel = tmp_path / "w.whl"
  with zipfile.ZipFile(wheel, "w") as archive:
    for name, of_file in texts.items():
      archive.writestr(name, "\n".join(of_file))
    archive.writestr("g.py", b"\xff" * 1000)
  counts = corpus.write([wheel], tmp_path / "out.jsonl")
  written = (tmp_path / "out.jsonl").read_text().splitlines()
  assert {d["name"]: d["text"] for d in map(json.loads, written)} == {
    f"w.whl/{name}": "\n".join(texts[name]) for name in ("a.py", "d.py")
  }
  assert counts["copies"] == 2 and counts["size"] == counts["encoding"] == 1
  for line in corpus.WHEELS.read_text().splitlines():
    assert "==" in line and " --hash=sha256:" in line


def test_a_corpus_is_made_on_a_disk(capsys):
  assert corpus.main(["--output=gs://bucket/text"]) == 2
  assert "expected a local folder" in capsys.readouterr().err


def _rows(sizes):
  for size in sizes:
    price = 20 * config.SIZES[size].parameters ** 2 * 1e-12
    tokens = 1000 * config.SIZES[size].batch * config.LENGTH
    for scheme in config.SCHEMES:
      for seed in range(4):
        worth = WORTH if scheme == "block_attnres" else 1.0
        loss = (price * worth) ** -EXPONENT + 1e-5 * (seed % 7)
        yield {
          "size": size, "residual": scheme, "seed": str(seed),
          "tokens": str(tokens),
          "peak_lr": "0.001", "validation_loss": f"{loss:.9f}",
          "compute_attention": f"{price:.6g}", "seconds": "1", "data": "d",
          "quick_step_seconds":
            f"{0.1 * price * (SLOWER if worth > 1 else 1):.6g}",
          "device": "1 x cpu", "hardware": "cpu", "commit": "c",
          "python": "p", "jax": "j",
        }  # fmt: skip


def test_what_a_gain_is_worth():
  rows = list(_rows(["0.25m", "1m", "4m"]))
  by_flops = report.worth(rows, "block_attnres", "compute_attention")
  assert by_flops.value == pytest.approx(WORTH, rel=0.01)
  # Slower steps cost what they cost, and no more.
  by_time = report.worth(rows, "block_attnres", "quiet_seconds")
  assert by_time.value == pytest.approx(WORTH / SLOWER, rel=0.01)
  text = report.answer(rows)
  assert (
    "Block AttnRes reaches" in text and "at equal seconds it is ahead" in text
  )
  assert "Nobody has run 0.07m, 0.14m, 16m yet." in text
  table = report.results(rows)
  assert "| 1.10 |" in table and "| 16m | Block AttnRes |  |  |" in table
  assert report.figure(rows).axes[1].get_xlabel() == "seconds of 1 x cpu"


@pytest.mark.parametrize("high", [None, float("nan"), 1e9])
def test_an_end_of_an_interval_may_be_unknown(high):
  times = fit_lib.Estimate(1.1, 0.9, high)
  assert report.interval(times) == "[0.90, ?]"


def test_two_sizes_or_two_devices_have_no_law():
  rows = list(_rows(["0.25m", "1m"]))
  assert "Three sizes make a law" in report.answer(rows)
  rows = list(_rows(["0.25m", "1m", "4m"]))
  for row in rows:
    row["device"] = f"1 x {row['size']}"
  assert report.worth(rows, "block_attnres", "quiet_seconds") is None
  assert report.worth(rows, "block_attnres", "compute_attention") is not None


def test_a_run_that_diverged_is_not_hidden():
  rows = list(_rows(["0.25m", "1m", "4m"]))
  rows[-1]["validation_loss"] = "9.0"
  with pytest.raises(config_lib.ConfigError):
    report.answer(rows)

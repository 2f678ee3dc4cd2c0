# SPDX-License-Identifier: Apache-2.0
"""The demo's bookkeeping and its page, on made-up runs."""

import html.parser
import re

import numpy as np
import pytest

from attnres_jax import analysis
from attnres_jax import config as config_lib
from attnres_jax.common import csv_rows
from experiments.demo import inspection
from experiments.demo import report
from experiments.demo import results
from experiments.demo import run as run_lib
from experiments.demo import step_time

FACTS = {
  "hardware": "an abacus <fast>",
  "system": "paper",
  "python": "3.12",
  "jax": "0.12",
  "flax": "0.12",
  "commit": "abcdef",
  "date": "2026-01-01",
  "corpus": "a text & its words",
}
RATIOS = {
  "prenorm": (1, 1, 1),
  "rescaled": (1.05, 1.0, 1.1),
  "full_attnres": (1.5, 1.4, 1.6),
  "block_attnres": (1.1, 1.05, 1.2),
}


def step_times(load=0.9):
  return {
    scheme: {
      "step_seconds": f"{0.2 * ratio[0]:.4f}",
      "step_time_ratio": f"{ratio[0]:.3f}",
      "step_time_ratio_min": f"{ratio[1]:.3f}",
      "step_time_ratio_max": f"{ratio[2]:.3f}",
      "step_load": f"{load:.2f}",
    }
    for scheme, ratio in RATIOS.items()
  }


LAST_LOSS = {
  "prenorm": (1.5, 1.6),
  "rescaled": (1.5, 1.6),
  "full_attnres": (1.4, 1.51),
  "block_attnres": (1.42, 1.5),
}


def make_run(scheme, seed, part=1):
  # PreNorm's loss falls as steps^-0.1.
  last = LAST_LOSS[scheme][seed] * part**0.1
  row = {
    "scheme": scheme,
    "seed": str(seed),
    "validation_nats_per_token": f"{last:.5f}",
    "validation_bits_per_byte": f"{last / np.log(2):.5f}",
    "train_tokens": str(1000 // part),
    "parameters": "1234567",
    "step_bytes": "50000000",
    "run_seconds": "60",
  }
  train = list(range(100, 1001, 100)), np.linspace(5, last, 10).tolist()
  return results.Run(scheme, seed, train, ([500, 1000], [3.0, last]), row)


def make_look(scheme):
  whole = {"loss": 1.5, "bits_per_byte": 2.2, "tokens": 4000}
  weights = None
  if scheme.endswith("attnres"):
    rows = np.array([[1, np.nan, np.nan], [0.25, 0.75, np.nan]])
    weights = analysis.DepthWeights(
      attention=rows,
      mlp=rows,
      output=np.array([0.5, 0.5]),
      columns=("embedding", "block 1", "block 2"),
      output_columns=("embedding", "block 1"),
      attention_entropy=np.zeros(2),
      mlp_entropy=np.zeros(2),
      output_entropy=0.7,
    )
  series = np.array([0.1, 0.4])
  magnitudes = analysis.Magnitudes(*[series] * 5, loss=1.5)
  return inspection.Look(
    whole, weights, magnitudes, "def ", f"<b>{scheme}</b>\n"
  )


def all_runs():
  return [make_run(s, seed) for seed in (0, 1) for s in run_lib.SCHEMES]


def shorter_runs():
  return [make_run("prenorm", seed, n) for seed in (0, 1) for n in (4, 2)]


def rows(runs=None, load=0.9):
  names = ("corpus", "hardware", "python", "jax", "commit")
  facts = {name: FACTS[name] for name in names}
  return results.rows(runs or all_runs(), step_times(load), facts)


def test_schemes_are_compared_seed_by_seed():
  found = results.differences(rows(), "full_attnres")
  assert found == pytest.approx([-0.1, -0.09])
  assert results.differences(rows(), "prenorm") == [0, 0]


def test_an_unfinished_seed_is_not_compared():
  some = rows([*all_runs()[:4], make_run("full_attnres", 1)])
  assert len(results.losses(some, "full_attnres")) == 2
  assert results.differences(some, "full_attnres") == pytest.approx([-0.1])


def test_csv_and_markdown_tell_the_same_story(tmp_path):
  path = tmp_path / "results.csv"
  csv_rows.write(path, rows())
  read = csv_rows.read(path)
  assert read == rows() and len(read) == 8
  assert read[2]["scheme"] == "full_attnres"
  assert float(read[2]["validation_nats_per_token"]) == 1.4
  assert float(read[2]["validation_bits_per_byte"]) == pytest.approx(2.01977)
  table = results.markdown(read)
  line = next(x for x in table.splitlines() if x.startswith("| Block"))
  cells = [cell.strip() for cell in line.strip("|").split("|")]
  assert cells == [
    "Block AttnRes", "**1.460** (1.420, 1.500)", "\N{MINUS SIGN}0.090",
    "unknown", "1.10x (1.05 to 1.20)", "1,234,567", "50 MB",
  ]  # fmt: skip
  assert "commit abcdef" in table


def test_steps_that_prenorm_needs():
  found = results.more_steps(rows(all_runs() + shorter_runs()), "full_attnres")
  # The mean of ln(1.4 / 1.5) and ln(1.51 / 1.6), over the slope of -0.1.
  gain = np.mean(np.log([1.5 / 1.4, 1.6 / 1.51])) / 0.1
  assert found.value == pytest.approx(np.exp(gain) - 1, rel=1e-3)
  assert found.low < found.value < found.high
  table = results.table(rows(all_runs() + shorter_runs()))
  text, aside, _ = table.rows[2][3]
  assert text == f"+{100 * found.value:.0f} %" and " to " in aside
  assert results.more_steps(rows(), "full_attnres") is None


def test_times_of_a_busy_machine_are_not_printed():
  by_scheme = {row["scheme"]: row for row in rows()}
  assert step_time.busy(by_scheme) == ""
  busy = rows(load=4.0)
  assert "load 4.0" in step_time.busy({row["scheme"]: row for row in busy})
  text = results.markdown(busy)
  assert "not measured" in text and "1.10x" not in text
  # Rounds vary by more than the largest ratio differs from 1.
  noisy = {
    s: row | {"step_time_ratio_max": "2.3"} for s, row in by_scheme.items()
  }
  assert "rounds vary" in step_time.busy(noisy)


def test_a_panel_says_what_it_shows():
  weights = make_look("full_attnres").depth_weights
  text = report.what(weights, "attention")
  assert "is 1.5 times uniform: attention of transformer block 2 reads" in text
  assert "is 0.5 times uniform: embedding in block 2" in text


def test_page_is_one_well_formed_file_that_loads_nothing():
  runs = all_runs() + shorter_runs()
  page = report.render(
    config=run_lib.demo_config("prenorm", 0, steps=10),
    runs=runs,
    looks=[make_look(run.scheme) for run in runs],
    rows=rows(runs),
    facts=FACTS,
  )
  checker = _Checker()
  checker.feed(page)
  assert not checker.open_tags
  assert checker.count["svg"] == 8
  assert "PreNorm needs <b>" in page and "100000" not in page
  assert checker.count["tbody"] == 1
  assert not checker.loads
  assert len(checker.ids) == len(set(checker.ids)) > 0
  assert "&lt;b&gt;full_attnres&lt;/b&gt;" in page
  assert "an abacus &lt;fast&gt;" in page
  assert not re.search(r"\$\{?[a-z]", page), "an unfilled placeholder"


def test_inspection_survives_its_file(tmp_path, monkeypatch):
  for scheme in ("block_attnres", "prenorm"):
    folder = tmp_path / scheme
    folder.mkdir()
    made = make_look(scheme)
    monkeypatch.setattr(
      inspection, "inspect_run", lambda *_, made=made, **__: made
    )
    inspection.inspect_once(folder, "def ")
    monkeypatch.setattr(inspection, "inspect_run", None)
    read = inspection.inspect_once(folder, "def ")
    assert read.sample == made.sample
    np.testing.assert_array_equal(
      read.magnitudes.grad_norm, made.magnitudes.grad_norm
    )
    if made.depth_weights is None:
      assert read.depth_weights is None
    else:
      np.testing.assert_array_equal(
        read.depth_weights.mlp, made.depth_weights.mlp
      )
      assert read.depth_weights.columns == made.depth_weights.columns


def test_schemes_of_a_seed_differ_in_the_residual_only():
  def flat(scheme, seed):
    return config_lib.to_dict(run_lib.demo_config(scheme, seed, steps=10))

  for scheme in run_lib.SCHEMES[1:]:
    changed = config_lib.differences(flat("prenorm", 0), flat(scheme, 0))
    assert set(changed) == {"name", "model.residual.name"}
  changed = config_lib.differences(flat("prenorm", 0), flat("prenorm", 1))
  assert set(changed) == {"name", "seed", "data.seed"}


class _Checker(html.parser.HTMLParser):
  """Collects what a browser would trip over or fetch."""

  VOID = {"meta", "br", "link", "img", "input", "hr"}

  def __init__(self):
    super().__init__()
    self.open_tags, self.count, self.ids, self.loads = [], {}, [], []

  def handle_starttag(self, tag, attrs):
    self._seen(tag, attrs)
    if tag not in self.VOID:
      self.open_tags.append(tag)

  def handle_startendtag(self, tag, attrs):
    self._seen(tag, attrs)

  def handle_endtag(self, tag):
    # HTML lets these close by themselves; the page does not use that.
    assert self.open_tags.pop() == tag

  def _seen(self, tag, attrs):
    self.count[tag] = self.count.get(tag, 0) + 1
    for name, value in attrs:
      if name == "id":
        self.ids.append(value)
      outside = value and not value.startswith(("#", "data:"))
      if name in ("src", "xlink:href", "data") and outside:
        self.loads.append(value)
      if name == "href" and tag in ("link", "use", "image") and outside:
        self.loads.append(value)

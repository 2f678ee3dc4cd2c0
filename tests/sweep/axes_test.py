# SPDX-License-Identifier: Apache-2.0
"""`python -m attnres_jax.sweep`: fields of any config, and one report."""

import pathlib
import types

import pytest

from attnres_jax.common import csv_rows
from attnres_jax.scaling import grid
from attnres_jax.sweep import __main__ as command
from attnres_jax.sweep import cli
from attnres_jax.sweep import launchers
from tests.fuzz import laws
from tests.sweep import tiny_sweep

RATES = "--sweep=optim.peak_lr=1e-3,3e-3"
SCHEMES = "--sweep=model.residual.name=prenorm,block_attnres"


@pytest.fixture
def source(tmp_path):
  """A config, whose own sweep has five seeds."""
  return tiny_sweep.write(tmp_path / "tiny.py", seeds=range(5))


@pytest.fixture
def runs(source):
  def load(*flags):
    arguments = ["--workdir=none", f"--config={source}", *flags]
    parser = cli.make_parser(command.EXPERIMENT)
    return cli.load_runs(parser.parse_args(arguments))

  return load


def test_every_combination_in_pairs(runs):
  fields = [
    (
      run.config["optim"]["peak_lr"],
      run.config["model"]["residual"]["name"],
      run.config["seed"],
      run.config["data"]["seed"],
    )
    for run in runs(RATES, SCHEMES, "--seeds=2")
  ]
  assert fields == [
    (rate, scheme, seed, seed)
    for seed in (0, 1)
    for rate in (1e-3, 3e-3)
    for scheme in ("prenorm", "block_attnres")
  ]


def test_arguments_of_the_file_tuples_and_its_own_sweep(runs):
  assert [r.config["model"]["width"] for r in runs("--sweep=width=16,32")] == [
    16, 32,
  ]  # fmt: skip
  mixers = runs(
    "--sweep=model.mixers=('kda',), ('kda', 'attention')",
    "--config.model.num_layers=2",
  )
  assert [list(run.config["model"]["mixers"]) for run in mixers] == [
    ["kda"], ["kda", "attention"],
  ]  # fmt: skip
  assert [run.config["seed"] for run in runs()] == [*range(5)]


@pytest.mark.parametrize(
  "flags,error",
  [
    (["--sweep=optim.peak_lr"], "--sweep: got 'optim.peak_lr', expected NAME="),
    (["--sweep=optim.peak_lr="], "config.optim.peak_lr: got '', expected"),
    ([RATES, RATES], "NAME once"),
    (["--sweep=seed=0,1", "--seeds=2"], "no seeds beside --seeds"),
    (["--seeds=0"], "--seeds: got 0, expected a number above 0"),
    (["--sweep=optim.peak_lr=1e-3,fast"], "config.optim.peak_lr: got 'fast'"),
    (["--sweep=peak_lr=1"], "(did you mean config.optim.peak_lr?)"),
    (["--sweep=optim.peak_lr=1e-3,0.001"], "expected another config"),
    (["--sweep=optim.muon_momentum=0.9,0.8"], "config.optim.muon_momentum: "),
    (
      ["--sweep=model.residual.name=prenorm,block"],
      "got 'block', expected one",
    ),
    ([RATES, "--config.optim.peak_lr=1"], "a field that the sweep does not"),
  ],
)
def test_bad_axes_get_one_line(source, tmp_path, flags, error):
  folder = tmp_path / "sweep"
  flags = [f"--config={source}", f"--workdir={folder}", *flags]
  status, _, err = laws.outcome(command.main, flags)
  assert status == 2 and error in err
  assert not folder.exists()


def test_a_report_compares_schemes_at_their_rates(
  source, tmp_path, capsys, monkeypatch
):
  """Means, pairs and best rates against those computed by hand."""

  def start(runs, folder, settings):
    for run in runs:
      rate = run.config["optim"]["peak_lr"]
      block = run.config["model"]["residual"]["name"] == "block_attnres"
      # PreNorm is best at the lower rate, Block at the higher one.
      loss = 2.5 + 20 * rate - 50 * rate * block + 0.01 * run.config["seed"]
      tiny_sweep.leave(pathlib.Path(folder), run, loss=loss)
    return 0

  plan = lambda *_: launchers.Launch()
  launcher = types.SimpleNamespace(start=start, plan=plan, SETTINGS={})
  monkeypatch.setattr(launchers, "load", lambda *_: launcher)
  folder = tmp_path / "sweep"
  config = [f"--config={source}", f"--workdir={folder}"]
  flags = [*config, RATES, SCHEMES, "--seeds=2"]
  assert command.main(flags) == 0
  page = (folder / "report.html").read_text()
  # 2.5 + 0.02 + 0.005, and 2.5 + 0.06 - 0.15 + 0.005: their difference.
  assert "2.5250 at 0.001" in page
  gap = "\N{MINUS SIGN}0.1100 \N{PLUS-MINUS SIGN} 0.0000"
  assert f"2.4150 at 0.003<small>({gap})</small>" in page
  assert command.main(["collect", *flags]) == 0
  rows = csv_rows.read(folder / cli.ROWS)
  assert len(rows) == len(grid.load(source)) + 3
  # The same sweep can grow, and only by its own flags is it asked about.
  assert command.main([*flags[:-1], "--seeds=3"]) == 0
  capsys.readouterr()
  assert command.main(["status", *flags]) == 2
  assert "--seeds=3, which made" in capsys.readouterr().err

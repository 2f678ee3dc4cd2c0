# SPDX-License-Identifier: Apache-2.0
"""Documents agree with committed rows, and one command fills them."""

import dataclasses
import pathlib
import shutil

import pytest

from attnres_jax.common import csv_rows
from attnres_jax.scaling import grid
from attnres_jax.sweep import folder as folder_lib
from experiments import publish
from experiments.pages import readme as readme_lib
from experiments.scaling_law import report
from tests import tiny_run
from tests.sweep import tiny_sweep

ROOT = pathlib.Path(__file__).parents[2]
NAMES = sorted(p.parent.name for p in ROOT.glob("experiments/*/report.py"))


@pytest.mark.parametrize("name", NAMES)
def test_documents_show_the_committed_rows(name):
  published = readme_lib.load(name)
  # Versions of matplotlib draw differently.
  parts = [p for p in published.parts if not p.document.endswith(".svg")]
  filled = dataclasses.replace(published, parts=parts).filled()
  command = f"python -m experiments.publish {name}"
  for part in parts:
    path = published.folder / part.document
    text = path.read_text(encoding="utf-8")
    assert f"<!-- {part.name}: {command} -->" in text
    assert filled[path] == text, f"run `{command}`"


def _in_copy(name, root, monkeypatch):
  """What an experiment publishes, in a copy of its folder."""
  folder = root / "experiments" / name
  shutil.copytree(ROOT / "experiments" / name, folder)
  # It fills tables of these pages, too.
  for file in ("docs/launch.md", "docs/plan.md", "configs/plans.csv"):
    (root / file).parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / file, root / file)
  published = readme_lib.load(name)
  published = dataclasses.replace(published, file=folder / "report.py")
  monkeypatch.setattr(readme_lib, "load", lambda name: published)
  return published, folder


@pytest.mark.more
def test_rows_are_adopted_once_a_sweep_is_done(tmp_path, monkeypatch, capsys):
  sweep = tmp_path / "sweep"
  published, experiment = _in_copy("scaling_law", tmp_path, monkeypatch)
  shutil.rmtree(experiment)
  experiment.mkdir()
  readme = experiment / "README.md"
  readme.write_text(
    "above\n<!-- results: how -->\nold\n<!-- /results -->\nbelow\n"
    "<!-- learning_rates: how -->\nkept\n<!-- /learning_rates -->\n"
  )
  runs = grid.select(grid.load("configs/scaling.py"), "^(xs|s)-.*seed0")
  runs = folder_lib.prepare(sweep, runs, "configs/scaling.py")
  for run in runs[:-1]:
    tiny_sweep.leave(sweep, run)
  adopt = ["scaling_law", f"--adopt={sweep}"]
  assert publish.main(adopt) == 2
  done, all_runs = len(runs) - 1, len(runs)
  assert f"{done} of {all_runs} runs are done" in capsys.readouterr().err
  assert publish.main([*adopt, "--to=nothing"]) == 2
  tiny_sweep.leave(sweep, runs[-1])
  assert publish.main(adopt) == 0
  text = readme.read_text()
  assert text.startswith("above\n") and "below\n" in text
  assert "old" not in text and "\nkept\n" in text
  assert report.results(published.read()) in text
  figure = (experiment / "laws.svg").read_text()
  assert figure.startswith("<?xml")
  # Again, from the file: nothing changes.
  (experiment / "results.csv").rename(tmp_path / "rows.csv")
  assert publish.main(["x", f"--adopt={tmp_path / 'rows.csv'}"]) == 0
  assert readme.read_text() == text
  assert (experiment / "laws.svg").read_text() == figure
  readme.write_text("no place")
  with pytest.raises(ValueError, match="no `<!-- results"):
    published.filled()


def test_rows_of_other_runs_stay_if_asked(tmp_path, monkeypatch):
  (tmp_path / "README.md").write_text("<!-- results: x -->\n<!-- /results -->")
  part = readme_lib.Part(lambda rows: "+".join(row["run"] for row in rows))
  published = readme_lib.Published(tmp_path / "report.py", [part])
  monkeypatch.setattr(readme_lib, "load", lambda name: published)

  def adopt(*runs, add, data=""):
    rows = [{"run": run, "data": data} for run in runs]
    csv_rows.write(tmp_path / "new.csv", rows)
    adopted = f"--adopt={tmp_path / 'new.csv'}"
    assert publish.main(["x", adopted, *["--add"] * add]) == 0
    return (tmp_path / "README.md").read_text().split("\n")[2]

  assert adopt("a", "b", add=True) == "a+b"
  assert adopt("b", "c", add=True) == "a+b+c"
  # Of two texts, a variant would have two rows of a seed.
  assert adopt("d", add=True, data="other") == "d"
  assert adopt("c", add=False) == "c"


@pytest.mark.parametrize("name", ["nothing", "cost/x", "..", "pages"])
def test_what_publishes_nothing(name, capsys):
  assert publish.main([name]) == 2
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 1 and f"experiment: got {name!r}" in lines[0]


@pytest.mark.parametrize("name", ["scaling_law", "ablations"])
@pytest.mark.parametrize(
  "content",
  ["", "run,loss\n", "run,loss\na,1\n", None],
  ids=["empty", "no rows", "other columns", "other losses"],
)
def test_refused_rows_change_nothing(
  name, content, tmp_path, monkeypatch, capsys
):
  published, _ = _in_copy(name, tmp_path, monkeypatch)
  if content is None:
    rows = published.read()
    content = csv_rows.text([dict(rows[0], validation_loss="nan"), *rows[1:]])
  new = tmp_path / "new.csv"
  new.write_text(content)
  before = tiny_run.contents(tmp_path)
  assert publish.main([name, f"--adopt={new}"]) == 2
  line = capsys.readouterr().err
  assert (
    line.startswith(f"error: --adopt: got '{new}'") and line.count("\n") == 1
  )
  assert tiny_run.contents(tmp_path) == before

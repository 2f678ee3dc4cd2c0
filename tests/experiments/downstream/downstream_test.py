# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of Table 3: their table and their tasks."""

import json

import pytest

from attnres_jax import config as config_lib
from experiments.downstream import benchmarks
from experiments.downstream import local_tasks
from experiments.downstream import run


def test_published_scores_are_those_of_the_paper():
  """Section 5.2: gains by up to 7.5, and one tie."""
  rows = benchmarks.BENCHMARKS
  gains = {one.name: one.attnres - one.prenorm for one in rows}
  assert len(gains) == 15
  assert max(gains, key=gains.get) == "GPQA-Diamond"
  assert gains["GPQA-Diamond"] == pytest.approx(7.5)
  assert [name for name, gain in gains.items() if gain <= 0] == ["MMLU-Pro"]


def _scores(folder, name, results, groups=None):
  one = next(b for b in benchmarks.BENCHMARKS if b.name == name)
  found = {
    "results": results,
    "groups": groups or {},
    "n-samples": {task: {"effective": 7} for task in results},
    "run": {"name": "lm", "step": 5},
  }
  folder.mkdir(exist_ok=True)
  run.file_of(folder, one).write_text(json.dumps(found))


def test_the_table_has_scores_of_tasks_groups_and_parts(tmp_path):
  folder = tmp_path / "mine"
  arc = {"acc_norm,none": 0.25, "acc_norm_stderr,none": 0.011}
  _scores(folder, "ARC-C", {"arc_challenge": arc})
  _scores(
    folder, "MMLU", {"mmlu_a": {"acc,none": 0.1}}, {"mmlu": {"acc,none": 0.3}}
  )
  parts = {
    f"mgsm_{i}": {"exact_match,flexible-extract": i / 10} for i in (1, 2)
  }
  _scores(folder, "MGSM", parts)
  lines = run.table([str(folder)]).splitlines()
  row = {line.split(" | ")[0].strip("| "): line for line in lines}
  assert row["ARC-C"].endswith("| 64.6 | 65.7 | 25.0 ± 1.8 | 7 |")
  assert row["MMLU"].endswith("| 73.5 | 74.6 | 30.0 | 7 |")
  assert row["MGSM"].endswith("| 64.9 | 66.1 | 15.0 | 14 |")
  assert row["GSM8K"].endswith("| - | not run |")
  _scores(folder, "GSM8K", {"gsm8k": {"acc,none": 1.0}})
  with pytest.raises(config_lib.ConfigError, match="gsm8k.json: got 'exact_m"):
    run.table([str(folder)])


def test_a_finished_benchmark_says_of_which_network(tmp_path, capsys):
  _scores(tmp_path, "MMLU", {"mmlu": {"acc,none": 0.3}})
  flags = [f"--workdir={tmp_path}", f"--out={tmp_path}", "--only=MMLU"]
  assert run.main(flags) == 0
  assert "MMLU: done (lm, step 5)" in capsys.readouterr().out


def test_unknown_benchmarks_are_refused(tmp_path, capsys):
  flags = [f"--workdir={tmp_path}", f"--out={tmp_path}"]
  assert run.main([*flags, "--only=MMLU,GSM9K"]) == 2
  assert "did you mean 'GSM8K'" in capsys.readouterr().err


def test_local_questions_have_one_right_answer():
  rows = local_tasks.choices(50)
  assert len(rows) == 50 and len({row["label"] for row in rows}) == 4
  for row in rows:
    assert len(set(row["choices"])) == 4
    assert row["context"].endswith("\n") and len(row["context"]) <= 201
  assert rows == local_tasks.choices(50)
  assert len(local_tasks.pieces(20)) == 20


@pytest.mark.needs("lm_eval")
def test_the_harness_has_all_tasks():
  from attnres_jax.interop import harness

  names = [one.task for one in benchmarks.BENCHMARKS]
  harness.find_tasks(names, str(run.TASKS))

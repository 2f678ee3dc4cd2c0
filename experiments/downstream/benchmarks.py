# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of the paper's Table 3, as tasks of lm_eval 0.4.13.

The paper (arXiv:2603.15031) publishes scores of its 48B network after
mid-training, but neither prompts nor numbers of examples. So tasks, shots and
metrics are our choice: compare differences between two networks, not scores.
"""

from typing import NamedTuple


class Benchmark(NamedTuple):
  """A row of Table 3.

  Attributes:
    name: in the paper.
    prenorm: published score of the baseline, percent.
    attnres: published score with Attention Residuals, percent.
    task: of the harness; ours are in `tasks/`.
    metric: of the task, `metric` or `metric/filter`.
    shots: examples in a context; None for as many as the task has.
    runs_code: whether answers are executed.
  """

  name: str
  prenorm: float
  attnres: float
  task: str
  metric: str
  shots: int | None
  runs_code: bool = False


BENCHMARKS = (
  Benchmark("MMLU", 73.5, 74.6, "mmlu", "acc", 5),
  Benchmark(
    "MMLU-Pro", 52.2, 52.2, "mmlu_pro", "exact_match/custom-extract", 5
  ),
  Benchmark(
    "GPQA-Diamond",
    36.9,
    44.4,
    "gpqa_diamond_cot_n_shot",
    "exact_match/flexible-extract",
    5,
  ),
  Benchmark(
    "BBH", 76.3, 78.0, "bbh_cot_fewshot", "exact_match/get-answer", None
  ),
  Benchmark("ARC-C", 64.6, 65.7, "arc_challenge", "acc_norm", 25),
  Benchmark("HellaSwag", 83.2, 83.4, "hellaswag", "acc_norm", 10),
  Benchmark(
    "TriviaQA", 69.9, 71.8, "triviaqa", "exact_match/remove_whitespace", 5
  ),
  Benchmark("GSM8K", 81.7, 82.4, "gsm8k", "exact_match/flexible-extract", 5),
  Benchmark(
    "MGSM", 64.9, 66.1, "mgsm_cot_native", "exact_match/flexible-extract", None
  ),
  Benchmark("Math", 53.5, 57.1, "minerva_math", "math_verify", 4),
  Benchmark("CMath", 84.7, 85.1, "cmath_4_shot", "exact_match", 4),
  Benchmark(
    "HumanEval", 59.1, 62.2, "humaneval", "pass@1/create_test", 0, True
  ),
  Benchmark("MBPP", 72.0, 73.9, "mbpp", "pass_at_1", 3, True),
  Benchmark("CMMLU", 82.0, 82.9, "cmmlu", "acc", 5),
  Benchmark("C-Eval", 79.6, 82.5, "ceval-valid", "acc", 5),
)

# SPDX-License-Identifier: Apache-2.0
"""Verdicts on planted rows, and what the claims are about."""

import re

import pytest

from attnres_kernels.depth_attention import shapes
from attnres_kernels.kda import shapes as kda_shapes
from experiments.first_hour import checks
from experiments.first_hour import claims
from experiments.first_hour import operators
from experiments.first_hour import rows as rows_lib
from experiments.first_hour import steps
from tests import tiny_run

KEYS = (
  ("steps", "step", "small", "block"),
  ("steps", "step", "large", "block"),
)
CLAIM = claims.Claim(
  "at most 1.1", "README.md", ("v5p",), lambda chip: KEYS, most=1.1
)


def row(case, value, **options):
  made = rows_lib.make("step", case, "block", measured=value, **options)
  return made | {"part": "steps"}


def decide(claim, rows, kind="TPU v5"):
  found = claims.decide(claim, rows, "tpu", kind)
  return found.outcome, found.numbers


def test_a_claim_holds_with_all_rows():
  outcome, numbers = decide(CLAIM, [row("small", 1.02), row("large", 1.1)])
  assert outcome == claims.HOLDS
  assert numbers == "worst of 2: 1.1 at step large block"


@pytest.mark.parametrize("other", ([], [row("small", 1.0)]))
def test_one_row_beyond_decides(other):
  outcome, numbers = decide(CLAIM, [*other, row("large", 1.2)])
  assert outcome == claims.FAILS and "1.2 at step large" in numbers


def test_least_values():
  claim = claims.Claim(
    "", "", (), lambda chip: KEYS[:1], column="to_estimate", least=0.9
  )
  low = row("small", 0.8, estimate=1.0)
  assert decide(claim, [low]) == (claims.FAILS, "0.8 at step small block")
  assert decide(claim, [row("small", 2.0, estimate=1.0)])[0] == claims.HOLDS
  # Without an estimate there is nothing to compare.
  assert decide(claim, [row("small", 2.0)])[0] == claims.OPEN


@pytest.mark.parametrize(
  "rows,kind,platform,words",
  (
    ([row("small", 1.0)], "TPU v5", "tpu", "1 within; no row: step large"),
    ([], "TPU v5", "tpu", "no row: step small block"),
    ([row("small", 9.0)], "TPU v5 lite", "tpu", "needs v5p"),
    ([row("small", 9.0)], "NVIDIA H100", "gpu", "needs v5p"),
    ([row("small", 9.0)], "cpu", "cpu", "decides nothing"),
  ),
)
def test_undecided(rows, kind, platform, words):
  found = claims.decide(CLAIM, rows, platform, kind)
  assert found.outcome == claims.OPEN and words in found.numbers


def test_an_error_counts_only_where_it_is_evidence():
  rows = [row("small", 1.0), row("large", None, status=rows_lib.FAILED)]
  assert decide(CLAIM, rows)[0] == claims.OPEN
  claim = claims.Claim(
    "", "", (), lambda chip: KEYS, most=1.1, errors_count=True
  )
  outcome, numbers = decide(claim, rows)
  assert outcome == claims.FAILS and "an error: step large" in numbers
  # What was skipped is no evidence.
  rows[1]["status"] = rows_lib.SKIPPED
  assert decide(claim, rows)[0] == claims.OPEN


def test_no_claim_is_decided_without_rows():
  for platform, kind in (("tpu", "TPU v5 lite"), ("gpu", "H100"), ("cpu", "")):
    found = claims.verdicts([], platform, kind)
    assert len(found) == len(claims.CLAIMS) > 15
    assert {one.outcome for one in found} == {claims.OPEN}


def test_rows_of_the_hour_decide_the_claims_of_a_chip():
  """Rows at their estimates, for all that the hour measures on a TPU v6e."""
  kind = "TPU v6 lite"
  rows = []
  for op, problem in checks.OPS.items():
    for dtype in checks.DTYPES:
      for arm in problem.implementations:
        made = rows_lib.make(op, dtype, arm, measured=1e-6, limit=1e-5)
        rows.append(made | {"part": checks.PART})
  for op, shape in operators.cases():
    us = operators.estimate_us(op, shape, kind)
    made = rows_lib.make(
      op, str(shape), "pallas_tpu", measured=us, limit=us, estimate=us
    )
    rows.append(made | {"part": operators.PART})
  for sizes, arms, _ in steps.CASES:
    for arm in arms:
      ratio = steps.estimate(sizes, arm, "v6e", "estimate_ratio") or 1.0
      made = rows_lib.make(
        "step over PreNorm", steps.case_of(sizes), arm, measured=ratio
      )
      rows.append(made | {"part": steps.PART})
  for name in ("step time", "peak memory"):
    for scheme in ("block_attnres", "prenorm"):
      made = rows_lib.make(name, "", scheme, measured=1.0, estimate=1.0)
      rows.append(made | {"part": "training"})
  found = claims.verdicts(rows, "tpu", kind)
  own = [one for one in found if one.outcome == claims.HOLDS]
  left = [one for one in found if one.outcome != claims.HOLDS]
  assert len(own) >= 10
  for one in left:
    assert (
      one.claim.never or "v6e" not in one.claim.chips or not (one.claim.chips)
    )
  # One wrong kernel, and its claim does not hold.
  wrong = [
    row | {"to_limit": "3.0"} if row["name"] == "kda" else row for row in rows
  ]
  before, after = (
    claims.counts(found),
    claims.counts(claims.verdicts(wrong, "tpu", kind)),
  )
  assert before[claims.FAILS] == 0 and after[claims.FAILS] >= 1


def test_every_kernel_has_a_check():
  root = tiny_run.ROOT / "kernels" / "attnres_kernels"
  for platform in ("tpu", "gpu"):
    with_kernels = {
      path.parent.name for path in root.glob(f"*/pallas_{platform}.py")
    }
    checked = {
      name.partition(",")[0]
      for name, op in checks.OPS.items()
      if f"pallas_{platform}" in op.implementations
    }
    assert checked == with_kernels


def test_the_static_tables_are_measured():
  measured = {(op, str(shape)) for op, shape in operators.cases()}
  assert {("depth_attention forward", str(s)) for s in shapes.TABLE} <= measured
  # The table of KDA has the chips that its last version was compiled for.
  others = "depth", "stream_mix"
  listed = [pair for pair in operators.cases() if pair[0].startswith(others)]
  assert operators.estimated_ratio("kda forward", kda_shapes.KIMI_48B, "v5p")
  for op, shape in listed:
    for kind in ("TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"):
      estimate = operators.estimate_us(op, shape, kind)
      assert estimate and estimate > 0
    assert operators.estimate_us(op, shape, "NVIDIA H100") is None


def test_claims_stand_in_their_documents():
  for claim in claims.CLAIMS:
    text = " ".join((tiny_run.ROOT / claim.document).read_text().split())
    words = r"at least [\d.]+ s|[\d.]+ s for \d+M|\d+ % of peak"
    for found in re.findall(words, claim.text):
      assert found in text
    for number in re.findall(r"an estimated ([\d.]+)", claim.text):
      assert f"{float(number):.2f}" in text or number in text

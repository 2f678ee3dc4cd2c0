# SPDX-License-Identifier: Apache-2.0
"""What the documents say of accelerators, and what the rows say about it.

A claim names the rows that decide it. It holds if all of them are there and
none is beyond the threshold, and does not hold as soon as one is. Otherwise it
is not decided: rows are missing, it is about another chip, or this hour cannot
measure it. Numbers of the claims stand here once, with their documents; a test
keeps them in agreement with those.

Thresholds. A compiler's estimate of a ratio holds up to 0.02. A kernel that is
bound by memory may take 1.25 times as long as its bytes at the published rate,
which copies do not reach either. A prediction holds within a quarter for times,
where it is an estimate, and within a tenth for memory.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses

from attnres_kernels.kda import shapes as kda_shapes
from experiments.first_hour import checks
from experiments.first_hour import operators
from experiments.first_hour import rows as rows_lib
from experiments.first_hour import steps
from experiments.first_hour import training

HOLDS, FAILS, OPEN = "holds", "does not hold", "not decided"
_RATIO, _TIME, _MEMORY, _BOUND = 0.02, 1.25, 1.1, 0.98
_README, _KERNELS = "README.md", "kernels/benchmarks/results/README.md"
_PODS, _INFERENCE = "docs/pods.md", "docs/inference.md"

Key = tuple[str, str, str, str]
# Chip -> keys.
Needs = Callable[[str], Sequence[Key]]


@dataclasses.dataclass(frozen=True)
class Claim:
  """One sentence of the documents.

  Attributes:
    text: of the claim, with its number.
    document: where it stands.
    chips: that it is about, by their names in the static tables, or "gpu"; all
      accelerators if empty.
    needs: for a chip, (part, name, case, arm) of the rows that decide it; an
      empty case or arm for any.
    column: of these rows that is compared.
    most: the largest value with which it holds.
    least: the smallest one.
    never: why this hour cannot decide it.
    errors_count: whether a row that failed, such as one that does not compile,
      is evidence against it.
  """

  text: str
  document: str
  chips: tuple[str, ...] = ()
  needs: Needs = lambda chip: ()
  column: str = "measured"
  most: float | None = None
  least: float | None = None
  never: str = ""
  errors_count: bool = False


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What the rows say about a claim.

  Attributes:
    claim: which.
    outcome: HOLDS, FAILS or OPEN.
    numbers: the evidence, or what is missing.
  """

  claim: Claim
  outcome: str
  numbers: str


def verdicts(
  rows: Sequence[rows_lib.Row], platform: str, kind: str
) -> list[Verdict]:
  """A verdict per claim.

  Args:
    rows: of the hour.
    platform: "tpu", "gpu" or "cpu".
    kind: of the device.
  """
  return [decide(claim, rows, platform, kind) for claim in CLAIMS]


def decide(
  claim: Claim, rows: Sequence[rows_lib.Row], platform: str, kind: str
) -> Verdict:
  """The verdict on one claim; see `verdicts`."""
  chip = platform if platform != "tpu" else operators.CHIPS.get(kind, ("",))[0]
  if claim.never:
    return Verdict(claim, OPEN, claim.never)
  if platform == "cpu":
    return Verdict(claim, OPEN, "a CPU decides nothing about accelerators")
  if claim.chips and chip not in claim.chips:
    return Verdict(claim, OPEN, f"needs {' or '.join(claim.chips)}")
  values, missing, errors = [], [], []
  needs = claim.needs(chip)
  if not needs:
    return Verdict(claim, OPEN, f"there is no estimate for {chip or kind}")
  for key in needs:
    found = [row for row in rows if _matches(row, key)]
    here = [row for row in found if row["status"] == rows_lib.OK]
    cells = [rows_lib.number(row, claim.column) for row in here]
    own = [(value, key) for value in cells if value is not None]
    values += own
    if not own:
      failed = [row for row in found if row["status"] == rows_lib.FAILED]
      text = " ".join(part for part in key[1:] if part)
      (errors if failed else missing).append(text)
  beyond = [pair for pair in values if not _within(claim, pair[0])]
  if beyond:
    return Verdict(claim, FAILS, _worst(claim, beyond, len(values)))
  if errors and claim.errors_count:
    return Verdict(claim, FAILS, f"an error: {_some(errors)}")
  if errors or missing:
    found = f"{len(values)} within; " if values else ""
    return Verdict(claim, OPEN, f"{found}no row: {_some(errors + missing)}")
  return Verdict(claim, HOLDS, _worst(claim, values, len(values)))


def _matches(row: rows_lib.Row, key: Key) -> bool:
  part, name, case, arm = key
  return (
    (row["part"], row["name"]) == (part, name)
    and case in ("", row["case"])
    and arm in ("", row["arm"])
  )


def _within(claim: Claim, value: float) -> bool:
  above = claim.least is None or value >= claim.least
  return above and (claim.most is None or value <= claim.most)


def _worst(claim: Claim, values: Sequence[tuple[float, Key]], of: int) -> str:
  """The value nearest to the threshold, or farthest beyond it."""
  pick: Callable[..., tuple[float, Key]] = max
  if claim.most is None:
    pick = min
  value, key = pick(values, key=lambda pair: pair[0])
  where = " ".join(part for part in key[1:] if part)
  text = f"{value:.3g} at {where}"
  return f"worst of {of}: {text}" if of > 1 else text


def _some(names: Sequence[str], most: int = 2) -> str:
  names = list(dict.fromkeys(names))
  more = f" and {len(names) - most} more" if len(names) > most else ""
  return "; ".join(names[:most]) + more


def threshold(claim: Claim) -> str:
  """The threshold as text."""
  if claim.errors_count:
    return "within the tolerance"
  column = claim.column.replace("_", " ")
  words = {
    "to limit": "of the limit", "to estimate": "of the estimate",
    "measured": "",
  }[column]  # fmt: skip
  parts = []
  if claim.least is not None:
    parts.append(f"at least {claim.least:g}")
  if claim.most is not None:
    parts.append(f"at most {claim.most:g}")
  return f"{' and '.join(parts)} {words}".strip()


def _checks(implementation: str, ops: Sequence[str]) -> Needs:
  keys = tuple(
    (checks.PART, op, dtype, implementation)
    for op in ops
    if implementation in checks.OPS[op].implementations
    for dtype in checks.DTYPES
  )
  return lambda chip: keys


def _estimated(*ops: str, most: float | None = None) -> Needs:
  """Shapes with an estimate, of at most so many times their memory time."""

  def needs(chip: str) -> list[Key]:
    keys = []
    for op, shape in operators.cases():
      ratio = operators.estimated_ratio(op, shape, chip)
      if op in ops and ratio is not None and (most is None or ratio <= most):
        keys.append((operators.PART, op, str(shape), "pallas_tpu"))
    return keys

  return needs


def _step(index: int, chip: str, words: str, document: str) -> Claim:
  """Block over PreNorm at a size of `steps.CASES`, as compiled for a chip."""
  sizes = steps.CASES[index][0]
  arm = "block, kernels"
  estimate = steps.estimate(sizes, arm, chip, "estimate_ratio")
  if estimate is None:
    raise ValueError(f"no estimate of {steps.case_of(sizes)} for {chip}")
  key = (steps.PART, "step over PreNorm", steps.case_of(sizes), arm)
  return Claim(
    f"{words} with Block AttnRes takes an estimated {estimate:.3f} times"
    f" PreNorm ({chip})",
    document,
    (chip,),
    lambda chip: (key,),
    most=round(estimate + _RATIO, 3),
  )


def _in_training(name: str) -> Needs:
  keys = tuple((training.PART, name, "", scheme) for scheme in training.SCHEMES)
  return lambda chip: keys


_DEPTH = tuple(op for op in checks.OPS if op.startswith("depth"))
_OF_GPUS = [
  name
  for name, op in checks.OPS.items()
  if "pallas_gpu" in op.implementations and not name.endswith(("heads", "rank"))
]
_TPUS = tuple(chip for chip, _ in operators.CHIPS.values())
_FORWARD = "depth_attention forward", "depth_merge_norm forward"
_BACKWARD = "depth_attention backward", "depth_merge_norm backward"
_KDA_RATIO = operators.estimated_ratio(
  "kda forward", kda_shapes.KIMI_48B, "v5p"
)
_CHECKED = dict(column="to_limit", most=1.0, errors_count=True)

CLAIMS = (
  Claim(
    "The TPU kernels of depth attention compute what the reference does",
    _KERNELS,
    _TPUS,
    _checks("pallas_tpu", _DEPTH),
    **_CHECKED,
  ),
  Claim(
    "The TPU kernels of KDA, its convolution and the norm do, too",
    _KERNELS,
    _TPUS,
    _checks("pallas_tpu", ("kda", "kda, arguments", "short_conv", "rms_norm")),
    **_CHECKED,
  ),
  Claim(
    "The TPU kernels of several streams do, too",
    _KERNELS,
    _TPUS,
    _checks("pallas_tpu", ("stream_mix", "sinkhorn")),
    **_CHECKED,
  ),
  Claim(
    "The GPU kernels of depth attention compute what the reference does",
    _KERNELS,
    ("gpu",),
    _checks("pallas_gpu", _OF_GPUS),
    **_CHECKED,
  ),
  *(
    _step(index, chip, words, document)
    for index, words, document in (
      (1, "A training step (d=2048, 32 sublayers)", _README),
      (0, "A training step (d=1024, 24 sublayers)", _KERNELS),
      (3, "A stack of 32 identity sublayers", _KERNELS),
    )
    for chip in ("v5p", "v6e")
  ),
  Claim(
    "Depth kernels are bound by memory, forward, at the shapes whose schedule"
    f" is no longer than their memory time (at most {_TIME:g} times it)",
    _KERNELS,
    _TPUS,
    _estimated(*_FORWARD, most=1.0),
    "to_limit",
    most=_TIME,
  ),
  Claim(
    "Backward, at those with a schedule of at most 1.15 times",
    _KERNELS,
    _TPUS,
    _estimated(*_BACKWARD, most=1.15),
    "to_limit",
    most=round(1.15 * _TIME, 2),
  ),
  Claim(
    "Depth kernels take as long as their schedules say, at every shape",
    _KERNELS,
    _TPUS,
    _estimated(*_FORWARD, *_BACKWARD),
    "to_estimate",
    most=_TIME,
  ),
  Claim(
    "KDA takes as long as its schedules say,"
    f" {_KDA_RATIO:.1f} times its memory time forward (v5p, 48B)",
    _KERNELS,
    _TPUS,
    _estimated("kda forward", "kda backward"),
    "to_estimate",
    most=_TIME,
  ),
  Claim(
    "Mixing several streams takes as long as its schedules say",
    _KERNELS,
    _TPUS,
    _estimated("stream_mix forward", "stream_mix backward"),
    "to_estimate",
    most=_TIME,
  ),
  Claim(
    "A planned step takes at least as long as its plan says",
    _PODS,
    _TPUS,
    _in_training("step time"),
    "to_estimate",
    least=_BOUND,
  ),
  Claim(
    "A plan's times are near enough to compare plans: within a quarter",
    _PODS,
    _TPUS,
    _in_training("step time"),
    "to_estimate",
    most=_TIME,
  ),
  Claim(
    "A step needs the memory that the compiler says, within a tenth",
    _PODS,
    (),
    _in_training("peak memory"),
    "to_estimate",
    most=_MEMORY,
    least=round(1 / _MEMORY, 2),
  ),
  Claim(
    "The 436M network with Block AttnRes: at least 2.9 s per step on 16 chips"
    " of v5p",
    _README,
    never="needs 16 chips of v5p",
  ),
  Claim(
    "A step on 16 chips of v6e: 1.31 s for 194M, 5.9 s for 436M",
    _README,
    never="needs 16 chips of v6e",
  ),
  Claim(
    "The 48B step of `make pod`, 8.4 million tokens on 64 chips of v5p: 8.4 s",
    _README,
    never="needs 64 chips of v5p",
  ),
  Claim(
    "The 48B network, as planned: at least 8.0 s per step on 64 chips of v5p,"
    " 71 % of peak",
    _README,
    never="needs 64 chips of v5p",
  ),
  Claim(
    "Decoding with Block AttnRes takes 0.988 to 1.032 times as long as with"
    " PreNorm, by the estimate",
    _INFERENCE,
    never="not part of this hour: experiments/decode_cost",
  ),
)


def counts(found: Sequence[Verdict]) -> Mapping[str, int]:
  """How many claims hold, do not hold, and are not decided."""
  return {
    outcome: sum(one.outcome == outcome for one in found)
    for outcome in (HOLDS, FAILS, OPEN)
  }

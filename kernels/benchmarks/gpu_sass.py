# SPDX-License-Identifier: Apache-2.0
"""Counts the instructions of a kernel's machine code, per token.

A kernel here is straight code and loops that end in a branch backwards. Loops
that touch global memory run once per full tile of a row, those that do not run
once per source, and a loop around other loops runs once per token. Counts are
per warp; a warpgroup has four. ptxas may unroll a loop over sources, which is
then counted too often: such loops are reported apart (`slots`).
"""

from collections.abc import Mapping, Sequence
import dataclasses
import re

# Of an H100 or H200: an instruction per clock of each of four schedulers, on
# 132 multiprocessors at 1.755 GHz (the boost clock of the SXM form); bytes per
# second of the memory of each.
_ISSUED = 4 * 132 * 1.755e9
_BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}
_WARPS = 4
# Kinds of instructions, by the start of their names; the first that fits.
KINDS = {
  "multiply-add": ("FFMA", "FMUL", "HFMA2"),
  "add": ("FADD", "FMNMX", "FSEL", "FSETP", "MUFU"),
  "convert": ("PRMT", "F2FP", "SHF", "I2F"),
  "matrix unit": ("HGMMA", "WARPGROUP"),
  "bulk copy": ("UTMA", "SYNCS", "DEPBAR"),
  "global memory": ("LD.", "ST.", "LDG", "STG", "LD ", "ST "),
  "address": (
    *("IADD", "IMAD", "LEA", "UIADD", "UIMAD", "ULEA", "ISETP", "R2UR", "UMOV"),
  ),
  "exchange": ("SHFL", "LDS", "LDSM", "STS", "STSM", "BAR", "MEMBAR", "FENCE"),
}
_OTHER = "other"
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)")


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One of the machine code.

  Attributes:
    name: with suffixes.
    target: the label that it branches to.
    share: of the four warps that execute it.
  """

  name: str
  target: str = ""
  share: float = 1.0

  @property
  def kind(self) -> str:
    """A key of `KINDS`, or "other"."""
    for kind, starts in KINDS.items():
      if f"{self.name} ".startswith(starts):
        return kind
    return _OTHER


@dataclasses.dataclass(frozen=True)
class Loop:
  """Instructions from `start` up to and with the branch at `stop`."""

  start: int
  stop: int
  what: str


def parse(text: str) -> tuple[list[Instruction], list[Loop]]:
  """Instructions, and loops from the innermost to the outermost."""
  instructions, labels = list[Instruction](), dict[str, int]()
  for line in text.splitlines():
    if match := re.match(r"\s*(\.L_\w+):", line):
      labels[match[1]] = len(instructions)
    elif match := _LINE.search(line):
      target = re.search(r"`\((\.L_\w+)\)", match[3])
      name = match[2]
      instructions.append(
        Instruction(name, target[1] if target and name == "BRA" else "")
      )
  exits = [i for i, one in enumerate(instructions) if one.name == "EXIT"]
  instructions = instructions[: exits[-1] + 1]
  spans = []
  for stop, one in enumerate(instructions):
    start = labels.get(one.target, stop + 1)
    skipped = range(stop + 1, start)
    names = [one.name for one in instructions[stop + 1 : start]]
    if start < len(instructions) and _starts_copies(names):
      for i in skipped:
        share = 1 / _WARPS
        instructions[i] = dataclasses.replace(instructions[i], share=share)
    if start < stop:  # A branch to itself fills the end of the code.
      spans.append((start, stop))
  spans.sort(key=lambda span: span[1] - span[0])
  loops = []
  for start, stop in spans:
    inside = instructions[start : stop + 1]
    if any(start <= one.start and one.stop <= stop for one in loops):
      what = "tokens"
    elif any(one.kind == "global memory" for one in inside):
      what = "tiles"
    else:
      what = "slots"
    loops.append(Loop(start, stop, what))
  return instructions, loops


def _starts_copies(names: Sequence[str]) -> bool:
  starts = any(name.startswith(("UTMALDG", "UTMASTG")) for name in names)
  return starts and not any(name.startswith("BAR") for name in names)


def per_token(
  text: str, *, tiles: int, sources: int
) -> tuple[dict[str, float], dict[str, float]]:
  """Instructions of a warp and token, by kind and by place.

  Args:
    text: of nvdisasm.
    tiles: full tiles of a row.
    sources: M.
  """
  instructions, loops = parse(text)
  runs = {"tiles": tiles, "slots": sources}
  kinds = dict.fromkeys([*KINDS, _OTHER], 0.0)
  places = {"tiles": 0.0, "slots": 0.0, "straight": 0.0}
  around = [one for one in loops if one.what == "tokens"]
  for at, one in enumerate(instructions):
    if around and not around[-1].start <= at <= around[-1].stop:
      continue  # Once per thread block, which has many tokens.
    inside = [o for o in loops if o.start <= at <= o.stop and o.what in runs]
    place = inside[0].what if inside else "straight"
    count = one.share * (runs[place] if inside else 1)
    kinds[one.kind] += count
    places[place] += count
  return kinds, places


def per_token_of_cluster(
  text: str, *, chunks: int, spans: int, scale: float
) -> tuple[dict[str, float], dict[str, float]]:
  """The same for a kernel on clusters.

  Loops with products run once per chunk, a loop inside of those or without
  products once per span of queries.

  Args:
    text: of nvdisasm.
    chunks: of columns, of a thread block.
    spans: of eight queries.
    scale: thread blocks per token.
  """
  instructions, loops = parse(text)

  def multiplies(loop):
    names = [one.name for one in instructions[loop.start : loop.stop]]
    return any(name.startswith("HGMMA") for name in names)

  products = [loop for loop in loops if multiplies(loop)]
  tokens = products.pop()  # The outermost one.
  kinds = dict.fromkeys([*KINDS, _OTHER], 0.0)
  places = {"tiles": 0.0, "slots": 0.0, "straight": 0.0}
  for at in range(tokens.start, tokens.stop + 1):
    one = instructions[at]
    around = [o for o in products if o.start <= at <= o.stop]
    other = [o for o in loops if o.start <= at <= o.stop]
    inner = len(other) - 1 - bool(around)
    count = scale * one.share * (chunks if around else 1) * spans**inner
    kinds[one.kind] += count
    places["tiles" if around else "slots" if inner else "straight"] += count
  return kinds, places


def columns(
  kinds: Mapping[str, float], places: Mapping[str, float], token_bytes: float
) -> dict[str, str]:
  """Cells of a table: instructions per token, per byte, and what binds."""
  total = _WARPS * sum(kinds.values())
  cells = {
    "warp_instructions": f"{total:.0f}",
    "bytes": f"{token_bytes:.0f}",
    "per_byte": f"{total / token_bytes:.3f}",
  }
  for chip, bandwidth in _BANDWIDTH.items():
    ratio = total / _ISSUED / (token_bytes / bandwidth)
    cells[f"issue_over_memory_{chip}"] = f"{ratio:.2f}"
  shares = {**kinds, **{f"in {k}": v for k, v in places.items()}}
  return cells | {
    name.replace(" ", "_"): f"{_WARPS * value / total:.2f}"
    for name, value in shares.items()
  }


def read_bytes(queries: int, sources: int, width: int, backward: bool) -> float:
  """Of a token in bfloat16: sources, mixtures; backward, gradients of both."""
  slabs: Sequence[int] = (sources, queries, *([sources] * backward))
  return 2.0 * width * sum(slabs)

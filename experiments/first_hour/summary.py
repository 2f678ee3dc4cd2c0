# SPDX-License-Identifier: Apache-2.0
"""The summary of the static tables of the kernels.

One shape per kernel, that of the 48B network where there is one.
"""

from typing import Any, NamedTuple

from attnres_kernels.depth_attention import shapes
from attnres_kernels.kda import shapes as kda_shapes
from attnres_kernels.stream_mix import shapes as stream_shapes
from experiments.first_hour import static_rows
from experiments.first_hour import steps
from experiments.pages import readme

_CHIPS = "v5e", "v5p", "v6e", "tpu7x"

# Columns of a step -> units.
_MEASURES = {"estimate_ms": "ms", "bytes_GB": "GB", "peak_GiB": "GiB"}

Row = static_rows.Row


class Line(NamedTuple):
  """A kernel of the static tables.

  Attributes:
    kernel: as in the tables.
    shape: one of its shapes.
    aim: the largest ratio that it should have, if it has an aim.
    section: of the README, on what was tried.
  """

  kernel: str
  shape: Any
  aim: str
  section: str


_TPU, _KDA, _STREAMS = "tpu-static-roofline", "kda", "several-streams"
_BLOCK, _MERGE, _MIX = (
  shapes.BLOCK_48B[-1],
  shapes.MERGE[1],
  stream_shapes.NAMED[0],
)
_48B = kda_shapes.KIMI_48B
LINES = (
  Line("depth_attention_forward", _BLOCK, "1.00", _TPU),
  Line("depth_attention_backward", _BLOCK, "1.15", _TPU),
  Line("depth_merge_forward", _MERGE, "1.00", _TPU),
  Line("depth_merge_backward", _MERGE, "1.15", _TPU),
  Line("depth_read_forward", shapes.DECODED[-1], "1.00", _TPU),
  Line("kda_forward", _48B, "2.5", _KDA),
  Line("kda_forward_saving", _48B, "2.5", _KDA),
  Line("kda_backward", _48B, "2.5", _KDA),
  Line("short_conv_forward", _48B, "1.00", _KDA),
  Line("short_conv_backward", _48B, "1.15", _KDA),
  Line("stream_mix_forward", _MIX, "1.00", _STREAMS),
  Line("stream_mix_backward", _MIX, "1.15", _STREAMS),
)


def of_kernels(rows: readme.Rows = ()) -> str:
  """Tables for kernels and for whole steps, from their committed rows."""
  del rows  # They are not in the folder of the experiment.
  return "\n\n".join((_of_tpus(), _of_steps()))


def _of_tpus() -> str:
  found = static_rows.by_kernel()
  lines = [
    [
      f"[{line.kernel}](#{line.section}) {line.shape}",
      *(
        _cell(found.get((line.kernel, chip, str(line.shape))))
        for chip in _CHIPS
      ),
      line.aim,
    ]
    for line in LINES
  ]
  return readme.table(("TPU kernel", *_CHIPS, "aim"), lines)


def _cell(row: Row | None) -> str:
  """Schedule over memory time, both in us, and the slot that binds if any."""
  if row is None:
    return "not compiled"
  times = [
    _three_digits(float(row[name])) for name in ("schedule_us", "hbm_us")
  ]
  slot = f" {row['limiting_slot']}" if float(row["ratio"]) > 1 else ""
  return f"{row['ratio']} ({' / '.join(times)}){slot}"


def _three_digits(value: float) -> str:
  return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _of_steps() -> str:
  """Block AttnRes over PreNorm: ratios, and what is added."""
  lines = []
  for sizes, *_ in steps.CASES[:2]:
    for chip in "v5p", "v6e":
      base, block = (
        steps.compiled_row(sizes, arm, chip)
        for arm in ("prenorm", "block, kernels")
      )
      assert base and block
      cells = []
      for name, unit in _MEASURES.items():
        if not block[name]:
          cells.append("not compiled")
          continue
        more = float(block[name]) - float(base[name])
        ratio = block[f"{name.rpartition('_')[0]}_ratio"]
        cells.append(f"{ratio} ({more:+.2f} {unit})".replace("-", "\u2212"))
      what = f"d={sizes.width}, {sizes.sublayers} sublayers, {chip}"
      lines.append([f"[{what}](#tpu-whole-stacks)", *cells, block["commit"]])
  header = (
    "training step, Block over PreNorm", "time, aim 1.03", "bytes, aim 1.05",
    "peak, aim 1.05", "commit",
  )  # fmt: skip
  return readme.table(header, lines)

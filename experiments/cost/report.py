# SPDX-License-Identifier: Apache-2.0
"""The tables of `cost`, from its rows."""

from collections.abc import Mapping, Sequence
import functools
from typing import Any

from attnres_jax.analysis import figures
from attnres_jax.pipeline import __main__ as pipeline
from attnres_jax.pipeline import layout as layout_lib
from attnres_jax.sweep.pages import page
from experiments.cost import networks
from experiments.pages import readme

Row = Mapping[str, str]

KEYS = (
  "program", "place", "network", "arm", "batch", "tokens", "cached",
)  # fmt: skip
_PLACE = tuple(name for name in KEYS if name != "arm")
_HERE, _COUNTED = "here", "counted"
# Networks whose rows other experiments show.
_ELSEWHERE = ("paired",)
_WORDS = {
  "scan_layers=False": "unrolled",
  "form=one_softmax": "one softmax per sublayer",
  "depth_loop=scan": "a scan over depth",
  "layers=separate": "separate layers",
  "plain": "plain JAX",
  "stream_dtype=bfloat16": "streams in bfloat16",
  "value_query=True": "a query of its own for each mixer's values",
}


def label(arm: str) -> str:
  """The name of an arm in tables."""
  scheme, *options = arm.split()
  words = [figures.name_of(scheme)]
  words += [_WORDS.get(o, o.replace("heads=", "heads: ")) for o in options]
  return ", ".join(words)


def describe(name: str) -> str:
  """The size of a network."""
  model = networks.load(name).model
  text = f"d={model.width}, {model.num_sublayers} sublayers"
  if name.startswith("stack"):
    block = model.residual.sublayers_per_block(model.num_sublayers)
    text += f" in blocks of {block}"
  return text


def timed(rows: Sequence[Row], programs: Mapping[str, str]) -> str:
  """Ratios with their ranges: a line per arm, a column per program.

  `programs` are the shown ones, with their headings.
  """
  shown = [
    row
    for row in rows
    if row["place"] == _HERE
    and row["program"] in programs
    and row["network"] not in _ELSEWHERE
  ]
  table = page.Table.across(
    ("network", "rows", "tokens", "arm"),
    (
      (r["network"], r["batch"], r["tokens"], _arm(r), r["program"], _cell(r))
      for r in shown
    ),
    programs,
  )
  return readme.text(table, readme.origin(shown))


def compiled(rows: Sequence[Row], programs: Sequence[str]) -> str:
  """Bytes, estimate and memory of compiled programs, and ratios to PreNorm."""
  shown = _compiled(rows, *programs)
  base = {_where(row): row for row in shown if row["arm"] == "prenorm"}
  serves = any(row["least_GB"] for row in shown)

  def over(name):
    return lambda row: _over(row, base.get(_where(row)), name)

  columns = {
    "program": lambda row: row["program"] * serves,
    "network": lambda row: "" if serves else describe(row["network"]),
    "chip": "place", "rows": "batch", "tokens": "tokens", "arm": _arm,
    "GB (ratio)": over("GB"), "least GB": "least_GB",
    "estimate, ms (ratio)": over("ms"), "peak, GiB (ratio)": over("peak_GiB"),
    "depth reads": lambda row: _share(row) * serves,
  }  # fmt: skip
  return _text(shown, columns)


def latency(rows: Sequence[Row]) -> str:
  """The range of ratios of each scheme that serves, per chip and program."""
  shown = [row for row in _compiled(rows, "decode", "prefill") if row["ms"]]
  base = {_where(row): row for row in shown if row["arm"] == "prenorm"}
  groups: dict[tuple[str, str, str], list[Row]] = {}
  for row in shown:
    # A baseline may be missing, or not fit.
    if row["arm"] != "prenorm" and row["least_GB"] and _where(row) in base:
      where = row["program"], row["place"], _arm(row)
      groups.setdefault(where, []).append(row)
  lines = [
    [
      *where,
      *(
        _range([float(row[name]) / float(base[_where(row)][name])
                for row in group])
        for name in ("GB", "ms")
      ),
      _share(max(group, key=_depth_share)),
    ]
    for where, group in groups.items()
  ]  # fmt: skip
  header = ("step", "chip", "scheme", "bytes", "estimate", "depth reads, most")
  return readme.text(page.Table(header, lines), readme.origin(shown))


def prompts(rows: Sequence[Row]) -> str:
  """Memory of long prompts, and their collectives of activations."""
  columns = {
    "network": "network", "scheme": _arm, "devices": "place",
    "tokens at once": "tokens", "before them": "cached",
    "blocks, GB": "blocks_GB", "all temporaries, GB": "temporary_GB",
    "collectives": "collectives",
  }  # fmt: skip
  return _text([row for row in rows if row["blocks_GB"]], columns)


def experts(rows: Sequence[Row]) -> str:
  """Routed experts: what a device moves over both minima, and sends."""
  columns = {
    "network": lambda row: describe(row["network"]), "chips": "place",
    "data x fsdp x expert": "mesh",
    "tokens of a device": lambda row: (
      row["device_tokens"] or int(row["batch"]) * int(row["tokens"])
    ),
    "GB": "GB",
    "least GB (ratio)": lambda row: _times(row, "least_GB"),
    "fused, least GB (ratio)": lambda row: _times(row, "fused_GB"),
    "GB sent": "sent_GB", "allocated, GiB": "allocated_GiB",
    "ms": lambda row: row["seconds"] and f"{float(row['seconds']) * 1e3:.0f}",
  }  # fmt: skip
  return _text([row for row in rows if row["program"] == "experts"], columns)


def vectors(rows: Sequence[Row]) -> str:
  """Vectors that a token moves per sublayer, beside the paper's Table 1."""

  def total(*names):
    return lambda row: f"{sum(float(row[name]) for name in names):.2f}"

  columns = {
    "depth": "network", "scheme": _arm, "printed": total("printed"),
    "counted": total("reads", "writes"), "reads": total("reads"),
    "writes": total("writes"),
  }  # fmt: skip
  return _text([row for row in rows if row["place"] == _COUNTED], columns)


def sentence(rows: Sequence[Row]) -> str:
  """What Block and Full cost here, for the first page."""
  ratios = {
    row["arm"]: _range_of(row)
    for row in rows
    if (row["program"], row["network"], row["place"])
    == ("forward_backward", "large", _HERE)
  }
  return (
    "**What it costs.** On a CPU, a forward and backward pass takes"
    f" {ratios['block_attnres']} times as long with Block as with PreNorm, and"
    f" {ratios['full_attnres']} times with Full"
    " ([how it was measured](experiments/cost/README.md))."
  )


# P ranks, V virtual stages each, K chunks per block.
_PIPELINES = (
  (4, 2, 1), (4, 2, 2), (4, 4, 1), (8, 4, 1), (8, 4, 2), (4, 1, 1), (8, 1, 2),
)  # fmt: skip


def transfers(_: readme.Rows = ()) -> str:
  """What pipelines send, counted in their plans; a sublayer per chunk."""
  header, lines = ["P, V, K"], []
  for rule in layout_lib.RULES:
    header += [f"{rule}: formula", "planned", "on links"]
  for ranks, stages, chunks in _PIPELINES:
    layout = layout_lib.Layout(ranks, stages, 1, chunks)
    cells = [pipeline.sends(layout, rule) for rule in layout_lib.RULES]
    lines.append([f"{ranks}, {stages}, {chunks}", *sum(cells, ())])
  return readme.text(page.Table(header, lines))


_ROOT = "../.."
_STEPS = {
  "forward": "forward", "forward_backward": "forward + backward",
  "compile": "compiling the training step",
}  # fmt: skip
_DECODING = {
  "decode": "decode", "recompute": "without caches", "prefill": "prefill",
}  # fmt: skip
_of = functools.partial
PUBLISHED = readme.Published(__file__, [
  readme.Part(transfers, "transfers", "", f"{_ROOT}/docs/pipeline.md"),
  readme.Part(_of(timed, programs=_STEPS), "steps"),
  readme.Part(_of(timed, programs=_DECODING), "decoding"),
  readme.Part(_of(compiled, programs=("step",)), "compiled_steps"),
  readme.Part(_of(compiled, programs=("decode", "prefill")), "served"),
  readme.Part(prompts, "prompts"),
  readme.Part(experts, "experts"),
  readme.Part(vectors, "vectors"),
  readme.Part(sentence, "cost", document=f"{_ROOT}/README.md"),
  readme.Part(latency, "latency", document=f"{_ROOT}/docs/inference.md"),
  readme.Part(
    _of(compiled, programs=("identity",)), "identity",
    document=f"{_ROOT}/kernels/benchmarks/results/README.md",
  ),
])  # fmt: skip


def _text(rows: Sequence[Row], columns: Mapping[str, Any]) -> str:
  return readme.text(page.Table.of(rows, columns), readme.origin(rows))


def _arm(row: Row) -> str:
  return label(row["arm"])


def _compiled(rows: Sequence[Row], *programs: str) -> list[Row]:
  """Rows of one chip, by program, place and size, PreNorm first."""
  rows_here = [
    row
    for row in rows
    if row["program"] in programs
    and row["place"] not in (_HERE, _COUNTED)
    and not row["blocks_GB"]
  ]
  order = {name: i for i, name in enumerate(programs)}
  return sorted(
    rows_here,
    key=lambda row: (
      order[row["program"]], row["network"], row["place"], int(row["tokens"]),
      int(row["batch"]), row["arm"] != "prenorm",
    ),
  )  # fmt: skip


def _where(row: Row) -> tuple[str, ...]:
  return tuple(row[name] for name in _PLACE)


def _over(row: Row, base: Row | None, name: str) -> str:
  """A value, and its ratio to PreNorm's."""
  try:
    value = float(row[name])
  except ValueError:
    return row[name]
  text = f"{value:.2f}" if value >= 10 or name == "peak_GiB" else f"{value:.3f}"
  if base is None or base is row or not base[name]:
    return text
  return f"{text} ({value / float(base[name]):.3f})"


def _times(row: Row, least: str) -> str:
  """A minimum, and what is moved over it."""
  if not row[least]:
    return ""
  return f"{float(row[least]):.2f} ({float(row['GB']) / float(row[least]):.2f})"


def _depth_share(row: Row) -> float:
  """The share of depth attention in the estimate."""
  return float(row["depth_ms"] or 0) / float(row["ms"] or 1)


def _share(row: Row) -> str:
  return f"{_depth_share(row):.1%}" if _depth_share(row) else ""


def _range(values: Sequence[float]) -> str:
  low, high = min(values), max(values)
  return f"{low:.3f}" if low == high else f"{low:.3f} to {high:.3f}"


def _cell(row: Row) -> str:
  """A ratio; for a baseline also its time."""
  seconds = float(row["seconds"])
  if row["arm"] == row["baseline"]:
    return (
      f"1 ({seconds:.2f} s)" if seconds > 0.1 else f"1 ({seconds * 1e3:.2f} ms)"
    )
  if row["ratio_min"] == row["ratio_max"]:
    return f"{float(row['ratio']):.1f}"
  return _range_of(row)


def _range_of(row: Row) -> str:
  value, *ends = (float(row[f"ratio{end}"]) for end in ("", "_min", "_max"))
  return str(page.interval(value, *ends, digits=2, ends=page.RANGE))

# SPDX-License-Identifier: Apache-2.0
"""The tables of `cost`, from its rows."""

from collections.abc import Callable, Mapping, Sequence
import functools

from attnres_jax.analysis import figures
from attnres_jax.pipeline import __main__ as pipeline
from attnres_jax.pipeline import layout as layout_lib
from attnres_jax.sweep.pages import page
from experiments.cost import networks
from experiments.pages import readme as readme_lib

Row = Mapping[str, str]

KEYS = (
  "program", "place", "network", "arm", "batch", "tokens", "cached",
)  # fmt: skip
COLUMNS = (
  *KEYS, "baseline", "ratio", "ratio_min", "ratio_max", "cpu_ratio", "seconds",
  "cpu_seconds", "GB", "least_GB", "ms", "depth_ms", "peak_GiB",
  "temporary_GB", "blocks_GB", "collectives", "sent_GB", "allocated_GiB",
  "fused_GB", "mesh", "device_tokens", "printed", "reads", "writes",
  "hardware", "system", "python", "jax", "flax", "libtpu", "commit", "date",
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
_SHOWN = ("GB", "ms", "peak_GiB")


def key(row: Row) -> tuple[str, ...]:
  """What distinguishes a row from others."""
  return tuple(str(row.get(name, "")) for name in KEYS)


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
  lines: dict[tuple[str, ...], dict[str, str]] = {}
  for row in shown:
    where = row["network"], row["batch"], row["tokens"], label(row["arm"])
    cells = lines.setdefault(where, dict.fromkeys(programs, ""))
    cells[row["program"]] = _cell(row)
  header = ("network", "rows", "tokens", "arm", *programs.values())
  table = [[*where, *cells.values()] for where, cells in lines.items()]
  return _text(header, table, shown)


def compiled(rows: Sequence[Row], programs: Sequence[str]) -> str:
  """Bytes, estimate and memory of compiled programs, and ratios to PreNorm."""
  shown = _compiled(rows, *programs)
  base = {_where(row): row for row in shown if row["arm"] == "prenorm"}
  serves = any(row["least_GB"] for row in shown)
  lines = []
  for row in shown:
    name = row["program"] if serves else describe(row["network"])
    where = [name, row["place"], row["batch"], row["tokens"]]
    cells = [_over(row, base.get(_where(row)), name) for name in _SHOWN]
    if serves:
      cells[1:1] = [row["least_GB"]]
      cells.append(_share(row))
    lines.append([*where, label(row["arm"]), *cells])
  header = [
    "program" if serves else "network", "chip", "rows", "tokens", "arm",
    "GB (ratio)", "estimate, ms (ratio)", "peak, GiB (ratio)",
  ]  # fmt: skip
  if serves:
    header[6:6] = ["least GB"]
    header.append("depth reads")
  return _text(header, lines, shown)


def latency(rows: Sequence[Row]) -> str:
  """The range of ratios of each scheme that serves, per chip and program."""
  shown = [row for row in _compiled(rows, "decode", "prefill") if row["ms"]]
  base = {_where(row): row for row in shown if row["arm"] == "prenorm"}
  groups: dict[tuple[str, str, str], list[Row]] = {}
  for row in shown:
    # A baseline may be missing, or not fit.
    if row["arm"] != "prenorm" and row["least_GB"] and _where(row) in base:
      where = row["program"], row["place"], label(row["arm"])
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
  return _text(header, lines, shown)


def prompts(rows: Sequence[Row]) -> str:
  """Memory of long prompts, and their collectives of activations."""
  shown = [row for row in rows if row["blocks_GB"]]
  columns = (
    "network", "arm", "place", "tokens", "cached", "blocks_GB", "temporary_GB",
    "collectives",
  )  # fmt: skip
  lines = [[{**row, "arm": label(row["arm"])}[name] for name in columns]
           for row in shown]  # fmt: skip
  header = (
    "network", "scheme", "devices", "tokens at once", "before them",
    "blocks, GB", "all temporaries, GB", "collectives",
  )  # fmt: skip
  return _text(header, lines, shown)


def experts(rows: Sequence[Row]) -> str:
  """Routed experts: what a device moves over both minima, and sends."""
  shown = [row for row in rows if row["program"] == "experts"]
  lines = [
    [
      describe(row["network"]), row["place"], row["mesh"],
      row["device_tokens"] or str(int(row["batch"]) * int(row["tokens"])),
      row["GB"], _times(row, "least_GB"), _times(row, "fused_GB"),
      row["sent_GB"], row["allocated_GiB"],
      f"{float(row['seconds']) * 1e3:.0f}" if row["seconds"] else "",
    ]
    for row in shown
  ]  # fmt: skip
  header = (
    "network", "chips", "data x fsdp x expert", "tokens of a device", "GB",
    "least GB (ratio)", "fused, least GB (ratio)", "GB sent",
    "allocated, GiB", "ms",
  )  # fmt: skip
  return _text(header, lines, shown)


def vectors(rows: Sequence[Row]) -> str:
  """Vectors that a token moves per sublayer, beside the paper's Table 1."""
  shown = [row for row in rows if row["place"] == _COUNTED]
  lines = [
    [
      row["network"], label(row["arm"]), f"{float(row['printed']):.2f}",
      f"{float(row['reads']) + float(row['writes']):.2f}",
      f"{float(row['reads']):.2f}", f"{float(row['writes']):.2f}",
    ]
    for row in shown
  ]  # fmt: skip
  header = ("depth", "scheme", "printed", "counted", "reads", "writes")
  return _text(header, lines, shown)


def sentence(rows: Sequence[Row]) -> str:
  """What Block and Full cost here, for the first page."""
  block, full = (
    next(
      _range_of(row)
      for row in rows
      if (row["program"], row["network"], row["arm"], row["place"])
      == ("forward_backward", "large", scheme, _HERE)
    )
    for scheme in ("block_attnres", "full_attnres")
  )
  return (
    "**What it costs.** On a CPU, a forward and backward pass takes"
    f" {block} times as long with Block as with PreNorm, and {full} times with"
    " Full ([how it was measured](experiments/cost/README.md))."
  )


_TABLES: Mapping[str, Callable[[Sequence[Row]], str]] = {
  "steps": functools.partial(timed, programs={
    "forward": "forward", "forward_backward": "forward + backward",
    "compile": "compiling the training step",
  }),
  "decoding": functools.partial(timed, programs={
    "decode": "decode", "recompute": "without caches", "prefill": "prefill",
  }),
  "compiled_steps": functools.partial(compiled, programs=("step",)),
  "served": functools.partial(compiled, programs=("decode", "prefill")),
  "prompts": prompts, "experts": experts, "vectors": vectors,
}  # fmt: skip
_ROOT = "../.."
# P ranks, V virtual stages each, K chunks per block.
_PIPELINES = (
  (4, 2, 1), (4, 2, 2), (4, 4, 1), (8, 4, 1), (8, 4, 2), (4, 1, 1), (8, 1, 2),
)  # fmt: skip


def transfers(_: readme_lib.Rows = ()) -> str:
  """What pipelines send, counted in their plans; a sublayer per chunk."""
  header, lines = ["P, V, K"], []
  for rule in layout_lib.RULES:
    header += [f"{rule}: formula", "planned", "on links"]
  for ranks, stages, chunks in _PIPELINES:
    layout = layout_lib.Layout(ranks, stages, 1, chunks)
    cells = [pipeline.sends(layout, rule) for rule in layout_lib.RULES]
    lines.append([f"{ranks}, {stages}, {chunks}", *sum(cells, ())])
  return readme_lib.text(page.Table(header, lines))


PLACES = [
  readme_lib.Place(transfers, "transfers", "", f"{_ROOT}/docs/pipeline.md"),
  *(readme_lib.Place(make, name) for name, make in _TABLES.items()),
  readme_lib.Place(sentence, "cost", document=f"{_ROOT}/README.md"),
  readme_lib.Place(latency, "latency", document=f"{_ROOT}/docs/inference.md"),
  readme_lib.Place(
    functools.partial(compiled, programs=("identity",)),
    "identity",
    document=f"{_ROOT}/kernels/benchmarks/results/README.md",
  ),
]


def _text(
  header: Sequence[str], lines: Sequence[Sequence[str]], rows: Sequence[Row]
) -> str:
  return readme_lib.text(page.Table(header, lines), readme_lib.origin(rows))


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

# SPDX-License-Identifier: Apache-2.0
"""A report of `report` as text."""

from collections.abc import Mapping
import re
from typing import Any

from attnres_jax.common import text_table
from attnres_jax.plan import bill

_GIB = 2**30


def to_text(report: Mapping[str, Any]) -> str:
  """The report as text."""
  mesh = " x ".join(f"{n} {axis}" for axis, n in report["mesh"].items())
  rows = f"{report['batch_size']} rows of {report['sequence_length']} tokens"
  if report["step"] == "train":
    rows += (
      f" in {report['microbatches']} microbatches, remat {report['remat']}"
    )
  else:
    rows += ", one more token for each row, whose cache is full"
  lines = [
    f"{report['name']} ({report['residual']}), {report['step']} step on"
    f" {report['devices']} {report['device_kind']} devices: {mesh}",
    rows,
    "",
    text_table.table(("memory per device", "GiB"), _memory_rows(report)),
  ]
  if "reason" in report:
    return "\n".join([*lines, "", "does not fit:", _oom(report["reason"])])
  if "unread" in report:
    lines += ["", f"jaxlib cannot read the program: {report['unread']}"]
    return "\n".join(lines + ([] if report["fits"] else ["", "does not fit"]))
  ratio = report["flops_ratio"]
  warning = [f"warning: it computes {ratio:.2f} times the FLOPs that it needs"]
  lines += [
    "",
    text_table.table(
      ("per device and step", "amount", "seconds at peak"),
      _total_rows(report),
    ),
    f"a step takes {report['step_seconds']:.3f} s by estimate, bound by"
    f" {report['bound']}, and at least {report['least_seconds']:.3f} s",
    *_timeline(report),
    *_lockstep(report),
    *(warning if ratio > bill.WARN else []),
    "",
    bill.to_text(report["parts"]),
    "* with kernels, whose FLOPs the compiler does not count",
    "",
    text_table.table(
      ("collective", "axes", "where", "times", "MB sent", "MB overlapped"),
      [
        (
          row["kind"], row["axes"], "in loop" if row["in_loop"] else "once",
          f"{row['count']:.0f}", f"{row['sent_bytes'] / 1e6:,.1f}",
          f"{row['overlapped_bytes'] / 1e6:,.1f}",
        )
        for row in report["collectives"]
      ],
    ),
    "",
    text_table.table(
      ("largest arrays", "MiB", "computed by"),
      [
        (row["array"], f"{row['bytes'] / 2**20:,.1f}", row["source"])
        for row in report["largest"]
      ],
    ),
    "",
    text_table.table(
      ("moves most", "GB of HBM", "runs", "makes", "computed by"),
      [
        (
          f"{row['bytes'] / report['traffic_bytes']:.1%}",
          f"{row['bytes'] / 1e9:,.1f}", f"{row['runs']:,.0f}", row["array"],
          row["source"],
        )
        for row in report["busiest"]
      ],
    ),
    "",
    *([] if report["fits"] else ["does not fit", ""]),
    _compile_time(report),
  ]  # fmt: skip
  return "\n".join(lines)


def _compile_time(report):
  compiled = f"{report['compile_seconds']:.0f} s"
  if "lower_seconds" not in report:
    return (
      f"compiled up to its schedule in {compiled}; the peak is that of its"
      " arrays, without machine code"
    )
  return f"lowered in {report['lower_seconds']:.0f} s, compiled in {compiled}"


def _total_rows(report):
  rows = [
    ("FLOPs of the model", "analytic_flops", ""),
    ("FLOPs, least", "least_flops", ""),
    ("FLOPs, compiled", "charged_flops", "compute_seconds"),
    ("bytes of HBM, least", "least_bytes", ""),
    ("bytes of HBM, compiled", "traffic_bytes", "memory_seconds"),
    ("bytes sent", "sent_bytes", "link_seconds"),
    ("of these, beside no work", "exposed_bytes", "exposed_seconds"),
    ("bytes between slices", "bytes_between_slices", ""),
  ]
  share = report["exposed_bytes"] / (report["sent_bytes"] or 1.0)
  report = {"exposed_seconds": share * report["link_seconds"]} | dict(report)
  if "launches" in report:
    rows.insert(3, ("launches", "launches", "launch_seconds"))
  report.setdefault("bytes_between_slices", 0.0)
  return [
    (label, f"{report[name]:.3e}", f"{report[time]:.3f}" if time else "")
    for label, name, time in rows
    if report[name] or time
  ]


def _timeline(report: Mapping[str, Any]) -> list[str]:
  walked = report.get("timeline")
  if walked is None:
    return []
  seconds = lambda sums: ", ".join(
    f"{name or 'all'} {value:.3f}"
    for name, value in sorted(sums.items(), key=lambda pair: -pair[1])
    if value >= 0.0005
  )
  longer = max(report["compute_seconds"], report["memory_seconds"])
  before = [longer, *walked["up_to"].values()]
  added = ", ".join(
    f"{cause} {new - old:+.3f}"
    for cause, old, new in zip(walked["up_to"], before, before[1:])
  )
  return [
    f"along its schedule it takes {walked['seconds']:.3f} s: {longer:.3f}, the"
    f" longer of compute and memory; {added}",
    f"  work {sum(walked['parts'].values()):.3f} s: "
    + seconds(walked["parts"]),
    f"  waits for links {sum(walked['waited_seconds'].values()):.3f} s: "
    + (seconds(walked["waited_seconds"]) or "none"),
  ]


def _lockstep(report: Mapping[str, Any]) -> list[str]:
  ranks = report.get("lockstep")
  if ranks is None:
    return []
  return [
    "compute and memory are means over ranks; as ranks wait for each other,"
    f" work takes {ranks['seconds']:.3f} s, with a bubble of"
    f" {ranks['bubble']:.0%}; rank {ranks['slowest_rank']} has the most work"
  ]


def _memory_rows(report):
  names = {
    "parameters": "parameter_bytes",
    "optimiser state": "optimiser_bytes",
    "temporaries": "temporary_bytes",
    "  activations kept for backward": "running_state_bytes",
    "  cached blocks": "block_bytes",
    "peak": "peak_bytes",
    "of": "hbm_bytes",
    "headroom": "headroom_bytes",
  }
  return [
    (label, f"{report[name] / _GIB:.2f}")
    for label, name in names.items()
    if name in report
  ]


def _oom(reason: str) -> str:
  """The compiler's list of the largest allocations, without its preamble."""
  at = re.search(r"Largest program allocations", reason)
  first = reason.strip().splitlines()[0]
  listing = reason[at.start() :].splitlines()[:40] if at else []
  return "\n".join([first, *listing])

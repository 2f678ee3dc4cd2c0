# SPDX-License-Identifier: Apache-2.0
"""Tables of configs/plans.csv, which `attnres_jax.plan.search` compiled."""

from collections.abc import Mapping, Sequence

from attnres_jax import config as config_lib
from attnres_jax.common import plans
from experiments import variants
from experiments.pages import page

Row = Mapping[str, str]


def of_study(study: variants.Study, rows: Sequence[Row]) -> str:
  """A line per scale, slice and variant that has a plan."""
  lines, kept = [], []
  for scale in (variants.D768, variants.PAPER):
    hashes, left_out = {}, study.left_out(scale)
    for name in [name for name in study.variants if name not in left_out]:
      spec = f"scale={scale},planned,variant={name}"
      config = config_lib.load_config(
        f"experiments/{study.name}/config.py:{spec}"
      )
      hashes[name] = plans.config_hash(config)
    for slice_name in dict.fromkeys(row["slice"] for row in rows):
      found = {
        row["config_hash"]: row for row in rows if row["slice"] == slice_name
      }
      base = found.get(hashes[variants.BASELINE])
      for name, hashed in hashes.items():
        row = found.get(hashed)
        if row is None or base is None:
          continue
        kept.append(row)
        label, seconds = study.variants[name].label, float(row["step_seconds"])
        lines.append([
          scale, slice_name, label, mesh(row), row["microbatches"],
          row["remat"], row["headroom_GiB"], f"{seconds:.3f}",
          f"{seconds / float(base['step_seconds']):.2f}",
          f"{float(row['mfu_bound']):.0%}", row["chip_hours"],
        ])  # fmt: skip
  header = (
    "scale", "slice", "residual", "data x fsdp x expert", "microbatches",
    "remat", "headroom, GiB", "step, s", "over PreNorm", "MFU bound",
    "chip-hours a run",
  )  # fmt: skip
  return f"{page.Table(header, lines).markdown()}\n\n{origin(kept)}"


def mesh(row: Row) -> str:
  """Its mesh, in words."""
  return f"{row['data']} x {row['fsdp']} x {row['expert']}"


def origin(rows: Sequence[Row]) -> str:
  """What compiled them, a sentence."""

  def each(column: str) -> str:
    return ", ".join(dict.fromkeys(row[column] for row in rows))

  return (
    f"Compiled up to the schedule, not run: jax {each('jax')}, libtpu"
    f" {each('libtpu')}, commits {each('commit')}."
  )

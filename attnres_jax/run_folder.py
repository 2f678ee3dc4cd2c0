# SPDX-License-Identifier: Apache-2.0
"""The files of a run folder that describe the run and its outcome.

config.json and data.json describe the run; a resumed run must match them.
metrics.jsonl records what was completed, summary.json the outcome.
"""

from collections.abc import Iterable
import dataclasses
import json
import statistics
from typing import Any

from etils import epath
import jax

from attnres_jax import checkpoint
from attnres_jax import config as config_lib
from attnres_jax import goodput
from attnres_jax import metrics as metrics_lib
from attnres_jax import optimizer

# Fields that may differ when a run is resumed: where, how often and how fast
# things are written and read, not what is computed. A prefix ends in a dot.
# `train.steps` may differ too, until the schedule starts to depend on it.
HARMLESS = (
  "name",
  "log.",
  "checkpoint.",
  "mesh.",
  "pipeline.",
  "train.log_every",
  "train.eval_every",
  "train.depth_every",
  "train.on_nan",
  "train.max_skipped_share",
  "data.num_threads",
)


def changes(
  workdir: epath.Path,
  config: config_lib.RunConfig,
  descriptions: dict[str, Any],
) -> dict[str, tuple[Any, Any]]:
  """The differences from the run to resume that are not harmless."""
  file = workdir / "config.json"
  if not file.exists() or not checkpoint.all_steps(workdir):
    return {}
  old = json.loads(file.read_text())
  # A field that did not exist then had its default.
  both = (config_lib.build_run_config(old), config)
  found = config_lib.differences(
    *(json.loads(config_lib.to_json(one)) for one in both)
  )
  harmless = HARMLESS
  lengths = (old["train"]["steps"], config.train.steps)
  settled = min(optimizer.settled_steps(config.optim, n) for n in lengths)
  if checkpoint.all_steps(workdir)[-1] <= settled:
    harmless += ("train.steps",)
  found = {
    field: values
    for field, values in found.items()
    if not is_harmless(field, harmless)
  }
  old_data = json.loads((workdir / "data.json").read_text())
  for split, description in descriptions.items():
    before, now = old_data[split]["fingerprint"], description["fingerprint"]
    if before != now:
      found[f"the content of the {split} data"] = (before, now)
  return found


def is_harmless(field: str, names: Iterable[str] = HARMLESS) -> bool:
  """Whether a field is one of the names, or below one of the prefixes."""
  return any(
    field.startswith(name) if name.endswith(".") else field == name
    for name in names
  )


def refusal(workdir: epath.Path, changes: dict[str, tuple[Any, Any]]) -> str:
  """The error for a folder whose run cannot be resumed."""
  lines = [
    f"{workdir} holds a run with another configuration; resume it with the"
    " same one, choose another --workdir, or pass"
    " --resume_with_changed_config to continue with the new one. Differing:"
  ]
  lines += [
    f"  config.{field}: {old!r} there, {new!r} here"
    if " " not in field
    else f"  {field}: {old} there, {new} here"
    for field, (old, new) in changes.items()
  ]
  return "\n".join(lines)


def finished_summary(
  workdir: epath.Path, config: config_lib.RunConfig
) -> dict[str, Any] | None:
  """The summary of a finished run of at least this length, or None."""
  file = workdir / "summary.json"
  if not file.exists():
    return None
  summary = json.loads(file.read_text())
  return summary if summary["step"] >= config.train.steps else None


def missing_checkpoint(
  workdir: epath.Path, restored: checkpoint.Restored | None
) -> int | None:
  """The step of a newer checkpoint that was completed but is missing.

  Raises:
    CheckpointError: some were completed, but none is left.
  """
  completed: set[int] = set()
  for row in metrics_lib.read_rows(workdir, "event"):
    if row["event"] == "checkpoint":
      completed.add(row["step"])
    elif row["event"] in ("checkpoint set aside", "checkpoint missing"):
      completed.discard(row["of_step"])
  if not completed:
    return None
  newest = max(completed)
  if restored is None:
    raise checkpoint.CheckpointError(
      f"checkpoints of {workdir} up to step {newest} were completed, and all"
      " are gone; to start again, choose another --workdir or empty this one"
    )
  is_there = newest <= restored.step or newest in restored.unreadable
  return None if is_there else newest


def open_run(
  workdir: epath.Path,
  config: config_lib.RunConfig,
  descriptions: dict[str, Any],
  step: int,
) -> metrics_lib.Writer:
  """Writes the description of the run, and opens its metrics."""
  primary = jax.process_index() == 0
  if primary:
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "summary.json").unlink(missing_ok=True)
    (workdir / "config.json").write_text(config_lib.to_json(config))
    text = json.dumps(descriptions, indent=2) + "\n"
    (workdir / "data.json").write_text(text)
  return metrics_lib.make_writer(
    workdir, config, resume_step=step, primary=primary
  )


def summarise(
  workdir: epath.Path,
  config: config_lib.RunConfig,
  *,
  status: str,
  step: int,
  parameters: int,
  seconds: float,
) -> dict[str, Any]:
  """The outcome, from the rows of the whole run; written when finished."""
  summary: dict[str, Any] = {
    "name": config.name,
    "status": status,
    "step": step,
    "parameters": parameters,
    "seconds": seconds,
  }
  if jax.process_index() != 0:
    return summary
  rows = metrics_lib.read_rows(workdir)
  train = [row for row in rows if row["split"] == "train"]
  validation = [row for row in rows if row["split"] == "validation"]
  compiled = {
    row["function"]: row for row in rows if row.get("event") == "compiled"
  }
  if train:
    summary["train_loss"] = train[-1]["loss"]
    summary["step_seconds"] = statistics.median(
      row["step_seconds"] for row in train
    )
    summary["tokens_per_second"] = statistics.median(
      row["tokens_per_second"] for row in train
    )
    summary["skipped"] = train[-1]["skipped"]
  if validation:
    summary["validation_loss"] = validation[-1]["loss"]
    summary["bits_per_byte"] = validation[-1].get("bits_per_byte")
  if "train_step" in compiled:
    summary["compile_seconds"] = compiled["train_step"]["seconds"]
    summary["peak_bytes"] = compiled["train_step"]["peak_bytes"]
  summary["goodput"] = dataclasses.asdict(goodput.of_rows(rows))
  if status == "finished":
    text = json.dumps(summary, indent=2) + "\n"
    (workdir / "summary.json").write_text(text)
  return summary

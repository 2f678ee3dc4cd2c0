# SPDX-License-Identifier: Apache-2.0
"""The files of a run folder that describe the run and its outcome.

config.json and data.json describe the run, as do its checkpoints: a resumed run
must match the newest one, and a damaged file is rebuilt. metrics.jsonl records
what was completed, summary.json the outcome.
"""

from collections.abc import Mapping
import contextlib
import dataclasses
import json
import os
import statistics
from typing import Any, Literal

from etils import epath
import jax

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax import optimizer
from attnres_jax.common import files
from attnres_jax.common import processes
from attnres_jax.common import records
from attnres_jax.config import fields
from attnres_jax.train import account
from attnres_jax.train import checkpoint
from attnres_jax.train import console as console_lib
from attnres_jax.train import goodput
from attnres_jax.train import metrics as metrics_lib
from attnres_jax.train import saves
from attnres_jax.train import train_state

# Effects of fields that may change when a run is resumed: where, how often and
# how fast things are written, read and computed. `train.steps` may change too,
# until the schedule or an average depends on it.
_HARMLESS = {"execution", "place", "log", "step"}
# Set in the information of a checkpoint without a run: `interop` writes them.
WEIGHTS_ONLY = "weights_only"
CONFIG, DATA, SUMMARY = "config.json", "data.json", "summary.json"


# Fields that files of other programs do not have.
_OURS = {
  CONFIG: ("model", "train", "optim"),
  DATA: ("train", "validation"),
  SUMMARY: ("status", "step"),
  metrics_lib.FILE: ("step", "split"),
}


@dataclasses.dataclass(frozen=True)
class Summary(records.Record):
  """What commands read of the `summary.json` of a finished run."""

  others = True
  status: Literal["finished"]
  step: records.Bytes
  validation_loss: fields.Positive | None = None
  train_loss: float | None = None
  step_seconds: float | None = None


@dataclasses.dataclass(frozen=True)
class SplitOfText(records.Record):
  """What commands read of a split of `data.json`."""

  others = True
  fingerprint: str


@dataclasses.dataclass(frozen=True)
class Text(records.Record):
  """What commands read of `data.json`, the text of a run."""

  others = True
  train: SplitOfText
  validation: SplitOfText


def refuse_foreign(name: str, workdir: epath.Path) -> None:
  """Refuses a folder whose files of our names belong to another program.

  Raises:
    ConfigError: names the argument `name` and the file.
  """
  # A checkpoint of ours says so too.
  is_known = lambda: "config" in (checkpoint.newest_info(workdir) or {})
  for folder in (checkpoint.CHECKPOINTS, checkpoint.SET_ASIDE):
    if not files.is_remote(workdir) and os.path.isfile(workdir / folder):
      files.fail_foreign(name, workdir, folder)
  files.refuse_foreign(name, workdir, _OURS, is_known)


def refuse_changes(
  workdir: epath.Path,
  config: config_lib.RunConfig,
  descriptions: dict[str, Any],
) -> None:
  """Refuses a folder whose run differs in what would change its result.

  The newest readable checkpoint describes that run, or, if a finished run has
  none any more, its files.

  Raises:
    ConfigError: lists the differences.
  """
  info = checkpoint.newest_info(workdir)
  if info is None and finished_summary(workdir):
    with contextlib.suppress(FileNotFoundError, ValueError):
      was = records.read(workdir / CONFIG, config_lib.RunConfig)
      text = fingerprints(records.read_object(workdir / DATA))
      info = {"config": config_lib.to_dict(was), "fingerprints": text}
  if info is None or "config" not in info:  # Damaged, or not ours.
    return
  if info.get(WEIGHTS_ONLY):
    config_lib.fail_argument(
      "--workdir",
      str(workdir),
      "another folder: this one has weights only, from which a run begins with"
      f" --config.train.start_from={workdir}",
    )
  # A field that did not exist then had its default.
  old = config_lib.build_run_config(info["config"])
  changed = harmful(old, config)
  lengths = (old.train.steps, config.train.steps)
  step = max(checkpoint.all_steps(workdir), default=old.train.steps)
  settled = min(optimizer.settled_steps(config.optim, n) for n in lengths)
  averages = train_state.has_average(config.train, step)
  # A run that is cut to what it has done would not be evaluated at its end.
  if step <= settled and step < config.train.steps and not averages:
    changed.pop("train.steps", None)
  now = fingerprints(descriptions)
  unknown = dict.fromkeys(now, "not recorded")
  before = info.get("fingerprints", unknown)
  lines = config_lib.difference_lines(changed) + [
    f"  the content of the {split} data: {there} there, {now[split]} here"
    for split, there in before.items()
    if there != now[split]
  ]
  if lines:
    head = (
      f"{workdir} holds a run with another configuration; resume it with the"
      " same one, or choose another --workdir. Differing:"
    )
    raise config_lib.ConfigError("\n".join([head, *lines]))


def fingerprints(descriptions: Mapping[str, Any]) -> dict[str, str]:
  """The fingerprint of each split.

  Raises:
    ConfigError: these are no descriptions.
  """
  text = Text.of_values(descriptions)
  return {split: part.fingerprint for split, part in vars(text).items()}


def info(
  config: config_lib.RunConfig, descriptions: Mapping[str, Any]
) -> dict[str, Any]:
  """What a checkpoint says of its run; `refuse_changes` compares it."""
  described = config_lib.to_dict(config)
  return {"config": described, "fingerprints": fingerprints(descriptions)}


def is_described(workdir: epath.Path) -> bool:
  """Whether config.json and data.json can be read, or nothing can mend them."""
  try:
    records.read(workdir / CONFIG, config_lib.RunConfig)
    records.read(workdir / DATA, Text)
  except (OSError, ValueError):
    return not checkpoint.all_steps(workdir)
  return True


def harmful(
  old: config_lib.RunConfig, new: config_lib.RunConfig
) -> dict[str, tuple[Any, Any]]:
  """Fields in which two runs differ that should compute the same."""
  pairs = config_lib.differences(*map(config_lib.to_dict, (old, new)))
  return {name: pair for name, pair in pairs.items() if not is_harmless(name)}


def is_harmless(field: str) -> bool:
  """Whether a run may be resumed with another value of the field."""
  return config_lib.affects(field) <= _HARMLESS


def finished_summary(
  workdir: epath.Path, steps: int = 0
) -> dict[str, Any] | None:
  """The summary of a finished run of at least so many steps, or None."""
  try:
    summary = records.read_object(workdir / SUMMARY)
    return summary if Summary.of_values(summary).step >= steps else None
  except (OSError, ValueError):
    return None


def open_run(
  workdir: epath.Path,
  config: config_lib.RunConfig,
  descriptions: dict[str, Any],
  step: int,
  console: bool = True,
) -> metrics_lib.Writer:
  """Writes the description of the run, and opens its metrics."""
  if not processes.is_first():
    return metrics_lib.Writer()
  records.write(workdir / CONFIG, config)
  files.write(workdir / DATA, json.dumps(descriptions, indent=2) + "\n")
  (workdir / SUMMARY).unlink(missing_ok=True)
  lines = console_lib.Console(config.train.steps) if console else None
  return metrics_lib.Writer(workdir, step, lines)


def write_network(
  folder: epath.PathLike,
  config: config_lib.RunConfig,
  model: models.Transformer,
) -> None:
  """Writes a network as a finished run of no steps, of which others begin."""
  folder = epath.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  info = {"config": config_lib.to_dict(config), WEIGHTS_ONLY: True}
  saving = config_lib.CheckpointConfig(asynchronous=False)
  with saves.Saver(folder, saving) as saver:
    saver.save(0, {"model": model}, info)
  records.write(folder / CONFIG, config)
  count = sum(leaf.size for leaf in jax.tree.leaves(model))
  outcome = dict(name=config.name, status="finished", step=0, parameters=count)
  files.write(folder / SUMMARY, json.dumps(outcome, indent=2) + "\n")


def summarise(
  workdir: epath.Path,
  config: config_lib.RunConfig,
  *,
  status: str,
  step: int,
  parameters: int,
  seconds: float,
) -> dict[str, Any]:
  """The outcome, from the rows of the whole run; written when finished.

  A damaged line of metrics.jsonl is left out.
  """
  summary: dict[str, Any] = {
    "name": config.name,
    "status": status,
    "step": step,
    "parameters": parameters,
    "seconds": seconds,
  }
  if not processes.is_first():
    return summary
  rows = metrics_lib.read_rows(workdir, lenient=True)
  last = {row.get("function", row["split"]): row for row in rows}
  for name, place, value in (
    ("train_loss", "train", "loss"),
    ("skipped", "train", "skipped"),
    ("validation_loss", "validation", "loss"),
    ("bits_per_byte", "validation", "bits_per_byte"),
    ("compile_seconds", "train_step", "seconds"),
    ("peak_bytes", "train_step", "peak_bytes"),
  ):
    if place in last:
      summary[name] = last[place].get(value)
  train = [row for row in rows if row["split"] == "train"]
  for name in ("step_seconds", "tokens_per_second") if train else ():
    summary[name] = statistics.median(row[name] for row in train)
  spent = goodput.of_rows(rows)
  summary["goodput"] = dataclasses.asdict(spent)
  summary["tokens"] = account.tokens_of(config, step)
  summary["chip_hours"] = spent.chip_hours
  if status == "finished":
    files.write(workdir / SUMMARY, json.dumps(summary, indent=2) + "\n")
  return summary

# SPDX-License-Identifier: Apache-2.0
"""Where rows go beside metrics.jsonl: console, TensorBoard, wandb."""

from collections.abc import Mapping
import datetime
import importlib
import time
from typing import Any
import uuid

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax.common import files
from attnres_jax.common import text_table

Row = Mapping[str, Any]

# The columns of a train row that the console shows; the file has all.
_CONSOLE_TRAIN = (
    "loss", "grad_norm", "learning_rate", "tokens_per_second",
    "tokens_per_second_per_device", "model_flop_utilisation", "goodput",
    "step_seconds", "moe_max_violation",
)  # fmt: skip
# Of these events, too: where and with which versions is for the file.
_CONSOLE_EVENTS = {
  "start": None,
  "resume": ("lost_steps", "lost_seconds"),
  "compiled": ("function", "seconds"),
  "ready": None,
}


class Sink:
  """A destination for rows."""

  def write(self, row: Row) -> None:
    raise NotImplementedError

  def flush(self) -> None:
    pass

  def close(self) -> None:
    pass


def check_available(config: config_lib.LogConfig) -> None:
  """Refuses a run whose sinks are not installed, before anything is compiled.

  Raises:
    ConfigError: naming the field and the package it needs.
  """
  if config.tensorboard:
    _import("tensorboardX", "log.tensorboard", True, "false")
  if config.wandb_project:
    _import("wandb", "log.wandb_project", config.wandb_project, "''")


class Console(Sink):
  """Lines: every few seconds one of training, and all others."""

  def __init__(self, steps: int, *, file=None, seconds: float = 5.0):
    self._file = file
    self._steps = steps
    self._seconds = seconds
    self._next_line = 0.0

  def write(self, row: Row) -> None:
    if row["split"] == "train":
      if time.monotonic() >= self._next_line or row["step"] == self._steps:
        self._line(row)
        self._next_line = time.monotonic() + self._seconds
    elif row["split"] != "depth":
      if _CONSOLE_EVENTS.get(row.get("event", ""), row) is not None:
        self._line(row)

  def _line(self, row: Row) -> None:
    shown = _CONSOLE_EVENTS.get(row.get("event", "")) or row
    shown = _CONSOLE_TRAIN if row["split"] == "train" else shown
    values = [
      f"{name} {_short(row[name])}"
      for name in shown
      if name not in ("step", "split", "event")
      and row.get(name) is not None
      and not isinstance(row[name], list)
    ]
    if row["split"] == "train" and row.get("step_seconds"):
      seconds = (self._steps - row["step"]) * row["step_seconds"]
      values.append(f"left {datetime.timedelta(seconds=round(seconds))}")
    head = f"step {row['step']}/{self._steps} {row.get('event', row['split'])}"
    text = head + ": " + ", ".join(values) if values else head
    print(text_table.printable(text), file=self._file, flush=True)


class TensorBoard(Sink):
  """Scalars by split; each entry of a list becomes a separate scalar."""

  def __init__(self, folder: epath.Path, resume_step: int):
    tensorboardx = _import("tensorboardX", "log.tensorboard", True, "false")
    self._writer = tensorboardx.SummaryWriter(
      str(folder), purge_step=resume_step + 1
    )

  def write(self, row: Row) -> None:
    for name, value in _scalars(row).items():
      self._writer.add_scalar(name, value, row["step"])

  def flush(self) -> None:
    self._writer.flush()

  def close(self) -> None:
    self._writer.close()


class Wandb(Sink):
  """Writes scalars to one wandb run per workdir.

  wandb ignores rows of a step before its newest, and events of an asynchronous
  save arrive late. So the step is a separate metric, against which the others
  are drawn.
  """

  def __init__(self, workdir: epath.Path, config: config_lib.RunConfig):
    project = config.log.wandb_project
    wandb = _import("wandb", "log.wandb_project", project, "''")
    file = workdir / "wandb_run_id.txt"
    name = file.read_text().strip() if file.exists() else ""
    name = name or uuid.uuid4().hex[:8]
    files.write(file, name)
    self._run = wandb.init(
      project=project,
      name=config.name,
      id=name,
      resume="allow",
      config=config_lib.to_dict(config),
      settings=wandb.Settings(silent=True),
    )
    self._run.define_metric("*", step_metric="training_step")

  def write(self, row: Row) -> None:
    scalars = _scalars(row)
    if scalars:
      self._run.log(scalars | {"training_step": row["step"]})

  def close(self) -> None:
    self._run.finish()


def _import(package: str, field: str, value: Any, off: str) -> Any:
  try:
    return importlib.import_module(package)
  except ImportError:
    config_lib.fail(
      field, value, f"{off}, or `pip install {package}` (not installed here)"
    )


def _scalars(row: Row) -> dict[str, float]:
  """{"split/name": number}, with lists expanded, texts and gaps left out."""
  scalars = {}
  for name, value in row.items():
    items = (
      {f"{name}/{i:02d}": item for i, item in enumerate(value)}
      if isinstance(value, list)
      else {name: value}
    )
    for key, item in items.items():
      if isinstance(item, int | float) and key != "step":
        scalars[f"{row['split']}/{key}"] = item
  return scalars


def _short(value: Any) -> str:
  return f"{value:.4g}" if isinstance(value, float) else str(value)

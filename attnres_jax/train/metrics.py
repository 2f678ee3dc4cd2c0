# SPDX-License-Identifier: Apache-2.0
"""The sinks for metrics of a run: metrics.jsonl, console, TensorBoard, wandb.

A row is a flat dict with `step`, `split` (train, validation, depth or event)
and numbers, lists of numbers or short texts. Process 0 writes; the others have
a writer without sinks. metrics.jsonl is append-only and written row by row.
When a run resumes at step n, rows of later steps are removed first, because
they will be computed again with the same values. `event` rows stay: they are
the history of the run, including its interruptions. All other rows are in the
order of their steps, so the end of the file is enough to resume.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import datetime
import importlib
import json
import math
import sys
import time
from typing import Any, Protocol
import uuid

from etils import epath
import numpy as np
import tqdm

from attnres_jax import config as config_lib
from attnres_jax.common import files
from attnres_jax.common import text_table

Row = Mapping[str, Any]

FILE = "metrics.jsonl"
_TAIL_BYTES = 1 << 20
_END_BYTES = 1 << 16

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


class MetricsError(config_lib.RunError, ValueError):
  """A line of metrics.jsonl is damaged."""


class Sink(Protocol):
  """A destination for rows."""

  def write(self, row: Row) -> None: ...

  def flush(self) -> None: ...

  def close(self) -> None: ...


class Writer:
  """Passes every row to every sink.

  Only the first, metrics.jsonl, can end a run. Any other that fails is dropped
  with one line on stderr.
  """

  def __init__(self, sinks: Sequence[Sink]):
    self._sinks = list(sinks)

  def write(self, step: int, split: str, **values: Any) -> None:
    row = {"step": step, "split": split}
    row |= {name: _plain(value) for name, value in values.items()}
    self._all("write", row)

  def event(self, step: int, name: str, **values: Any) -> None:
    """An event, such as a save, a resume or a signal."""
    self.write(step, "event", event=name, **values)

  def flush(self) -> None:
    self._all("flush")

  def close(self) -> None:
    self._all("close")

  def _all(self, method: str, *args: Any) -> None:
    for index, sink in enumerate(list(self._sinks)):
      try:
        getattr(sink, method)(*args)
      except Exception as error:
        if not index:
          raise
        self._sinks.remove(sink)
        _say_dropped(type(sink).__name__, error)


def make_writer(
  workdir: epath.PathLike,
  config: config_lib.RunConfig,
  *,
  resume_step: int = 0,
  primary: bool = True,
  console: bool = True,
) -> Writer:
  """The sinks that the config requests, on the primary process.

  Args:
    workdir: of the run; its metrics.jsonl is appended to.
    config: of the run; `config.log` selects the sinks.
    resume_step: rows after this step are removed from metrics.jsonl.
    primary: whether this process writes.
    console: whether it prints rows, too.
  """
  if not primary:
    return Writer([])
  workdir = epath.Path(workdir)
  sinks: list[Sink] = [JsonlSink(workdir / FILE, keep_through=resume_step)]
  if console:
    sinks.append(Console(config.train.steps, resume_step))
  for wanted, make in (
    (
      config.log.tensorboard,
      lambda: _TensorBoardSink(workdir / "tensorboard", resume_step),
    ),
    (config.log.wandb_project, lambda: _WandbSink(workdir, config)),
  ):
    try:
      sinks += [make()] if wanted else []
    except Exception as error:
      _say_dropped("a logger", error)
  return Writer(sinks)


def _say_dropped(name: str, error: Exception) -> None:
  text = " ".join(f"{type(error).__name__}: {error}".split())
  with contextlib.suppress(OSError, ValueError):
    print(
      f"warning: {name.strip('_')} fails and is left out of this attempt"
      f" ({text}); {FILE} has all rows",
      file=sys.stderr,
      flush=True,
    )


def check_available(config: config_lib.LogConfig) -> None:
  """Refuses a run whose sinks are not installed, before anything is compiled.

  Raises:
    ConfigError: naming the field and the package it needs.
  """
  if config.tensorboard:
    _import("tensorboardX", "log.tensorboard", True, "false")
  if config.wandb_project:
    _import("wandb", "log.wandb_project", config.wandb_project, "''")


def read_rows(
  workdir: epath.PathLike,
  split: str | None = None,
  on_damage: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
  """The rows of a run, or of one split; [] if there are none.

  A last line without its end was truncated by a kill and is not a row.

  Args:
    workdir: of the run.
    split: whose rows; None takes all.
    on_damage: called with file, line and what is wrong about it, for each line
      that is left out.

  Raises:
    MetricsError: a line is damaged, and there is no `on_damage`.
  """
  path = epath.Path(workdir) / FILE
  try:
    lines = files.read(path).split(b"\n")
  except FileNotFoundError:
    return []
  whole = list(enumerate(lines[:-1], start=1))
  if split is not None:
    whole = [(n, line) for n, line in whole if split.encode() in line]
  rows = []
  for number, line in whole:
    try:
      rows.append(_parse(line))
    except ValueError as error:
      if on_damage is None:
        raise _damaged(f"{path}:{number}", error) from error
      on_damage(f"{path}:{number}: not a row of metrics ({error})")
  return [row for row in rows if split in (None, row["split"])]


def _damaged(where: object, error: ValueError) -> MetricsError:
  return MetricsError(
    f"{where}: not a row of metrics ({error}); restore the file, or remove"
    " this line to do without it"
  )


def last_rows(workdir: epath.PathLike) -> dict[str, dict[str, Any]]:
  """The last row of each split within the end of metrics.jsonl.

  Raises:
    MetricsError: a line is damaged.
  """
  path = epath.Path(workdir) / FILE
  try:
    end = files.read(path, -_END_BYTES)
  except FileNotFoundError:
    return {}
  # Neither a last line without its end nor a first one without its start.
  lines = end.split(b"\n")[:-1]
  cut = len(end) == _END_BYTES
  found = {}
  for number, line in enumerate(lines[cut:], start=1):
    try:
      row = _parse(line)
    except ValueError as error:
      # Lines of a long file are not counted.
      where = path if cut else f"{path}:{number}"
      raise _damaged(where, error) from error
    found[row["split"]] = row
  return found


@dataclasses.dataclass(frozen=True)
class Tail:
  """The end of metrics.jsonl, after the last row that a resumed run keeps.

  Attributes:
    rows: after it: of later steps, or events.
    lines: the same, as written in the file.
    last_step: of the row before them; 0 where there is none.
    kept: bytes of the file before them.
    whole: whether there is nothing else after `kept`.
  """

  rows: list[dict[str, Any]]
  lines: list[bytes]
  last_step: int
  kept: int
  whole: bool


def read_tail(workdir: epath.PathLike, step: int) -> Tail:
  """All rows after the last one, ignoring events, of a step up to `step`.

  Lines that are not rows are left out; their steps will be computed again.
  """
  path = epath.Path(workdir) / FILE
  size = path.stat().length if path.exists() else 0
  length = min(size, _TAIL_BYTES)
  while True:
    start, lines = size - length, [b""]
    if size:
      lines = files.read(path, start)[:length].split(b"\n")
    whole = not lines.pop()
    found: list[tuple[bytes, dict[str, Any]]] = []
    last_step = None
    # What comes first is part of a line, unless it is the start of the file.
    while last_step is None and len(lines) > (start > 0):
      try:
        row = _parse(lines[-1])
      except ValueError:
        whole = False
        lines.pop()
        continue
      if row["split"] != "event" and row["step"] <= step:
        last_step = row["step"]
      else:
        found.append((lines.pop(), row))
    if last_step is not None or not start:
      break
    length = min(size, 4 * length)
  found.reverse()
  return Tail(
    rows=[row for _, row in found],
    lines=[line for line, _ in found],
    last_step=last_step or 0,
    kept=start + sum(len(line) + 1 for line in lines),
    whole=whole,
  )


class JsonlSink:
  """One JSON object per line.

  On a local disk, every row is appended at once. Object stores cannot append,
  so there the file is rewritten at every flush, which the training loop
  requests before each checkpoint and at the end.
  """

  def __init__(self, path: epath.Path, keep_through: int):
    self._path = path
    self._remote = files.is_remote(path)
    self._content = bytearray()
    tail = read_tail(path.parent, keep_through)
    events = [
      line
      for line, row in zip(tail.lines, tail.rows)
      if row["split"] == "event"
    ]
    if self._remote or len(events) < len(tail.lines) or not tail.whole:
      old = files.read(path)[: tail.kept] if path.exists() else b""
      self._content += old + b"".join(line + b"\n" for line in events)
      files.write(path, bytes(self._content))
    if not self._remote:
      self._content.clear()
      # Unbuffered: a row that a full disk refused must not come back later.
      self._file = open(path, "ab", buffering=0)

  def write(self, row: Row) -> None:
    line = _dump(row).encode()
    if self._remote:
      self._content += line
      return
    while line:
      line = line[self._file.write(line) :]

  def flush(self) -> None:
    if self._remote:
      files.write(self._path, bytes(self._content))

  def close(self) -> None:
    self.flush()
    if not self._remote:
      self._file.close()


class Console:
  """A progress bar on a terminal, plain lines elsewhere.

  Evaluations and events always get a line. Train rows update the bar or,
  without a bar, are printed every few seconds.
  """

  def __init__(
    self, steps: int, resume_step: int, *, file=None, seconds: float = 5.0
  ):
    # The bar writes terminal codes itself.
    self._file = text_table.unfiltered(file or sys.stdout)
    self._steps = steps
    self._seconds = seconds
    self._next_line = 0.0
    self._bar = None
    if self._file.isatty():
      self._bar = tqdm.tqdm(
          total=steps, initial=resume_step, file=self._file, unit="step",
          dynamic_ncols=True,
      )  # fmt: skip

  def write(self, row: Row) -> None:
    if row["split"] == "train":
      self._train(row)
    elif row["split"] != "depth":
      if _CONSOLE_EVENTS.get(row.get("event", ""), row) is not None:
        self._line(row)

  def flush(self) -> None:
    self._file.flush()

  def close(self) -> None:
    if self._bar is not None:
      self._bar.close()
    self._file.flush()

  def _train(self, row: Row) -> None:
    if self._bar is not None:
      self._bar.set_postfix_str(
        f"loss {_short(row.get('loss'))} |"
        f" {_short(row.get('tokens_per_second'))} tokens/s",
        refresh=False,
      )
      self._bar.update(row["step"] - self._bar.n)
    elif time.monotonic() >= self._next_line or row["step"] == self._steps:
      self._line(row)
      self._next_line = time.monotonic() + self._seconds

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
    text = text_table.printable(text)
    if self._bar is not None:
      self._bar.write(text, file=self._file)
    else:
      print(text, file=self._file, flush=True)


class _TensorBoardSink:
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


class _WandbSink:
  """The same scalars, as one wandb run per workdir.

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

  def flush(self) -> None:
    pass

  def close(self) -> None:
    self._run.finish()


def _import(package: str, field: str, value: Any, off: str) -> Any:
  try:
    return importlib.import_module(package)
  except ImportError:
    config_lib.fail(
      field, value, f"{off}, or `pip install {package}` (not installed here)"
    )


def _plain(value: Any) -> Any:
  """Arrays and numpy scalars to JSON values; nan and inf to None."""
  if hasattr(value, "dtype"):
    value = np.asarray(value).tolist()
  if isinstance(value, list | tuple):
    return [_plain(item) for item in value]
  if isinstance(value, Mapping):
    return {name: _plain(item) for name, item in value.items()}
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


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


def _dump(row: Row) -> str:
  return json.dumps(row, allow_nan=False) + "\n"


def _parse(line: bytes) -> dict[str, Any]:
  """The row on a line.

  Raises:
    ValueError: the line is not a row.
  """
  try:
    row = json.loads(line)
  except RecursionError as error:
    raise ValueError("nested too deeply") from error
  if not isinstance(row, dict):
    raise ValueError("no object")
  if type(row.get("step")) is not int or type(row.get("split")) is not str:
    raise ValueError("without step or split")
  return row


def _short(value: Any) -> str:
  return f"{value:.4g}" if isinstance(value, float) else str(value)

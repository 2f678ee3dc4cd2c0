# SPDX-License-Identifier: Apache-2.0
"""Runs of a sweep as rows: what was trained, on which data, and the outcome.

One row per finished run, with everything that a fit or a table needs, so that
results can be committed and read without the folder they come from.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
import functools
import itertools
from typing import Any

from etils import epath
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import flops
from attnres_jax.flops import parameters
from attnres_jax.scaling import architecture
from attnres_jax.scaling import compute as compute_lib
from attnres_jax.scaling import fit as fit_lib
from attnres_jax.scaling import grid
from attnres_jax.sweep import damage
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import state as state_lib
from attnres_jax.train import goodput
from attnres_jax.train import run_folder

Row = Mapping[str, Any]

# The share of a run's steps that other programs disturb least.
_QUICKEST = 0.1
# Columns of the attempt that finished a run.
_ORIGIN = ("hardware", "commit", "python", "jax")
# Columns before the results that differ between runs of one size.
_WITHIN_SIZE = ("run", *grid.WITHIN_SETTING)


def of_run(
  folder: epath.PathLike,
  run: grid.Run,
  state: state_lib.State,
  metric_rows: Sequence[Row],
) -> dict[str, Any]:
  """The row of a finished run.

  Every override has a column of its name; `active_params` excludes embedding
  and head; compute is in PFLOP/s-days; `step_bytes` are the arguments and
  temporaries of the compiled step on one device. `step_seconds` is the median
  of the logged ones, and a tenth of them is below `quick_step_seconds`: what a
  step takes if no other program is on the machine.

  Raises:
    DamagedError: a file of the run is missing or damaged.
  """
  workdir = epath.Path(folder) / run.name
  summary, fingerprint = check(workdir)
  config = folder_lib.run_config(run)
  with damage.of_file(workdir / "metrics.jsonl"):
    spent = goodput.of_rows(metric_rows)
    start = [r for r in metric_rows if r.get("event") in ("start", "resume")][
      -1
    ]
    origin = {
      "device": f"{start['devices']} x {start['device_kind']}",
      **{name: start.get(name, "unknown") for name in _ORIGIN},
    }
    evaluated = [row for row in metric_rows if row["split"] == "validation"]
    last_weights = (evaluated or [{}])[-1].get("last_weights_loss")
    memory = step_bytes(metric_rows)
    steps = [r["step_seconds"] for r in metric_rows if r["split"] == "train"]
    quick = float(np.quantile(steps, _QUICKEST)) if steps else None
  outcome = {
    "validation_loss": f"{summary.validation_loss:.6f}",
    "train_loss": _number(summary.train_loss, ".6f"),
    "peak_lr": config.optim.peak_lr,
    "step_seconds": _number(summary.step_seconds, ".4g"),
    "quick_step_seconds": _number(quick, ".4g"),
    "step_bytes": _number(memory, "d"),
  }
  if last_weights is not None:
    # Then `validation_loss` belongs to averaged weights.
    outcome["last_weights_loss"] = f"{last_weights:.6f}"
  # The time of one step has its own column.
  times = {
    "training" if name == "step" else name: value
    for name, value in spent.seconds.items()
  }
  return {
    "run": run.name,
    **run.overrides,
    "residual": config.model.residual.name,
    "seed": config.seed,
    **compute_of(config),
    **outcome,
    "seconds": f"{state.seconds:.1f}",
    "chip_hours": _number(state.chip_seconds / 3600 or None, ".4g"),
    "attempts": state.attempts,
    **{f"{name}_seconds": f"{value:.1f}" for name, value in times.items()},
    "lost_steps": spent.lost_steps,
    **origin,
    "data": fingerprint,
  }


def check(workdir: epath.Path) -> tuple[run_folder.Summary, str]:
  """The summary of a finished run, and the fingerprint of its data.

  Raises:
    DamagedError: a file is missing or damaged.
  """
  path = workdir / run_folder.SUMMARY
  try:
    summary = damage.read(path, run_folder.Summary)
    text = damage.read(workdir / run_folder.DATA, run_folder.Text)
  except FileNotFoundError as error:
    raise damage.DamagedError(
      f"{error.filename or path}: missing from a finished run"
    ) from error
  if summary.validation_loss is None:
    raise damage.DamagedError(f"{path}: validation_loss is not finite")
  return summary, text.train.fingerprint[:12]


def step_bytes(metric_rows: Sequence[Row]) -> int | None:
  """Bytes of the step as last compiled; None where JAX cannot tell."""
  compiled = [r for r in metric_rows if r.get("function") == "train_step"]
  last = compiled[-1] if compiled else {}
  sizes: list[Any] = [
    last.get(name) for name in ("argument_bytes", "temporary_bytes")
  ]
  return None if None in sizes else sum(sizes)


def compute_of(config: config_lib.RunConfig) -> dict[str, Any]:
  """The columns that need no training: parameters, tokens, compute."""
  length = config.data.sequence_length
  tokens = config.train.steps * config.data.batch_size * length
  per_token, count = counts(config.model, length)
  computes = {
    f"compute_{name}": compute_lib.pflops_days(per_token, tokens, name)
    for name in compute_lib.COUNTINGS
  }
  return {"active_params": count.active, "tokens": tokens} | computes


@functools.cache
def counts(
  model: config_lib.ModelConfig, length: int
) -> tuple[flops.FlopsPerToken, parameters.Count]:
  """FLOPs per token, and parameters without embedding and head.

  Programs are traced to count them: once, for the many looks at a sweep.
  """
  return flops.flops_per_token(model, length), architecture.count(model)


def by_scheme(
  rows: Iterable[Row],
  counting: str,
  column: str = "residual",
  size: Callable[[Row], Hashable] | None = None,
) -> dict[str, fit_lib.Runs]:
  """Rows in the form of `scaling.fit`, by the schemes in a column.

  A size is by default the overrides except scheme, seeds and optimizer, and so
  the same for all schemes, whose parameters and learning rates may differ.

  Raises:
    ConfigError: a loss is no positive number.
  """
  groups: dict[str, list[Row]] = {}
  for row in rows:
    groups.setdefault(row[column], []).append(row)
  return {
    scheme: fit_lib.Runs(
      compute=[float(row[f"compute_{counting}"]) for row in several],
      loss=list(map(fit_lib.loss_of, several)),
      size=tuple(map(size or _size, several)),
      seed=tuple(int(row["seed"]) for row in several),
    )
    for scheme, several in groups.items()
  }


def _size(row: Row) -> tuple[str, ...]:
  overrides = itertools.takewhile(lambda name: name != "active_params", row)
  return tuple(
    f"{name}={row[name]}"
    for name in overrides
    if name not in _WITHIN_SIZE
    and not name.startswith("optim.")
    and row[name] != ""
  )


def _number(value: float | None, form: str) -> str:
  """Empty if a run, or its part after a branch, was too short for a row."""
  return "" if value is None else f"{value:{form}}"

# SPDX-License-Identifier: Apache-2.0
"""A run from its configuration to its summary: prepare, restore, step, save.

A run is a folder: config.json (resolved), data.json (what was read, with its
hash), metrics.jsonl, checkpoints/, and summary.json once it is finished. The
same call on the same folder resumes the run. The result is the same as without
an interruption (bit for bit on CPU): the checkpoint contains model, optimiser
and data position, and steps share no other state. One process, or one group of
processes, works in a folder at a time; see `claims`.

`Run.steps` is the loop, `train_and_evaluate` what happens before and after it.
"""

from collections.abc import Callable, Mapping
import contextlib
import dataclasses
import functools
import time
from typing import Any

from etils import epath
import jax

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.common import files
from attnres_jax.common import plans as plans_lib
from attnres_jax.common import processes
from attnres_jax.common import sharding
from attnres_jax.train import account
from attnres_jax.train import checkpoint
from attnres_jax.train import claims
from attnres_jax.train import compiling
from attnres_jax.train import evaluate
from attnres_jax.train import history as history_lib
from attnres_jax.train import metrics as metrics_lib
from attnres_jax.train import prepare as prepare_lib
from attnres_jax.train import run_folder
from attnres_jax.train import saves as saves_lib
from attnres_jax.train import signals
from attnres_jax.train import start as start_lib
from attnres_jax.train import step_log
from attnres_jax.train import train_state
from attnres_jax.train import watch


@dataclasses.dataclass
class Run:
  """A run that trains.

  Attributes:
    config: of the run.
    mesh: of its devices.
    state: weights and optimiser.
    step: steps completed.
    train_step: (state, batch) -> (state, metrics), compiled.
    measure_depth: () -> (model, batch) -> the series over depth, compiled when
      first called.
    evaluate: (state, whether it is the end) -> row of the validation split.
    batches: of the training split, next to be read.
    saves: of checkpoints.
    info: that checkpoints have besides the position in the data.
    writer: of rows.
    log: of the steps whose metrics are still on the device.
    profiler: of `train.profile_steps`.
    stop: the signal to stop.
  """

  config: config_lib.RunConfig
  mesh: jax.sharding.Mesh
  state: train_state.TrainState
  step: int
  train_step: Callable[..., Any]
  measure_depth: Callable[[], Callable[..., Any]]
  evaluate: Callable[[train_state.TrainState, bool], Mapping[str, float]]
  batches: data.Batches
  saves: saves_lib.Saver
  info: dict[str, Any]
  writer: metrics_lib.Writer
  log: step_log.StepLog
  profiler: watch.Profiler
  stop: signals.StopSignal

  def steps(self) -> bool:
    """Trains to the last step; True if a signal stopped it before."""
    while self.step < self.config.train.steps:
      if self.stop.requested(self.step):
        return True
      with self.profiler.step(self.step + 1, self.log):
        with self.log.waiting_for_data():
          batch = sharding.shard_batch(next(self.batches), self.mesh)
        self.state, metrics = self.train_step(self.state, batch)
        self.step += 1
        self.log.add(self.step, metrics)
      self._measure(batch)
      if self._due(self.config.checkpoint.every_steps):
        with self.log.paused():
          self.save()
    self.log.drain()
    return False

  def save(self) -> None:
    """Starts a save of the state and the position in the data."""
    if self.step:
      info = self.info | {"data": self.batches.get_state()}
      self.saves.save(self.step, self.state, info)

  def _measure(self, batch: Mapping[str, jax.Array]) -> None:
    """Writes the rows over depth and of the validation split that are due."""
    train = self.config.train
    if train.depth_every and self._due(train.depth_every):
      with self.log.paused() as metrics:
        measure = self.measure_depth()
        start = time.perf_counter()
        series = jax.device_get(measure(self.state.model, batch))
        series["seconds"] = time.perf_counter() - start
        series["grad_norm_L"] = metrics["grad_norm_L"]
        self.writer.write(self.step, "depth", **series)
    if self._due(train.eval_every):
      with self.log.paused():
        row = self.evaluate(self.state, self._is_last)
        self.writer.write(self.step, "validation", **row)

  def _due(self, every: int) -> bool:
    return self._is_last or bool(every) and self.step % every == 0

  @property
  def _is_last(self) -> bool:
    return self.step == self.config.train.steps


def train_and_evaluate(
  config: config_lib.RunConfig,
  workdir: epath.PathLike,
  *,
  claim: claims.Claim | None = None,
  plans: epath.PathLike = plans_lib.FILE,
) -> dict[str, Any]:
  """Trains to `config.train.steps`, or until a signal; all processes call it.

  Args:
    config: of the run.
    workdir: its folder, local, gs:// or s3://; may hold an interrupted run.
    claim: of the folder, if the caller holds one; the caller releases it.
    plans: the file of plans, for `optim.accumulate_steps=0`.

  Returns:
    The summary: status ("finished", or "stopped" by a signal), step, the last
    train and validation losses, and the resources used.

  Raises:
    ConfigError: the configuration is invalid or not that of the folder, or
      another process is using the folder (`claims.HeldError`).
    CheckpointError: there are checkpoints, but none can be used, or that of
      `train.start_from` cannot be read.
    DiskFullError: with the path and the space needed; nothing is lost.
    NonFiniteError: a loss or gradient was not finite and `train.on_nan` is
      "stop"; the last checkpoint is from before that step.
  """
  start = time.perf_counter()
  workdir = epath.Path(workdir)
  with contextlib.ExitStack() as stack:
    stack.enter_context(files.explaining_full_disk(workdir))
    stop = stack.enter_context(signals.StopSignal())
    prepared = prepare_lib.prepare(config, plans)
    run_folder.refuse_foreign("--workdir", workdir)
    stack.enter_context(claims.held(workdir, claim))
    past = _restore(workdir, prepared)
    if not isinstance(past, history_lib.History):
      return past
    # JAX stops all processes one step after the last that it was told, even if
    # the signal comes while they compile.
    stop.requested(past.step)
    run = _begin(stack, workdir, prepared, past, stop, start)
    stop.begin_work()
    try:
      stopped = run.steps()
    except step_log.NonFiniteError as error:
      error.add_note(f"last good checkpoint: {run.saves.newest()}")
      raise
    if stopped:
      run.log.drain()
      run.save()
    run.saves.wait()
    if stopped:
      run.writer.event(run.step, "stopped", signal=stop.received)
    summary = run_folder.summarise(
      workdir,
      run.config,
      status="stopped" if stopped else "finished",
      step=run.step,
      parameters=prepared.program.parameters,
      seconds=time.perf_counter() - start,
    )
    if summary.get("skipped"):
      # Not finite, with train.on_nan=skip.
      run.writer.event(run.step, "skipped steps", skipped=summary["skipped"])
    return summary


def _restore(
  workdir: epath.Path, prepared: prepare_lib.Prepared
) -> history_lib.History | dict[str, Any]:
  """The folder's history, or the summary of a run that is finished."""
  config = prepared.program.config
  run_folder.refuse_changes(workdir, config, prepared.descriptions)
  summary = run_folder.finished_summary(workdir, config.train.steps)
  if summary is not None and run_folder.is_described(workdir):
    return summary
  restored = checkpoint.restore_latest(workdir, prepared.program.abstract_state)
  rows = metrics_lib.read_rows(workdir, lenient=True)
  missing = history_lib.missing_checkpoint(workdir, restored, rows)
  return history_lib.History(restored, rows, missing)


def _begin(
  stack: contextlib.ExitStack,
  workdir: epath.Path,
  prepared: prepare_lib.Prepared,
  past: history_lib.History,
  stop: signals.StopSignal,
  start: float,
) -> Run:
  """Opens the files of the run and compiles its first program.

  The stack closes what is opened; `start` is when the attempt began.
  """
  program = prepared.program
  config, mesh = program.config, program.mesh
  datasets, step, restored = prepared.datasets, past.step, past.restored
  continues = config.train.start_from and not restored
  source = start_lib.find(config) if continues else None
  writer = run_folder.open_run(workdir, config, prepared.descriptions, step)
  stack.callback(writer.close)
  if processes.is_first():
    counts = datasets["train"].part_tokens
    lines = account.start_lines(config, workdir, program.parameters, counts)
    print(*lines, sep="\n", flush=True)
  past.report(writer, program)
  train_step, eval_step, depth_step = _compiled(program, writer, step)
  if restored:
    state = restored.state
  elif source:
    state, continued = source.load(program)
    facts = dict(run=source.run, of_step=source.step, optimiser=continued)
    writer.event(step, "started from", **facts)
  else:
    state = program.init_state()
  batches = datasets["train"].batches()
  stack.callback(batches.close)
  if restored:
    batches.set_state(restored.info["data"])
  saves = saves_lib.Saver(
    workdir, config.checkpoint, writer, program.parameters
  )
  stack.enter_context(saves)
  writer.event(step, "ready", seconds=time.perf_counter() - start)
  stack.enter_context(watch.collector_frozen())
  profiler = watch.Profiler(config, workdir, writer)
  stack.callback(profiler.close)
  return Run(
    config=config,
    mesh=mesh,
    state=state,
    step=step,
    train_step=train_step,
    measure_depth=depth_step,
    evaluate=_evaluation(prepared, eval_step),
    batches=batches,
    saves=saves,
    info=run_folder.info(config, prepared.descriptions),
    writer=writer,
    log=step_log.StepLog(config, writer, mesh, start=start),
    profiler=profiler,
    stop=stop,
  )


def _compiled(
  program: train_state.Program, writer: metrics_lib.Writer, step: int
) -> tuple[Any, Callable[[], Any], Callable[[], Any]]:
  """The step, and functions that compile evaluation and depth step once.

  Several processes compile all at once, while a signal still ends them at once;
  one process those two when they are first used, after the first loss.
  """
  state, batch = program.abstract_state, program.batch_shapes
  make = functools.partial(compiling.compile_program, writer, step)
  later = lambda name, function: functools.cache(
    lambda: make(name, function, state.model, batch)
  )
  train_step = make("train_step", program.train_step, state, batch)
  eval_step = later("eval_step", program.eval_step)
  depth_step = later("depth_step", program.depth_step)
  if jax.process_count() > 1:
    eval_step()
    if program.config.train.depth_every:
      depth_step()
  return train_step, eval_step, depth_step


def _evaluation(
  prepared: prepare_lib.Prepared, eval_step: Callable[[], Callable[..., Any]]
) -> Callable[[train_state.TrainState, bool], dict[str, float]]:
  """Losses of the averaged weights once there are any, else of the last."""
  program, datasets = prepared.program, prepared.datasets
  train = program.config.train
  at_end = train.eval_batches
  before = min(train.eval_sample or at_end, at_end)
  evaluator = functools.cache(
    lambda count: evaluate.Evaluator(
      count,
      datasets["validation"],
      program.mesh,
      eval_step(),
      program.config.data.tokenizer == "bytes",
    )
  )

  def losses(state: train_state.TrainState, last: bool) -> dict[str, float]:
    evaluate_model = evaluator(at_end if last else before)
    row = evaluate_model(state.model)
    if not train_state.has_average(train, int(state.step)):
      return row
    averaged = evaluate_model(state.average)
    seconds = row["seconds"] + averaged["seconds"]
    return averaged | {"last_weights_loss": row["loss"], "seconds": seconds}

  return losses

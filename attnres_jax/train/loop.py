# SPDX-License-Identifier: Apache-2.0
"""A run from its configuration to its summary: build, restore, step, save.

A run is a folder: config.json (resolved), data.json (what was read, with its
hash), metrics.jsonl, checkpoints/, and summary.json once it is finished. The
same call on the same folder resumes the run. The result is the same as without
an interruption (bit for bit on CPU): the checkpoint contains model, optimiser
and data position, and steps share no other state. One process, or one group of
processes, works in a folder at a time; see `claims`.

Read `train_and_evaluate` top down; the rest of the file is its helpers.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import functools
import platform
import threading
import time
from typing import Any

from etils import epath
import jax

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.common import compiler
from attnres_jax.common import environment
from attnres_jax.common import files
from attnres_jax.common import plans as plans_lib
from attnres_jax.common import sharding
from attnres_jax.train import account
from attnres_jax.train import checkpoint
from attnres_jax.train import claims
from attnres_jax.train import evaluate
from attnres_jax.train import goodput
from attnres_jax.train import metrics as metrics_lib
from attnres_jax.train import run_folder
from attnres_jax.train import signals
from attnres_jax.train import start as start_lib
from attnres_jax.train import step_log
from attnres_jax.train import train_state
from attnres_jax.train import watch

# Between two lines about a program that compiles.
_SAY_SECONDS = 5.0


def train_and_evaluate(
  config: config_lib.RunConfig,
  workdir: epath.PathLike,
  *,
  resume_with_changed_config: bool = False,
  text_of: tuple[str, Mapping[str, str]] | None = None,
  claim: claims.Claim | None = None,
  leave: Callable[[int], None] | None = None,
  plans: epath.PathLike = plans_lib.FILE,
) -> dict[str, Any]:
  """Trains to `config.train.steps`, or until a signal; all processes call it.

  Args:
    config: of the run.
    workdir: its folder, local, gs:// or s3://; may hold an interrupted run.
    resume_with_changed_config: resume even if the folder's configuration or
      data differ in more than `run_folder.HARMLESS`.
    text_of: a run that has to have read the same text, and the fingerprints of
      its splits.
    claim: of the folder, if the caller holds one; the caller releases it.
    leave: ends the process on a signal before the first step, when there is
      nothing to save and compiling cannot be interrupted. It receives the step
      of the last checkpoint. With None, the run stops after compiling.
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
  step, held = 0, None

  def leave_early() -> None:
    if held is not None:
      held.release()
    assert leave is not None
    leave(step)

  with contextlib.ExitStack() as stack:
    stack.enter_context(files.explaining_full_disk(workdir))
    stop = signals.StopSignal(leave_early if leave else None)
    stack.enter_context(stop)

    # Everything that can be wrong is detected here, before any compilation.
    metrics_lib.check_available(config.log)
    tokenizer = data.make_tokenizer(config.data)
    config = config.with_vocab_size(tokenizer.vocab_size)
    config = plans_lib.resolve(config, jax.devices(), plans)
    mesh = sharding.make_mesh(config.mesh)
    datasets = _open_data(config, mesh)
    data.check(config, datasets["train"])
    are_bytes = config.data.tokenizer == "bytes"
    separator_id = tokenizer.separator_id if are_bytes else None
    program = train_state.make_program(config, mesh)
    parameters = sum(
      leaf.size for leaf in jax.tree.leaves(program.abstract_state.model)
    )
    environment.check_size(program.abstract_state)
    descriptions = {split: d.describe() for split, d in datasets.items()}
    # Before any check that hosts with another text would fail alone.
    text = str(run_folder.fingerprints(descriptions))
    if not checkpoint.all_processes_agree(claims.of_process_0(text) == text):
      where = config.data.path or list(config.data.paths)
      config_lib.fail("data.path", where, "the same text on all hosts")
    if text_of is not None:
      run_folder.refuse_other_text(config, descriptions, *text_of)
    run_folder.refuse_foreign("--workdir", workdir)
    begun = stack.enter_context(run_folder.removed_if_refused(workdir))
    held = stack.enter_context(claims.held(workdir, claim))
    changes = run_folder.changes(workdir, config, descriptions)
    if changes and not resume_with_changed_config:
      raise config_lib.ConfigError(run_folder.refusal(workdir, changes))
    damaged = run_folder.damaged(workdir)
    summary = run_folder.finished_summary(workdir, config)
    if summary is not None and not damaged:
      return summary

    restored = checkpoint.restore_latest(workdir, program.abstract_state)
    step = restored.step if restored else 0
    # JAX stops all processes one step after the last that it was told, even if
    # the signal comes while they compile.
    stop.requested(step)
    continues = config.train.start_from and not restored
    source = start_lib.find(config) if continues else None
    tail = metrics_lib.read_tail(workdir, step)
    missing = run_folder.missing_checkpoint(workdir, restored, tail)
    writer = run_folder.open_run(workdir, config, descriptions, step)
    stack.callback(writer.close)
    _report_found(writer, step, restored, missing, tail, damaged, changes)
    abstract_model = program.abstract_state.model
    lost = goodput.lost(tail.rows, step)
    reads = abstract_model.residual.form
    if jax.process_index() == 0:
      counts = datasets["train"].part_tokens
      for line in account.start_lines(config, workdir, parameters, counts):
        print(line, flush=True)
    report_start(writer, mesh, step, restored, lost, reads)

    train_step = _compile(
        writer, step, "train_step", program.train_step,
        program.abstract_state, program.batch_shapes,
    )  # fmt: skip
    # These two when they are first used: the first loss is not theirs.
    later = lambda name, function: functools.cache(
      lambda: _compile(
        writer, step, name, function, abstract_model, program.batch_shapes
      )
    )
    eval_step = later("eval_step", program.eval_step)
    depth_step = later("depth_step", program.depth_step)
    if jax.process_count() > 1:
      # All processes at once, and while a signal still ends them at once.
      eval_step()
      if config.train.depth_every:
        depth_step()

    if restored:
      state = restored.state
    elif source:
      state, continued = source.load(program)
      facts = dict(run=source.run, of_step=source.step, optimiser=continued)
      writer.event(step, "started from", **facts)
    else:
      state = program.init_state()
    evaluator_of = functools.cache(
      lambda count: evaluate.Evaluator(
        count, datasets["validation"], mesh, eval_step(), separator_id
      )
    )
    sample, whole = config.train.eval_sample, config.train.eval_batches
    before_end = sample if 0 < sample < whole else whole
    batches = _batches_from(datasets["train"], config, restored)
    stack.callback(batches.close)
    info = {
      "config": config_lib.to_dict(config),
      "fingerprints": run_folder.fingerprints(descriptions),
    }
    # Orbax's 20 minutes, and four hours for 48B parameters. If a save fails in
    # one process, that and the others wait for each other so long.
    limit = 1200 + parameters // 4_000_000
    saves = stack.enter_context(Saves(workdir, config, info, writer, limit))
    writer.event(step, "ready", seconds=time.perf_counter() - start)
    collector = stack.enter_context(watch.collector_frozen())
    stalls = watch.StallWatch(collector)
    log = step_log.StepLog(config, writer, mesh, start=start, stalls=stalls)
    profiler = watch.Profiler(config, workdir)
    stack.callback(profiler.close)
    stopped = False
    stop.begin_work()
    begun()
    try:
      while step < config.train.steps:
        stopped = stop.requested(step)
        if stopped:
          break
        if profiler.starts_at(step + 1):
          log.drain()
          with log.paused():
            profiler.start()
        with profiler.step(step + 1):
          with log.waiting_for_data():
            batch = sharding.shard_batch(next(batches), mesh)
          state, metrics = train_step(state, batch)
        step += 1
        log.add(step, metrics, saving=saves.writing)

        last = step == config.train.steps
        if profiler.ends_at(step):
          log.drain()
          with log.paused():
            writer.event(step, "profiled", folder=profiler.stop())
        every = config.train.depth_every
        if every and (last or _due(step, every)):
          grad_norm_L = log.drain()["grad_norm_L"]
          with log.paused():
            measure = depth_step()
            began = time.perf_counter()
            series = jax.device_get(measure(state.model, batch))
            series["seconds"] = time.perf_counter() - began
            writer.write(step, "depth", **series, grad_norm_L=grad_norm_L)
        if last or _due(step, config.train.eval_every):
          log.drain()
          with log.paused():
            evaluator = evaluator_of(whole if last else before_end)
            writer.write(
              step, "validation", **_evaluate(evaluator, state, config)
            )
        if last or _due(step, config.checkpoint.every_steps):
          log.drain()
          with log.paused():
            saves.save(step, state, batches.get_state())
      log.drain()
    except step_log.NonFiniteError as error:
      error.add_note(f"last good checkpoint: {saves.newest()}")
      raise
    if stopped:
      saves.save(step, state, batches.get_state())
    saves.wait()
    if stopped:
      writer.event(step, "stopped", signal=stop.received)
    summary = run_folder.summarise(
      workdir,
      config,
      status="stopped" if stopped else "finished",
      step=step,
      parameters=parameters,
      seconds=time.perf_counter() - start,
      on_damage=lambda text: writer.event(step, "damaged line", what=text),
    )
    if summary.get("skipped"):
      # Not finite, with train.on_nan=skip.
      writer.event(step, "skipped steps", skipped=summary["skipped"])
    return summary


def _evaluate(
  evaluator: evaluate.Evaluator,
  state: train_state.TrainState,
  config: config_lib.RunConfig,
) -> dict[str, float]:
  """Losses of the averaged weights once there are any, else of the last."""
  found = evaluator(state.model)
  if not train_state.has_average(config.train, int(state.step)):
    return found
  averaged = evaluator(state.average)
  seconds = found["seconds"] + averaged["seconds"]
  return averaged | {"last_weights_loss": found["loss"], "seconds": seconds}


def _due(step: int, every: int) -> bool:
  return bool(every) and step % every == 0


def _open_data(
  config: config_lib.RunConfig, mesh: jax.sharding.Mesh
) -> dict[str, data.Dataset]:
  """Both splits, as far as this process reads them."""
  part, parts = sharding.share_of_rows(mesh, jax.process_index())
  return {
    split: data.open_dataset(
      config.data, split, process_index=part, process_count=parts
    )
    for split in ("train", "validation")
  }


def _report_found(
  writer: metrics_lib.Writer,
  step: int,
  restored: checkpoint.Restored | None,
  missing: int | None,
  tail: metrics_lib.Tail,
  damaged: dict[str, str],
  changes: dict[str, tuple[Any, Any]],
) -> None:
  """Events for everything in the folder that is not as it should be."""
  for file, cause in damaged.items():
    writer.event(step, "file rebuilt", file=file, cause=cause)
  for broken, cause in (restored.unreadable if restored else {}).items():
    writer.event(step, "checkpoint set aside", of_step=broken, cause=cause)
  if missing is not None:
    writer.event(step, "checkpoint missing", of_step=missing)
  if restored and not restored.verified:
    writer.event(step, "checkpoint unverified", of_step=step)
  rows = run_folder.missing_rows(restored, tail)
  if rows is not None:
    writer.event(step, "rows missing", after_step=rows[0], through_step=rows[1])
  if changes:
    fields = {name: list(values) for name, values in changes.items()}
    writer.event(step, "config changed", changes=fields)


def report_start(
  writer: metrics_lib.Writer,
  mesh: jax.sharding.Mesh,
  step: int,
  restored: checkpoint.Restored | None,
  lost: tuple[int, float],
  depth_reads: str | None,
) -> None:
  """The first event of an attempt: the work lost, what runs, and where."""
  of_reads = {"depth_reads": depth_reads} if depth_reads else {}
  writer.event(
    step,
    "resume" if restored else "start",
    lost_steps=lost[0],
    lost_seconds=lost[1],
    devices=mesh.size,
    device_kind=mesh.devices.flat[0].device_kind,
    processes=jax.process_count(),
    hardware=environment.hardware(),
    commit=environment.commit(),
    jax=jax.__version__,
    python=platform.python_version(),
    time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    **of_reads,
  )


def _compile(
  writer: metrics_lib.Writer,
  step: int,
  name: str,
  function: Any,
  *shapes: Any,
) -> Callable[..., Any]:
  """Compiles a jitted function once, and records the time and memory."""
  start = time.perf_counter()
  with _saying(f"compiling {name}"):
    compiled = function.lower(*shapes).compile()
  seconds = time.perf_counter() - start
  report_compiled(writer, step, name, seconds, compiled)
  return compiled


@contextlib.contextmanager
def _saying(what: str) -> Iterator[None]:
  """Says what takes so long, and how long so far, every few seconds."""
  start, over = time.perf_counter(), threading.Event()

  def say() -> None:
    while not over.wait(_SAY_SECONDS):
      seconds = time.perf_counter() - start
      print(f"{what}: {seconds:.0f} s so far", flush=True)

  thread = threading.Thread(target=say, daemon=True)
  if jax.process_index() == 0:
    thread.start()
  try:
    yield
  finally:
    over.set()


def report_compiled(
  writer: metrics_lib.Writer,
  step: int,
  name: str,
  seconds: float,
  compiled: Any,
) -> None:
  """The event of a compiled program, with its memory."""
  memory = compiled.memory_analysis()
  writer.event(
    step,
    "compiled",
    function=name,
    seconds=seconds,
    argument_bytes=getattr(memory, "argument_size_in_bytes", None),
    temporary_bytes=getattr(memory, "temp_size_in_bytes", None),
    peak_bytes=compiler.peak_bytes(compiled) if memory else None,
  )


def _batches_from(
  dataset: data.Dataset,
  config: config_lib.RunConfig,
  restored: checkpoint.Restored | None,
) -> data.Batches:
  """Training batches, from the position saved with the state."""
  if restored is None:
    return dataset.batches()
  position = restored.info["data"]
  if position["dataset"] == dataset.identity():
    batches = dataset.batches()
    batches.set_state(position)
    return batches
  # The config may have changed: skip the same number of rows in the new order.
  rows = position["next_batch"] * position["dataset"]["batch_size"]
  return dataset.batches(start_batch=rows // config.data.batch_size)


class Saves:
  """Checkpoints of the run, each reported once it is complete on disk."""

  def __init__(
    self,
    workdir: epath.Path,
    config: config_lib.RunConfig,
    info: dict[str, Any],
    writer: metrics_lib.Writer,
    seconds: int = 1200,
  ):
    self._workdir = workdir
    self._info = info
    self._writer = writer
    self._saver = checkpoint.Saver(workdir, config.checkpoint, seconds)
    self._last_step = self._saver.last_step or 0
    self._pending: tuple[int, float] | None = None

  def __enter__(self) -> "Saves":
    return self

  def __exit__(self, error_type: type | None, *unused) -> None:
    # A pending save is finished, however the run ended.
    if error_type is None:
      self.wait()
    self._saver.close()

  def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
    """Starts a save, unless there is nothing new since the last one."""
    if step == self._last_step:
      return
    self.wait()
    self._writer.flush()
    start = time.perf_counter()
    self._saver.save(step, state, self._info | {"data": position})
    self._pending = step, time.perf_counter() - start
    self._last_step = step

  @property
  def writing(self) -> bool:
    """Whether a save is being written."""
    return self._saver.writing

  def wait(self) -> None:
    """Waits until the pending save, if any, is complete."""
    start = time.perf_counter()
    self._saver.wait()
    if self._pending is not None:
      step, seconds = self._pending
      seconds += time.perf_counter() - start
      self._writer.event(step, "checkpoint", blocked_seconds=seconds)
      self._pending = None

  def newest(self) -> str:
    """The newest checkpoint in words, after the pending save."""
    self.wait()
    steps = checkpoint.all_steps(self._workdir)
    folder = self._workdir / checkpoint.CHECKPOINTS
    return f"step {steps[-1]} in {folder}" if steps else "none yet"

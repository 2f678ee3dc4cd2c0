# SPDX-License-Identifier: Apache-2.0
"""Trains all runs in this process, the seeds of an arm as one program.

Runs that differ in their seeds only are a group (`attnres_jax.train.together`).
Groups of one setting, such as the schemes of a size, are trained side by side,
the one that is behind first. A thread per core trains, or compiles the program
of another group meanwhile. A line every few seconds says where a group is, and
its difference from PreNorm on the same batches.

On Ctrl-C, SIGTERM or a closed terminal, all groups save and stop.
"""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import threading
import time
import traceback
import types

from etils import epath
import numpy as np

from attnres_jax.common import environment
from attnres_jax.common import exits
from attnres_jax.common import files
from attnres_jax.config import errors
from attnres_jax.models import residuals
from attnres_jax.scaling import grid
from attnres_jax.scaling import pairs
from attnres_jax.sweep import folder as folder_lib
from attnres_jax.sweep import launchers
from attnres_jax.sweep import monitor
from attnres_jax.sweep import state as state_lib
from attnres_jax.sweep.launchers import settings as settings_lib
from attnres_jax.train import checkpoint
from attnres_jax.train import signals
from attnres_jax.train import together

SETTINGS: Mapping[str, settings_lib.Setting] = {
  "threads": settings_lib.Setting(
    "groups that are trained or compiled at a time; one per core by default",
    0, int,
  ),
}  # fmt: skip
BASELINE = "prenorm"
# Overrides that tell arms and seeds of a setting apart.
_WITHIN_SETTING = ("variant", *grid.WITHIN_SETTING)
_LINE_SECONDS, _TICK_SECONDS = 3.0, 0.2
# Differences are means over the last steps, so many of the whole run.
_WINDOW = 0.1


def plan(
  runs: Sequence[grid.Run], folder: str, settings: types.SimpleNamespace
) -> launchers.Launch:
  """The names of runs that are trained together, a line for each arm."""
  del settings
  arms = _settings_of(runs, epath.Path(folder)).values()
  groups = [group for of_setting in arms for group in of_setting.values()]
  return launchers.Launch(
    commands=[" ".join(run.name for run in group) for group in groups]
  )


def start(
  runs: Sequence[grid.Run], folder: str, settings: types.SimpleNamespace
) -> int:
  """Trains all runs; returns what the package says, or 130 if stopped."""
  runs = launchers.todo(runs, folder, settings.options)
  threads = settings.threads or len(environment.cores())
  with contextlib.ExitStack() as stack:
    queue = _Queue(runs, epath.Path(folder), stack)
    stop = stack.enter_context(signals.StopSignal())
    stop.begin_work()
    return queue.run(threads, stop)


@dataclasses.dataclass(eq=False)
class _Arm:
  """A group with its place in the sweep.

  Attributes:
    name: for people.
    place: of its setting, in the order of the sweep.
    is_baseline: whether the others of its setting are compared with it.
    group: its runs.
    attempts: of these runs.
    taken: whether a thread works on it.
    line_time: when its last line was printed.
    per_step: seconds of its last steps, each.
    over: whether nothing remains to be done.
    error: that ended it.
  """

  name: str
  place: int
  is_baseline: bool
  group: together.Group
  attempts: list[state_lib.Attempt]
  taken: bool = False
  line_time: float = 0.0
  per_step: float = 0.0
  over: bool = False
  error: Exception | None = None


class _Queue:
  """All arms, and the threads that work on them."""

  def __init__(
    self,
    runs: Sequence[grid.Run],
    folder: epath.Path,
    stack: contextlib.ExitStack,
  ):
    self._start = time.monotonic()
    self._changed = threading.Condition()
    self._stopping = False
    self._arms: list[_Arm] = []
    batches = together.Batches()
    for place, arms in enumerate(_settings_of(runs, folder).values()):
      for same in arms.values():
        if arm := _begin(place, same, folder, batches):
          self._arms.append(arm)
          stack.callback(arm.group.close)

  def run(self, threads: int, stop: signals.StopSignal) -> int:
    """Works until all arms are over, or a signal comes."""
    seeds = sum(len(arm.attempts) for arm in self._arms)
    print(
      f"{len(self._arms)} arms, {seeds} runs: the seeds of an arm train as one"
      " program",
      flush=True,
    )
    workers = [
      threading.Thread(target=self._work, daemon=True) for _ in range(threads)
    ]
    for worker in workers:
      worker.start()
    while any(worker.is_alive() for worker in workers):
      time.sleep(_TICK_SECONDS)
      if stop.received and not self._stopping:
        print("stopping after the programs that run now", flush=True)
        self._stopping = True
    if self._stopping:
      return self._save()
    return int(any(arm.error or arm.group.failed for arm in self._arms))

  def _save(self) -> int:
    for arm in self._arms:
      if not arm.over:
        arm.group.save()
        for attempt in arm.attempts:
          attempt.end(state_lib.STOPPED)
    print("stopped; rerun the same command to resume", flush=True)
    return launchers.INTERRUPTED

  def _work(self) -> None:
    """Takes one task after another, until none is left."""
    while True:
      with self._changed:
        arm = self._next()
        if arm is None:
          return
      try:
        self._act(arm)
      except Exception as error:
        errors.without_jax_notes(error)
        traceback.print_exc()
        arm.error, arm.over = error, True
        status = state_lib.OF_EXIT[exits.of_error(error)]
        text = " ".join(f"{type(error).__name__}: {error}".split())
        for attempt in arm.attempts:
          with contextlib.suppress(OSError):  # Its disk may be what failed.
            attempt.end(status, text)
      with self._changed:
        arm.taken = False
        self._changed.notify_all()

  def _next(self) -> _Arm | None:
    """The next arm to work on, marked as taken; None at the end.

    The one that is most behind, in the order of settings; a program is compiled
    before it is needed as soon as no other is compiled.
    """
    while True:
      open_ = [arm for arm in self._arms if not arm.over]
      if self._stopping or not open_:
        return None
      ready = [a for a in open_ if a.group.is_ready and not a.taken]
      new = [a for a in open_ if not (a.group.is_ready or a.taken)]
      busy = any(a.taken and not a.group.is_ready for a in open_)
      # Of the present setting and the next one.
      near = new and new[0].place <= open_[0].place + 1
      if near and (not busy or not ready):
        new[0].taken = True
        return new[0]
      if ready:
        arm = min(ready, key=lambda arm: (arm.place, arm.group.step))
        arm.taken = True
        return arm
      self._changed.wait()

  def _act(self, arm: _Arm) -> None:
    group, start = arm.group, time.monotonic()
    if not group.is_ready:
      group.compile_train()
      seconds = time.monotonic() - start
      self._say(f"{arm.name}: compiled in {seconds:.0f} s")
    elif group.step < group.steps:
      before = group.step
      group.advance()
      arm.per_step = (time.monotonic() - start) / (group.step - before)
      now = time.monotonic()
      if now - arm.line_time > _LINE_SECONDS or group.step == group.steps:
        arm.line_time = now
        self._say(self._line(arm))
    else:
      group.finish()
      for i, attempt in enumerate(arm.attempts):
        error = group.failed.get(i)
        if error is None:
          attempt.end(state_lib.DONE)
        else:
          attempt.end(state_lib.DIVERGED, str(error))
      arm.over = True

  def _line(self, arm: _Arm) -> str:
    group = arm.group
    loss = group.losses[group.step].mean()
    text = (
      f"{arm.name:16} step {group.step:4}/{group.steps}  loss {loss:.3f}"
      f"{self._gap(arm)}"
    )
    left = self._seconds_left()
    return f"{text}  {monitor.duration(left)} left" if left else text

  def _gap(self, arm: _Arm) -> str:
    """The difference from the baseline over the same recent batches."""
    for base in self._arms:
      if base.place == arm.place and base.is_baseline and base is not arm:
        stop = min(arm.group.step, base.group.step)
        width = max(1, round(_WINDOW * arm.group.steps))
        steps = [
          step
          for step in range(stop - width + 1, stop + 1)
          if step in arm.group.losses and step in base.group.losses
        ]
        if not steps:
          return ""
        gap = pairs.difference(_means(arm, steps), _means(base, steps))
        text = f"  minus PreNorm {gap.mean:+.3f}"
        return text + (f" ± {gap.margin:.3f}" if gap.margin else "")
    return ""

  def _seconds_left(self) -> float | None:
    """For all arms, if each has been measured; several work at a time."""
    open_ = [arm for arm in self._arms if not arm.over]
    if not all(arm.per_step for arm in open_):
      return None
    total = sum(
      (arm.group.steps - arm.group.step) * arm.per_step for arm in open_
    )
    at_once = min(len(open_), len(environment.cores()))
    return total / at_once if open_ else None

  def _say(self, text: str) -> None:
    seconds = time.monotonic() - self._start
    print(f"{monitor.duration(seconds)}  {text}", flush=True)


def _means(arm: _Arm, steps: Sequence[int]) -> dict[int, float]:
  """Training losses by seed, the means over steps."""
  means = np.mean([arm.group.losses[step] for step in steps], axis=0)
  seeds = (config.seed for config in arm.group.configs)
  return dict(zip(seeds, means.tolist()))


def _begin(
  place: int,
  runs: Sequence[grid.Run],
  folder: epath.Path,
  batches: together.Batches,
) -> _Arm | None:
  """Claims runs of one group; None if other processes hold all of them."""
  holder: list[together.Group] = []
  spent = lambda: holder[0].seconds if holder else 0.0
  attempts = {
    run.name: attempt
    for run in runs
    if (attempt := state_lib.begin(folder / run.name, spent))
  }
  runs = [run for run in runs if run.name in attempts]
  if not runs:
    return None
  configs = [folder_lib.run_config(run) for run in runs]
  try:
    group = together.Group(
      configs, [folder / run.name for run in runs], batches
    )
  except BaseException as error:
    for attempt in attempts.values():
      status = state_lib.OF_EXIT[exits.of_error(error)]
      attempt.end(status, " ".join(str(error).split()))
    raise
  holder.append(group)
  name = configs[0].model.residual.name
  label = residuals.RESIDUALS[name].style.label or name
  setting = ", ".join(map(str, _setting(runs[0]).values()))
  return _Arm(
    f"{setting} {label}".strip(), place, name == BASELINE, group,
    [attempts[run.name] for run in runs],
  )  # fmt: skip


def _settings_of(
  runs: Sequence[grid.Run], folder: epath.Path
) -> dict[str, dict[str, list[grid.Run]]]:
  """Runs by setting and group, in the order of the sweep.

  Runs of a group have done the same number of steps.
  """
  settings: dict[str, dict[str, list[grid.Run]]] = {}
  for run in runs:
    steps = [0]
    if not files.is_remote(folder):
      steps += checkpoint.all_steps(folder / run.name)
    key = f"{together.key(folder_lib.run_config(run))} {steps[-1]}"
    arms = settings.setdefault(str(_setting(run)), {})
    arms.setdefault(key, []).append(run)
  return settings


def _setting(run: grid.Run) -> dict[str, object]:
  return {
    name: value
    for name, value in run.overrides.items()
    if name not in _WITHIN_SETTING
  }

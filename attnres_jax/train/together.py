# SPDX-License-Identifier: Apache-2.0
"""Runs that differ only in their seeds, trained by one program.

`jax.vmap` maps the step of a run over its seeds, since small networks leave
most of a processor to overhead. A seed starts from the weights of its ordinary
run and reads the same batches; only the order of sums differs. It leaves the
files of an ordinary run, and its share of the time: an N-th of what N seeds
took. One process, one device.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import threading
import time
from typing import Any

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.common import sharding
from attnres_jax.train import checkpoint
from attnres_jax.train import compiling
from attnres_jax.train import evaluate
from attnres_jax.train import history
from attnres_jax.train import metrics as metrics_lib
from attnres_jax.train import run_folder
from attnres_jax.train import saves as saves_lib
from attnres_jax.train import step_log
from attnres_jax.train import train_state


def key(config: config_lib.RunConfig) -> str:
  """A text that runs share which can be trained together."""
  same_data = dataclasses.replace(config.data, seed=0)
  same = dataclasses.replace(config, name="", seed=0, data=same_data)
  return config_lib.to_json(same)


class Batches:
  """What runs read: each split once, whichever runs read it.

  A training split is one per seed of the data, the validation split is one.
  Groups on several threads share it.
  """

  def __init__(self):
    self._lock = threading.RLock()
    self._datasets: dict[Any, data.Dataset] = {}
    self._iterators: dict[Any, Iterator[Any]] = {}
    self._rows: dict[Any, list[Any]] = {}
    self._evaluators: dict[Any, evaluate.Evaluator] = {}

  def dataset(self, config: config_lib.DataConfig, split: str) -> data.Dataset:
    place = config, split
    with self._lock:
      if place not in self._datasets:
        self._datasets[place] = data.open_dataset(config, split)
      return self._datasets[place]

  def train(
    self, configs: Sequence[config_lib.RunConfig], start: int, stop: int
  ) -> dict[str, np.ndarray]:
    """Batches `start` to `stop` of all seeds, [steps, seeds, B, T+1]."""
    with self._lock:
      every = [self._read(config.data, stop)[start:stop] for config in configs]
    return {
      name: np.stack([[row[name] for row in rows] for rows in zip(*every)])
      for name in every[0][0]
    }

  def evaluator(
    self, config: config_lib.RunConfig, mesh: jax.sharding.Mesh, step: Any
  ) -> evaluate.Evaluator:
    """The evaluator of a run's validation batches."""
    same = dataclasses.replace(config.data, seed=0)
    place = same, config.train.eval_batches
    with self._lock:
      if place not in self._evaluators:
        dataset = self.dataset(same, "validation")
        self._evaluators[place] = evaluate.Evaluator(
          place[1], dataset, mesh, step, same.tokenizer == "bytes"
        )
      return self._evaluators[place].with_step(step)

  def _read(self, config: config_lib.DataConfig, count: int) -> list[Any]:
    if config not in self._iterators:
      self._iterators[config] = self.dataset(config, "train").batches()
      self._rows[config] = []
    rows = self._rows[config]
    rows += itertools.islice(self._iterators[config], max(0, count - len(rows)))
    return rows


# Orbax's saves, one at a time: they change warnings of the whole process.
_SAVING = threading.Lock()


class Group:
  """Runs of one configuration and several seeds.

  Attributes:
    configs: of the runs, with the size of the vocabulary.
    workdirs: their folders.
    step: how many steps all of them are trained.
    seconds: of one run: its share of the time that the group took.
    losses: training losses by step, [seeds] each, up to `step`.
    failed: errors of runs that are no longer trained.
  """

  def __init__(
    self,
    configs: Sequence[config_lib.RunConfig],
    workdirs: Sequence[epath.Path],
    batches: Batches,
  ):
    """Restores the runs; nothing is compiled.

    Raises:
      ConfigError: runs of this configuration cannot be trained together, or a
        folder has a run with another one.
    """
    first = configs[0]
    assert {key(config) for config in configs} == {key(first)}
    for field in ("depth_every", "eval_every", "average_last"):
      if value := getattr(first.train, field):
        config_lib.fail(f"train.{field}", value, "0, to train seeds together")
    if first.train.steps % first.train.log_every:
      expected = "a divisor of train.steps, to train seeds together"
      config_lib.fail("train.log_every", first.train.log_every, expected)
    tokenizer = data.make_tokenizer(first.data)
    self.configs = [c.with_vocab_size(tokenizer.vocab_size) for c in configs]
    self.workdirs = [epath.Path(workdir) for workdir in workdirs]
    self.seconds = 0.0
    self.losses: dict[int, np.ndarray] = {}
    self.failed: dict[int, config_lib.RunError] = {}
    self._batches = batches
    self._first = self.configs[0]
    mesh = sharding.make_mesh(self._first.mesh, jax.devices()[:1])
    self.program = train_state.make_program(self._first, mesh)
    self._replicated = sharding.replicated(mesh)
    self._train: Any = None
    self._evaluate: Any = None
    restored = [self._restored(i) for i in range(len(configs))]
    (self.step,) = {r.step if r else 0 for r in restored}
    self._state: Any = None
    if self.step:
      states = [r.state for r in restored if r]
      self._state = jax.tree.map(lambda *a: jnp.stack(a), *states)
    self._runs = [self._open_run(i, r) for i, r in enumerate(restored)]

  @property
  def steps(self) -> int:
    """How many steps the runs are trained in all."""
    return self._first.train.steps

  @property
  def is_ready(self) -> bool:
    """Whether `advance` need not wait for a compiler."""
    return self._train is not None

  def compile_train(self) -> None:
    """Compiles several steps at once; may be called on another thread."""
    start, seeds = time.perf_counter(), len(self.configs)
    several = lambda tree, n: jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(
        (n, *a.shape), a.dtype, sharding=self._replicated
      ),
      tree,
    )
    states = several(self.program.abstract_state, seeds)
    rows = self._first.train.log_every
    batches = several(several(self.program.batch_shapes, seeds), rows)

    def train(states: Any, batches: Any) -> Any:
      return jax.lax.scan(jax.vmap(self.program.train_step), states, batches)

    if self._state is None:
      init = lambda seed: train_state.init(self._first, seed)
      seeds_S = np.array([config.seed for config in self.configs], np.uint32)
      self._state = jax.jit(
        jax.vmap(init), out_shardings=self._replicated,
        compiler_options=self.program.init_options,
      )(seeds_S)  # fmt: skip
    self._train = self._compiled(
      "train_step", start, train, states, batches, donate_argnums=0
    )

  def compile_eval(self) -> None:
    """Compiles the evaluation of all seeds, which the first step needs not."""
    step = jax.vmap(self.program.eval_step, in_axes=(0, None))
    self._evaluate = self._compiled(
      "eval_step", time.perf_counter(), step, self._state.model,
      self.program.batch_shapes,
    )  # fmt: skip

  def advance(self) -> None:
    """Trains all seeds to their next row, and saves them if a save is due."""
    start, stop = time.perf_counter(), self.step + self._first.train.log_every
    batches = self._batches.train(self.configs, self.step, stop)
    self._state, metrics = self._train(self._state, batches)
    metrics = jax.device_get(metrics)
    seconds = (time.perf_counter() - start) / len(self.configs)
    for k, loss in enumerate(metrics["loss"]):
      step = self.step + k + 1
      self.seconds += seconds / (stop - self.step)
      self.losses[step] = loss
      for i, run in enumerate(self._runs):
        if i not in self.failed:
          try:
            run.log.add(step, {name: a[k, i] for name, a in metrics.items()})
            run.log.drain()
          except step_log.NonFiniteError as error:
            self.failed[i] = error
    every, before, self.step = (
      self._first.checkpoint.every_steps, self.step, stop,
    )  # fmt: skip
    if every and before // every < stop // every and stop < self.steps:
      self.save()

  def finish(self) -> None:
    """Evaluates, saves and summarises all seeds that did not fail."""
    if self._evaluate is None:
      self.compile_eval()
    start, mesh = time.perf_counter(), self.program.mesh
    evaluator = self._batches.evaluator(self._first, mesh, self._evaluate)
    rows = evaluator.each(self._state.model, len(self.configs))
    for i, (run, row) in enumerate(zip(self._runs, rows)):
      if i not in self.failed:
        run.writer.write(self.step, "validation", **row)
    self.save()
    self.seconds += (time.perf_counter() - start) / len(self.configs)
    for i in range(len(self._runs)):
      if i not in self.failed:
        run_folder.summarise(
          self.workdirs[i], self.configs[i], status="finished",
          step=self.step, parameters=self.program.parameters,
          seconds=self.seconds,
        )  # fmt: skip

  def save(self) -> None:
    """Saves all seeds that did not fail."""
    for i, run in enumerate(self._runs):
      if self.step and i not in self.failed:
        config, workdir = self.configs[i], self.workdirs[i]
        dataset = self._batches.dataset(config.data, "train")
        position = {"next_batch": self.step, "dataset": dataset.identity()}
        info = run_folder.info(config, run.descriptions) | {"data": position}
        make = functools.partial(saves_lib.Saver, workdir, config.checkpoint)
        with _SAVING, make(run.writer) as saves:
          state = jax.tree.map(lambda a, i=i: a[i], self._state)
          saves.save(self.step, state, info)

  def close(self) -> None:
    for run in self._runs:
      run.writer.close()

  def _restored(self, i: int) -> checkpoint.Restored | None:
    """The newest checkpoint of a run of this configuration."""
    run_folder.refuse_changes(
      self.workdirs[i], self.configs[i], self._descriptions(i)
    )
    return checkpoint.restore_latest(
      self.workdirs[i], self.program.abstract_state
    )

  def _descriptions(self, i: int) -> dict[str, Any]:
    return {
      split: self._batches.dataset(self.configs[i].data, split).describe()
      for split in ("train", "validation")
    }

  def _open_run(self, i: int, restored: checkpoint.Restored | None) -> "_Run":
    config, workdir = self.configs[i], self.workdirs[i]
    rows = metrics_lib.read_rows(workdir, lenient=True)
    descriptions = self._descriptions(i)
    writer = run_folder.open_run(
      workdir, config, descriptions, self.step, console=False
    )
    history.History(restored, rows, None).report(writer, self.program)
    log = step_log.StepLog(
      config, writer, self.program.mesh,
      fetch=lambda metrics: metrics, clock=lambda: self.seconds,
    )  # fmt: skip
    return _Run(writer, log, descriptions)

  def _compiled(
    self, name: str, start: float, function: Any, *shapes: Any, **options: Any
  ) -> Any:
    """A program for all seeds, whose time since `start` they share."""
    step = jax.jit(function, out_shardings=self._replicated, **options)
    compiled = step.lower(*shapes).compile()
    seconds = (time.perf_counter() - start) / len(self.configs)
    self.seconds += seconds
    for run in self._runs:
      run.log.pause(seconds)
      compiling.report(run.writer, self.step, name, seconds, compiled)
    return compiled


@dataclasses.dataclass
class _Run:
  """The open folder of one seed."""

  writer: metrics_lib.Writer
  log: step_log.StepLog
  descriptions: Mapping[str, Any]

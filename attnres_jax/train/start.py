# SPDX-License-Identifier: Apache-2.0
"""The first state of a run that continues another one, such as mid-training.

`train.start_from` names the folder of a finished run, or one checkpoint of a
run. Its last weights are taken, and the optimiser's state if all of its arrays
have the same names and shapes. Step, schedule, data position and averages begin
anew. The networks have to be the same, field by field.
"""

import dataclasses

from etils import epath
import jax
import jax.numpy as jnp

from attnres_jax import config as config_lib
from attnres_jax.common import trees
from attnres_jax.train import checkpoint
from attnres_jax.train import run_folder
from attnres_jax.train import train_state


@dataclasses.dataclass(frozen=True)
class Source:
  """The step of a checkpoint in a run's folder, to start from."""

  run: str
  step: int

  def load(
    self, program: train_state.Program
  ) -> tuple[train_state.TrainState, bool]:
    """The first state, and whether it has the optimiser's state of the run.

    Raises:
      CheckpointError: the checkpoint was changed, or has other arrays than its
        config says.
    """
    like = program.abstract_state
    leaves = {
      "model": trees.to_flat({"model": like.model}),
      "opt_state": trees.to_flat({"opt_state": like.opt_state}),
    }
    _, stored = checkpoint.describe(self.run, self.step)
    there = {n: s for n, s in stored.items() if n.startswith("opt_state/")}
    continued = there == {n: a.shape for n, a in leaves["opt_state"].items()}
    names = leaves["model"] | (leaves["opt_state"] if continued else {})
    loaded = trees.to_flat(program.init_state())
    for name in names:
      # Both may not fit into memory.
      loaded.pop(name).delete()
    loaded |= checkpoint.read(self.run, self.step, names)
    state = trees.from_flat(like, loaded)
    if state.average is not None:
      average = jax.tree.map(jnp.copy, state.model)
      state = dataclasses.replace(state, average=average)
    return state, continued


def find(config: config_lib.RunConfig) -> Source:
  """The checkpoint that `train.start_from` names.

  Raises:
    ConfigError: there is none, or the run has another network.
  """
  given = config.train.start_from
  path = epath.Path(given)
  if path.parent.name == checkpoint.CHECKPOINTS and path.name.isdigit():
    source = Source(str(path.parent.parent), int(path.name))
    steps = [s for s in checkpoint.all_steps(source.run) if s == source.step]
  else:
    finished = run_folder.finished_summary(path)
    steps = checkpoint.all_steps(path) if finished else []
    source = Source(given, steps[-1] if steps else 0)
  if not steps:
    config_lib.fail(
      "train.start_from",
      given,
      "the folder of a finished run, or one of a run's checkpoints,"
      f" such as RUN/{checkpoint.CHECKPOINTS}/1000",
    )
  info, _ = checkpoint.describe(source.run, source.step)
  model = config_lib.build_run_config(info["config"]).model
  changes = config_lib.differences(
    *(
      config_lib.affecting(network, "function", "precision")
      for network in (model, config.model)
    )
  )
  if changes:
    listed = ", ".join(
      f"config.model.{name} ({old!r} there, {new!r} here)"
      for name, (old, new) in changes.items()
    )
    config_lib.fail(
      "train.start_from",
      given,
      f"a run of the same network; differing: {listed}",
    )
  return source

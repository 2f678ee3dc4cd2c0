# SPDX-License-Identifier: Apache-2.0
"""Tasks of the lm-evaluation-harness, scored while a network is trained.

`eval` in a config names them. Rows of metrics.jsonl with the split `tasks` have
each metric, such as `arc_easy/acc`. All processes of a run take part.
"""

from collections.abc import Callable
import os
import time
from typing import Any

import jax

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.data import text_format as text_format_lib
from attnres_jax.interop import harness
from attnres_jax.interop import packed

# (model) -> {"task/metric": value, ..., "seconds": of the scoring}.
Score = Callable[[models.Transformer], dict[str, float]]


def find(config: config_lib.RunConfig) -> Callable[..., Score]:
  """Looks up the tasks of a run.

  Returns:
    A function of the run's folder and mesh.

  Raises:
    ConfigError: there is no such task, or no such folder.
  """
  given = config.eval
  if given.include_path and not os.path.isdir(given.include_path):
    config_lib.fail("eval.include_path", given.include_path, "a folder")
  try:
    table = harness.find_tasks(given.tasks, given.include_path)
  except config_lib.ConfigError as error:
    raise config_lib.ConfigError(f"config.eval.{error}") from error

  def make(
    workdir: str | os.PathLike,
    mesh: jax.sharding.Mesh,
  ) -> Score:
    text_format = text_format_lib.of_data(config.data, workdir)
    length = given.length or config.data.sequence_length
    # Programs are compiled once, for all versions of the network.
    scorer = packed.Scorer(mesh, length=length)

    def score(model: models.Transformer) -> dict[str, float]:
      start = time.perf_counter()
      network: Any = harness.Network(
        model, text_format, mesh, length=length, scorer=scorer
      )  # fmt: skip
      shots = given.num_fewshot
      results = harness.evaluate(
        network,
        given.tasks,
        table,
        limit=given.limit or None,
        num_fewshot=None if shots < 0 else shots,
        bootstrap_iters=0,
        log_samples=False,
      )
      seconds = time.perf_counter() - start
      return harness.numbers(results) | {"seconds": seconds}

    return score

  return make

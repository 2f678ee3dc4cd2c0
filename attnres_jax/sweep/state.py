# SPDX-License-Identifier: Apache-2.0
"""How far a run of a sweep is, in one small file of its workdir.

  pending   no worker has begun
  running   a worker has it; its heartbeat says whether it still lives
  stopped   by a signal, with a checkpoint
  failed    with an error; the next launch tries again
  done      finished; nothing runs it again

A worker that was killed leaves `running` and a heartbeat that stands still.
"""

import dataclasses
import json
from typing import Any

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax import files

PENDING, RUNNING, STOPPED = "pending", "running", "stopped"
FAILED, DONE = "failed", "done"

FILE = "state.json"


@dataclasses.dataclass(frozen=True)
class State:
  """Of one run.

  Attributes:
    status: see the module.
    attempts: workers that have had the run.
    host: where the last of them is or was.
    pid: its process.
    token: tells it from all others.
    started: when it began, seconds since the epoch.
    heartbeat: when it was last seen, the same.
    seconds: that all attempts took, up to the heartbeat.
    error: of the last attempt, one line.
  """

  status: str = PENDING
  attempts: int = 0
  host: str = ""
  pid: int = 0
  token: str = ""
  started: float = 0.0
  heartbeat: float = 0.0
  seconds: float = 0.0
  error: str = ""


def read(workdir: epath.PathLike) -> State:
  """The state of a run; `pending` where there is no file.

  Raises:
    ConfigError: the file is not one of these.
  """
  path = epath.Path(workdir) / FILE
  try:
    values: dict[str, Any] = json.loads(path.read_text())
    return State(**values)
  except FileNotFoundError:
    return State()
  except (TypeError, json.JSONDecodeError) as error:
    raise config_lib.ConfigError(
      f"{path}: not the state of a run ({error})"
    ) from error


def write(workdir: epath.PathLike, state: State) -> None:
  path = epath.Path(workdir) / FILE
  files.write(path, json.dumps(dataclasses.asdict(state), indent=2) + "\n")

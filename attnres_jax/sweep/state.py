# SPDX-License-Identifier: Apache-2.0
"""The state of a run of a sweep, a small file in its workdir.

  pending   no worker has begun
  running   a worker is training it; its heartbeat says whether it is alive
  stopped   by a signal, with a checkpoint
  failed    with an error; the next launch tries again
  done      finished; nothing runs it again
  damaged   the file cannot be read; nothing runs it until the file is removed

A worker that was killed leaves `running` and a heartbeat that has stopped.
"""

import dataclasses
import json

from etils import epath

from attnres_jax import files
from attnres_jax.sweep import damage

PENDING, RUNNING, STOPPED = "pending", "running", "stopped"
FAILED, DONE, DAMAGED = "failed", "done", "damaged"
STATUSES = (PENDING, RUNNING, STOPPED, FAILED, DONE)

FILE = "state.json"


@dataclasses.dataclass(frozen=True)
class State:
  """Of one run.

  Attributes:
    status: see the module.
    attempts: number of workers that have claimed the run.
    host: of the last worker.
    pid: its process.
    token: distinguishes it from all others.
    started: when it began, seconds since the epoch.
    heartbeat: when it was last seen, in the same unit.
    seconds: duration of all attempts, up to the heartbeat.
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
  """The state of a run: `pending` if there is no file.

  An unreadable file gives the state `damaged`, and `error` says where. So one
  bad file of a sweep affects the state of one run only.
  """
  path = epath.Path(workdir) / FILE
  try:
    values = damage.read_object(path)
    with damage.of_file(path):
      return _checked(values)
  except FileNotFoundError:
    return State()
  except damage.DamagedError as error:
    return State(
      DAMAGED, error=f"{error}; remove this file to start the run again"
    )


def write(workdir: epath.PathLike, state: State) -> None:
  path = epath.Path(workdir) / FILE
  files.write(path, json.dumps(dataclasses.asdict(state), indent=2) + "\n")


def _checked(values: dict[str, object]) -> State:
  """A state, after its fields have been checked."""
  state = State(**values)  # pyrefly: ignore[bad-argument-type]
  for field in dataclasses.fields(State):
    value, kind = getattr(state, field.name), type(field.default)
    if kind is float and type(value) is int:
      continue
    if type(value) is not kind:
      raise ValueError(f"{field.name}: got {value!r}, expected {kind.__name__}")
  if state.status not in STATUSES:
    expected = ", ".join(STATUSES)
    raise ValueError(
      f"status: got {state.status!r}, expected one of {expected}"
    )
  return state

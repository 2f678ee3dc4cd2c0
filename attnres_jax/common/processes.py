# SPDX-License-Identifier: Apache-2.0
"""What the processes of a run tell each other; all of them call it together.

Each function works in a single process, too, and starts no device there.
"""

import jax
from jax.experimental import multihost_utils
import numpy as np

_BARRIER_SECONDS = 60.0


def is_first() -> bool:
  """Whether this is process 0, which writes what all share."""
  return _is_single() or jax.process_index() == 0


def text_of_first(text: str) -> str:
  """The text of process 0, on all processes."""
  if _is_single():
    return text
  given = np.frombuffer(text.encode(errors="replace"), np.uint8)
  size = int(multihost_utils.broadcast_one_to_all(np.int32(len(given))))
  padded = np.resize(given, size) if len(given) else np.zeros(size, np.uint8)
  shared = np.asarray(multihost_utils.broadcast_one_to_all(padded))
  return bytes(shared).decode()


def number_of_first(number: int) -> int:
  """The number of process 0, on all processes."""
  return int(text_of_first(str(int(number))))


def is_same(text: str) -> bool:
  """Whether all processes have this text."""
  return all_hold(text_of_first(text) == text)


def all_hold(value: bool) -> bool:
  """Whether it is true on all processes."""
  return all(gather(int(value)))


def gather(number: int) -> list[int]:
  """The number of each process, an int32, in their order."""
  if _is_single():
    return [number]
  return multihost_utils.process_allgather(np.int32(number)).tolist()


def wait(place: str) -> None:
  """Waits until all processes have come to the same place."""
  if not _is_single():
    multihost_utils.sync_global_devices(place)


def all_come(place: str) -> bool:
  """Whether all processes come to a place, named once, within a minute.

  Other than `wait`, it uses no device, so it also works after one has failed.
  """
  if _is_single():
    return True
  from orbax.checkpoint import multihost

  wait_for_others = multihost.get_barrier_sync_fn()
  try:
    wait_for_others(key=place, timeout_ms=round(1000 * _BARRIER_SECONDS))
  except RuntimeError:
    return False
  return True


def _is_single() -> bool:
  return not jax.distributed.is_initialized() or jax.process_count() == 1

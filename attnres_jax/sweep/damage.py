# SPDX-License-Identifier: Apache-2.0
"""Files of a sweep that cannot be read, named by path.

Damage concerns one run: readers of a folder report it for that run and continue
with the others.
"""

from collections.abc import Iterator
import contextlib

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax.common import files
from attnres_jax.common import records
from attnres_jax.common import stores


class DamagedError(config_lib.ConfigError):
  """A file that was changed or cut; the message begins with PATH."""


def read(path: epath.PathLike, cls: type[records.R]) -> records.R:
  """The record in a JSON file.

  Raises:
    FileNotFoundError: there is no such file.
    DamagedError: the file holds something else, or cannot be read.
  """
  with of_file(path):
    return records.read(path, cls)


@contextlib.contextmanager
def of_file(path: epath.PathLike) -> Iterator[None]:
  """Turns any error of reading a file into a `DamagedError` of that file."""
  try:
    yield
  except (DamagedError, FileNotFoundError, stores.AccessError):
    raise
  except OSError as error:
    if files.is_remote(path):
      raise  # The store fails; the file may be as it should be.
    raise DamagedError(f"{path}: {error.strerror or error}") from error
  except (
    ArithmeticError, AttributeError, LookupError, TypeError, ValueError,
  ) as error:  # fmt: skip
    text = " ".join(str(error).split()) or type(error).__name__
    where = "" if text.startswith(f"{path}:") else f"{path}:1: "
    raise DamagedError(where + text) from error

# SPDX-License-Identifier: Apache-2.0
"""JSON files as checked dataclasses, whoever has written them.

A `Record`, or a config, says what its file may contain, by the types of its
fields. Errors are one line, `PATH: key: got VALUE, expected ...`.
"""

from typing import Annotated, Any, TypeVar

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax.common import files
from attnres_jax.config import fields

R = TypeVar("R", bound=fields.Checked)
# A file beside the one that names it.
FileName = Annotated[
  str, fields.Accepted(files.is_name, f"the printable name of a file in its"
  f" folder, of {files.NAME_BYTES} bytes at most")
]  # fmt: skip
# The numbers that files may state.
Bytes = Annotated[
  int, fields.Accepted(lambda x: x >= 0, "a number of at least 0", 1 << 50)
]


class Record(fields.Checked, root=""):
  """Base of frozen dataclasses that are the object of a JSON file.

  In place of a field that is None, files have nothing.
  """


def read(path: epath.PathLike, cls: type[R]) -> R:
  """The record in a JSON file.

  Raises:
    ConfigError: names the file and the key.
    OSError: there is no such file, or it cannot be read.
  """
  return config_lib.from_json(files.read(path), path, cls.of_values)


def read_object(path: epath.PathLike) -> dict[str, Any]:
  """The object in a JSON file of others; raises as `read` does."""
  return config_lib.from_json(files.read(path), path)


def write(path: epath.PathLike, record: fields.Checked) -> None:
  """Writes a file that `read` accepts, at once."""
  files.write(path, config_lib.to_json(record))

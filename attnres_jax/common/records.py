# SPDX-License-Identifier: Apache-2.0
"""JSON files as checked dataclasses, whoever has written them.

A `Record` says what its file may contain, by the types of its fields. Errors
are one line, `PATH: key: got VALUE, expected ...`, with dots between the keys
of objects in objects.
"""

from collections.abc import Mapping
import dataclasses
import json
from typing import Annotated, Any, TypeVar

from etils import epath

from attnres_jax import config as config_lib
from attnres_jax.common import files
from attnres_jax.config import errors
from attnres_jax.config import fields

R = TypeVar("R", bound="Record")
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

  Fields without a default have to be there. In place of a field that is None,
  files have nothing.
  """

  # Whether files may have further keys, which are left out.
  others = False

  @classmethod
  def of_values(cls: type[R], values: Mapping[str, Any], prefix: str = "") -> R:
    """The record of a JSON object; `prefix` precedes keys in errors."""
    kinds = fields.kinds(cls)
    for field in dataclasses.fields(cls):  # pyrefly: ignore[bad-argument-type]
      needed = field.default is field.default_factory is dataclasses.MISSING
      if needed and field.name not in values:
        raise config_lib.ConfigError(
          f"{prefix}{field.name}: missing, expected"
          f" {fields.words(kinds[field.name], bounds=True)}"
        )
    given = {}
    for key, value in values.items():
      if key in kinds:
        given[key] = fields.accept(prefix + key, value, kinds[key])
      elif not cls.others:
        expected = f"one of the keys {', '.join(kinds)}"
        config_lib.fail_argument(prefix or "its keys", key, expected)
    return cls(**given)


def read(path: epath.PathLike, cls: type[R]) -> R:
  """The record in a JSON file.

  Raises:
    ConfigError: names the file and the key.
    OSError: there is no such file, or it cannot be read.
  """
  return parse(files.read(path), cls, path)


def parse(content: str | bytes, cls: type[R], path: epath.PathLike) -> R:
  """The record in the content of a JSON file; errors are as those of `read`."""
  try:
    return cls.of_values(files.parse_json(content))
  except json.JSONDecodeError as error:
    text = f"{path}:{error.lineno}: expected JSON ({error.msg})"
  except ValueError as error:
    text = f"{path}: {error}"
  raise config_lib.ConfigError(errors.printable(text))


def write(path: epath.PathLike, record: Record) -> None:
  """Writes a file that `read` accepts, at once."""
  files.write(path, to_json(record))


def to_json(record: Record) -> str:
  """The content of the file of a record."""
  return json.dumps(to_values(record), indent=2) + "\n"


def to_values(record: Record) -> dict[str, Any]:
  """The JSON object of a record, without fields that are None."""
  without_none = lambda pairs: {k: v for k, v in pairs if v is not None}
  return dataclasses.asdict(record, dict_factory=without_none)  # pyrefly: ignore

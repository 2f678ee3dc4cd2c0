# SPDX-License-Identifier: Apache-2.0
"""The type of a field says what it accepts; values are checked when set.

A dataclass that inherits from `Checked` compares every value with the type of
its field: one of the numbers below, `Literal` for a choice of names, a tuple,
or another dataclass. Floats have to be finite and within the range of float32.

A field of a config also says what it affects, such as `Function[Size]`; a class
with a field that does not is refused at import. What may change at a resume,
what an export has to state and what a plan depends on follow from this.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import inspect
import math
import numbers
import operator
import os
import types
import typing
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from attnres_jax.config import errors

_FLOAT32_MIN, _FLOAT32_MAX = 2.0**-126, 2.0**128


class Accepted(NamedTuple):
  """Which values a field accepts, in code and in words."""

  test: Callable[[Any], bool]
  words: str
  most: int = 2**31 - 1
  change: Callable[[Any], Any] = lambda value: value


class Affects(NamedTuple):
  """What follows from a field."""

  what: frozenset[str]


# What a field may affect, besides the program of a step and what it costs.
EFFECTS = {
  "function": "which function of its parameters the network is",
  "precision": "the types in which numbers are kept",
  "draw": "the initial weights",
  "update": "what a step does with gradients",
  "text": "which text is read",
  "batches": "which of its rows a step or an evaluation reads",
  "execution": "how the same is computed, where and how fast",
  "place": "where files are, whose content is checked otherwise",
  "log": "what is written, watched or refused",
}
_T = TypeVar("_T")


def affects(*what: str) -> Affects:
  """For the `Annotated` type of a field: names of `EFFECTS`, and "step"."""
  unknown = set(what) - {*EFFECTS, "step"}
  if unknown or not what:
    raise ValueError(f"affects {what}: expected some of {[*EFFECTS, 'step']}")
  return Affects(frozenset(what))


Function = Annotated[_T, affects("function", "step")]
Precision = Annotated[_T, affects("precision", "step")]
Draw = Annotated[_T, affects("draw")]
Update = Annotated[_T, affects("update")]
Text = Annotated[_T, affects("text")]
Batches = Annotated[_T, affects("batches")]
Execution = Annotated[_T, affects("execution", "step")]
Place = Annotated[_T, affects("place")]
Log = Annotated[_T, affects("log")]

_ABOVE_0 = Accepted(lambda x: x > 0, "a number above 0")
_AT_LEAST_0 = Accepted(lambda x: x >= 0, "a number of at least 0")
_DEVICES = Accepted(
  lambda n: n == -1 or n > 0, "a number of devices, or -1 for all"
)
_SHARE = Accepted(lambda x: 0 < x < 1, "a number between 0 and 1")
_FRACTION = Accepted(lambda x: 0 <= x <= 1, "a number from 0 to 1")
_DECAY = Accepted(lambda x: 0 <= x < 1, "a number of at least 0, below 1")

Size = Annotated[int, _ABOVE_0]
Count = Annotated[int, _AT_LEAST_0]
Devices = Annotated[int, _DEVICES]
# Of a file, which may have more than an int32 counts.
FileBytes = Annotated[int, _ABOVE_0._replace(most=2**62)]
# Limits for what is unrolled in a program or started at the same time.
Layers = Annotated[int, _ABOVE_0._replace(most=2_000)]
Iterations = Annotated[int, _ABOVE_0._replace(most=100)]
Tokens = Annotated[int, _ABOVE_0._replace(most=1_000_000)]
Threads = Annotated[int, _AT_LEAST_0._replace(most=1000)]
# JAX and grain would reduce larger seeds modulo 2**32.
Seed = Annotated[int, _AT_LEAST_0._replace(most=2**32 - 1)]
# Those of a table or a program that is made at once.
Few = Annotated[int, _ABOVE_0._replace(most=1000)]
Positive = Annotated[float, _ABOVE_0]
NotNegative = Annotated[float, _AT_LEAST_0]
Share = Annotated[float, _SHARE]
Fraction = Annotated[float, _FRACTION]
Decay = Annotated[float, _DECAY]
# Local or in a store; ~ is the home of whoever describes the run.
Path = Annotated[
  str, Accepted(lambda path: True, "a path", change=os.path.expanduser)
]


def acts(default: Any, **conditions: tuple[Any, ...] | Accepted) -> Any:
  """A field that acts only beside certain values of other fields.

  Set by hand beside others, it is refused. If it is a part of a config, this
  holds for all fields of the part.

  Args:
    default: of the field.
    **conditions: name of another field or property of its dataclass, which may
      have dots, -> its values.
  """
  return dataclasses.field(default=default, metadata={"acts": conditions})


class Checked:
  """Base of dataclasses whose values are checked, such as a config's.

  Errors name a field by its place: `prefix` below `root`, which is the config,
  or "--" for the arguments of a command.
  """

  _prefix = "config."
  # Groups of fields that stand in each other's place: setting one by hand
  # undoes those of the other groups.
  alternatives = typing.cast(tuple[tuple[str, ...], ...], ())
  # Whether objects of JSON may have further keys, which are left out.
  others = False

  def __init_subclass__(cls, prefix: str = "", root: str = "config."):
    if prefix or root != "config.":  # Else that of its base.
      cls._prefix = f"{root}{prefix}." if prefix else root
    is_config = cls._prefix.startswith("config.")
    for name, effects in _effects(cls).items() if is_config else ():
      if not effects:
        raise TypeError(
          f"{cls._prefix}{name}: say what the field affects, such as"
          " fields.Function[TYPE] (attnres_jax.config.fields.EFFECTS)"
        )

  def __post_init__(self):
    for name, kind in kinds(type(self)).items():
      value = accept(self._prefix + name, getattr(self, name), kind)
      object.__setattr__(self, name, value)

  @classmethod
  def of_values(cls, values: Mapping[str, Any], prefix: str = "") -> Self:
    """An instance from an object in JSON; `prefix` precedes keys in errors.

    Fields without a default have to be there.
    """
    declared = kinds(cls)
    for field in dataclasses.fields(cls):  # pyrefly: ignore[bad-argument-type]
      needed = field.default is field.default_factory is dataclasses.MISSING
      if needed and field.name not in values:
        raise errors.ConfigError(
          f"{prefix}{field.name}: missing, expected"
          f" {words(declared[field.name], bounds=True)}"
        )
    given = {}
    for key, value in values.items():
      if key in declared:
        given[key] = accept(f"{prefix}{key}", value, declared[key])
      elif not cls.others:
        errors.check_in(f"{prefix}{key}", str(key), declared)
    return cls(**given)

  def require(self, holds: Any, name: str, accepted: str) -> None:
    """Refuses the value of the field `name` unless `holds`."""
    if not holds:
      errors.fail_argument(self._prefix + name, getattr(self, name), accepted)


def has(kind: str) -> Accepted:
  """A condition of `acts`: a tuple that contains `kind`."""
  return Accepted(lambda values: kind in values, f"some with {kind!r}")


# A condition of `acts`.
SOME = Accepted(bool, "any but 0")


def conditions(field: dataclasses.Field) -> dict[str, Accepted]:
  """Conditions of `acts`: name of another field -> its values that allow it."""
  return {
    other: values
    if isinstance(values, Accepted)
    else Accepted(values.__contains__, " or ".join(map(repr, values)))
    for other, values in field.metadata.get("acts", {}).items()
  }


def check_acts(config: Checked, name: str, value: Any) -> None:
  """Refuses a value of a field that cannot act in this config, or part of one.

  Dots in the field's name lead from there.
  """
  part = config
  for leaf in name.split("."):
    (field,) = (f for f in dataclasses.fields(part) if f.name == leaf)  # pyrefly: ignore[bad-argument-type]
    for other, accepted in conditions(field).items():
      actual = operator.attrgetter(other)(part)
      if not accepted.test(actual):
        errors.fail_argument(
          config._prefix + name,
          value,
          "no value of its own, since it acts only with"
          f" {part._prefix.removeprefix('config.')}{other}={accepted.words} (is"
          f" {actual!r})",
        )
    part = getattr(part, leaf)


def accept(name: str, value: Any, kind: Any) -> Any:
  """`value` as the type of the field or argument `name`, such as 1 as 1.0.

  Raises:
    ConfigError: it is of another type, or not among what the field accepts.
  """
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if origin is Annotated:
    value = accept(name, value, args[0])
    accepted = args[1]
    if not accepted.test(value):
      errors.fail_argument(name, value, accepted.words)
    if args[0] is int and value > accepted.most:
      errors.fail_argument(name, value, f"a number up to {accepted.most}")
    return accepted.change(value)
  if origin is Literal:
    errors.check_in(name, accept(name, value, str), args)
    return value
  if origin in (typing.Union, types.UnionType):  # With None.
    return None if value is None else accept(name, value, args[0])
  if kind is Any:
    return value
  if origin in (dict, Mapping):
    if not isinstance(value, Mapping):
      errors.fail_argument(name, value, "an object")
    return {k: accept(f"{name}.{k}", v, args[1]) for k, v in value.items()}
  if origin is tuple:
    if not isinstance(value, (list, tuple)):
      errors.fail_argument(name, value, f"a {words(kind)}")
    return tuple(accept(name, v, args[0]) for v in value)
  if hasattr(kind, "of_values") and isinstance(value, Mapping):
    return kind.of_values(value, f"{name}.")
  if dataclasses.is_dataclass(kind) and not isinstance(value, kind):
    errors.fail_argument(name, value, f"fields of {kind.__name__}")
  allowed = {int: numbers.Integral, float: numbers.Real}.get(kind, kind)
  if not isinstance(value, allowed) or isinstance(value, bool) > (kind is bool):
    errors.fail_argument(name, value, f"a value of type {kind.__name__}")
  if isinstance(value, str) and "\0" in value:
    errors.fail_argument(name, value, "text without a null character")
  if isinstance(value, str) and not is_unicode(value):
    errors.fail_argument(name, value, "text in UTF-8")
  return _number(name, value, kind) if kind in (int, float) else value


def is_unicode(text: str) -> bool:
  """Whether a text is UTF-8; names of files and arguments may be any bytes."""
  return not any("\ud800" <= c <= "\udfff" for c in text)


def integer(text: str) -> int:
  """A whole number, which may be written as 1e4; raises ValueError."""
  try:
    return int(text)
  except ValueError:
    number = float(text)
    if not number.is_integer():  # Nor is infinity or NaN.
      raise
    return int(number)


def plain(kind: Any) -> Any:
  """A type without what is accepted of it."""
  annotated = typing.get_origin(kind) is Annotated
  kind = typing.get_args(kind)[0] if annotated else kind
  return str if typing.get_origin(kind) is Literal else kind


def words(kind: Any, bounds: bool = False) -> str:
  """A type in words; with `bounds`, also what is accepted of it."""
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if bounds and origin is Literal:
    return " | ".join(map(repr, args))
  if origin is tuple:
    arg = words(args[0])
    example = "a,b" if arg == "str" else "1,2"
    return f"tuple of {arg}, such as {example}" if bounds else f"tuple of {arg}"
  if origin in (dict, Mapping):
    return "an object"
  name = plain(kind).__name__
  if bounds and origin is Annotated and args[0] is not str:
    most = args[1].most
    limit = f" up to {most}" if args[0] is int and most < 2**31 - 1 else ""
    return f"{name}, {args[1].words}{limit}"
  return name


def _number(name: str, value: Any, kind: type) -> int | float:
  if kind is int:
    return int(value)
  try:
    number = float(value)
  except OverflowError:
    number = math.inf
  if not math.isfinite(number):
    errors.fail_argument(name, value, "a finite number")
  if number and not _FLOAT32_MIN <= abs(number) < _FLOAT32_MAX:
    errors.fail_argument(name, value, "a number within the range of float32")
  return number


@functools.cache
def kinds(cls: type) -> dict[str, Any]:
  """Type of each field, without what it affects."""
  hints = typing.get_type_hints(cls, include_extras=True)
  fields = {name: hints[name] for name in _names(cls)}
  return {name: _without_effects(kind) for name, kind in fields.items()}


def family(cls: type) -> Iterator[type]:
  """A class of configs and its subclasses, which have options of schemes."""
  yield cls
  for subclass in cls.__subclasses__():
    yield from family(subclass)


def with_field(cls: type, name: str) -> type:
  """The first class of a family that has a field; `cls` itself if none has."""
  return next((c for c in family(cls) if name in kinds(c)), cls)


def affected(cls: type, name: str) -> frozenset[str]:
  """The effects of a field, some of `EFFECTS` and "step".

  Args:
    cls: of a config or of a part of one.
    name: of the field below it, with dots.
  """
  part, _, rest = name.partition(".")
  cls = with_field(cls, part)
  return affected(kinds(cls)[part], rest) if rest else _effects(cls)[part]


@functools.cache
def _effects(cls: type) -> dict[str, frozenset[str]]:
  """What each field affects; parts have fields of their own."""
  hints = typing.get_type_hints(cls, include_extras=True)
  return {
    name: frozenset().union(
      *(m.what for m in typing.get_args(kind)[1:] if isinstance(m, Affects))
    )
    for name in _names(cls)
    if not dataclasses.is_dataclass(kind := hints[name])
  }


def _names(cls: type) -> list[str]:
  """Names of annotated fields, also before `dataclass` has seen the class."""
  return [
    name for base in cls.__mro__ for name in inspect.get_annotations(base)
  ]


def _without_effects(kind: Any) -> Any:
  if typing.get_origin(kind) is not Annotated:
    return kind
  plain_kind, *metadata = typing.get_args(kind)
  metadata = [m for m in metadata if not isinstance(m, Affects)]
  return Annotated[plain_kind, *metadata] if metadata else plain_kind

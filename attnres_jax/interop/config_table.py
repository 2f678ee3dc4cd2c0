# SPDX-License-Identifier: Apache-2.0
"""A config.json as a table of its keys, read in both directions.

Each entry of a table reads one or a few keys as fields of `ModelConfig`, and
writes them. Every key has to be understood: `read` refuses what no entry has
taken. Every network has to come back: `write` reads what it has written, and
refuses a network that is then another one, whichever field was lost.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import operator
from typing import Any, NamedTuple, NoReturn

from flax import traverse_util

from attnres_jax import config as config_lib
from attnres_jax.config import fields as kinds

# They describe files, training or code, not the network.
_HARMLESS = """_name_or_path _attn_implementation attn_implementation auto_map
  architectures chunk_size_feed_forward dtype id2label initializer_range
  label2id model_type output_attentions output_hidden_states pretraining_tp
  problem_type return_dict torch_dtype transformers_version use_cache""".split()
# Keys outside of the network, which an export repeats; an import reads them as
# `data.text_format` does.
IDS = "bos_token_id", "eos_token_id", "pad_token_id"
LENGTHS = "max_position_embeddings", "model_max_length"
REQUIRED = object()  # In place of a default.
# Fields that change how a network is computed, stored or drawn at random, and
# not which function it is.
EXECUTION = tuple(
  name
  for name in config_lib.flatten(dataclasses.asdict(config_lib.ModelConfig()))
  if "function" not in config_lib.affects(f"model.{name}")
)


class Keys:
  """The keys of a config.json that nobody has taken yet.

  Attributes:
    where: the file, for errors.
  """

  def __init__(self, values: Mapping[str, Any], where: str = "config.json"):
    self._left = dict(values)
    self.where = where

  def take(self, name: str, kind: Any, default: Any = REQUIRED) -> Any:
    """The value of a key, checked; null and absent give the default.

    The kind is one that `fields.accept` knows, such as `fields.Size`.

    Raises:
      ConfigError: it is absent without a default, or cannot be accepted.
    """
    value = self._left.pop(name, None)
    if value is None:
      if default is REQUIRED:
        self.fail(name, None, "a value")
      return default
    return kinds.accept(f"{self.where}: {name}", value, kind)

  def expect(self, name: str, *accepted: Any) -> None:
    """Refuses a key with any other value; absent and null are accepted.

    Raises:
      ConfigError: it has another value.
    """
    value = self._left.pop(name, None)
    same = any(type(value) is type(v) and value == v for v in accepted)
    if value is not None and not same:
      words = " or ".join(repr(v) for v in accepted) or "null"
      self.fail(name, value, f"{words}; nothing else can be imported")

  def ignore(self, *names: str) -> None:
    """Drops keys that do not matter."""
    for name in names:
      self._left.pop(name, None)

  def below(self, name: str) -> "Keys":
    """The keys of the object of this name; of an empty one if it is absent."""
    return Keys(self.take(name, dict, {}), f"{self.where}: {name}")

  def has(self, name: str) -> bool:
    return self._left.get(name) is not None

  def finish(self) -> None:
    """Refuses all keys that are left.

    Raises:
      ConfigError: naming the first.
    """
    for name, value in self._left.items():
      self.fail(name, value, "no such key: what it means here is not known")

  def fail(self, name: str, value: Any, accepted: str) -> NoReturn:
    """Raises the one-line error of a key."""
    config_lib.fail_argument(f"{self.where}: {name}", value, accepted)


class Entry(NamedTuple):
  """What one or a few keys mean, in both directions.

  Attributes:
    read: fields by dotted name, given `Keys` and the fields found before.
    write: keys, given a config in the form of `network`.
  """

  read: Callable[[Keys, Mapping[str, Any]], dict[str, Any] | None]
  write: Callable[[config_lib.ModelConfig], dict[str, Any]] = lambda config: {}


def key(
  name: str,
  fields: str,
  kind: Any = kinds.Size,
  default: Any = REQUIRED,
  *,
  null: Any = REQUIRED,
) -> Entry:
  """A key that states a field.

  Args:
    name: of the key.
    fields: dotted names, of which a value states all.
    kind: see `Keys.take`.
    default: what an absent key means, or a function of the fields found.
    null: the value of the field for which null is written.
  """
  names = fields.split()

  def read(keys: Keys, so_far: Mapping[str, Any]) -> dict[str, Any]:
    usual = default(so_far) if callable(default) else default
    return dict.fromkeys(names, keys.take(name, kind, usual))

  def write(config: config_lib.ModelConfig) -> dict[str, Any]:
    value = get(config, names[0])
    return {name: None if value == null else value}

  return Entry(read, write)


def fixed(name: str, *accepted: Any, written: bool = True) -> Entry:
  """A key with which there is only one function; the first value is written."""
  written_as = {name: next(iter(accepted), None)} if written else {}
  return Entry(
    lambda keys, so_far: keys.expect(name, *accepted), lambda c: written_as
  )


def same(name: str, field: str) -> Entry:
  """A key that has to state what a field states already."""
  return Entry(
    lambda keys, so_far: keys.expect(name, so_far[field]),
    lambda config: {name: get(config, field)},
  )


def ignored(*names: str) -> Entry:
  """Keys that do not change the function."""
  return Entry(lambda keys, so_far: keys.ignore(*names))


def read(
  entries: Sequence[Entry], keys: Keys, fields: Mapping[str, Any]
) -> config_lib.ModelConfig:
  """The network of a config.json, in float32, from all of its keys.

  All networks of the family have these `fields`, by dotted name.

  Raises:
    ConfigError: a key is unknown, or has a value that cannot be imported.
  """
  so_far = dict(fields)
  for entry in entries:
    so_far |= entry.read(keys, so_far) or {}
  config = build(so_far)
  finish(keys, config)
  return config


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
  """Adds the file to errors that name only a field of ours."""
  try:
    yield
  except config_lib.ConfigError as error:
    if where in str(error):
      raise
    raise config_lib.ConfigError(f"{where}: {error}") from error


def finish(
  keys: Keys, config: config_lib.ModelConfig, beside: Sequence[Entry] = ()
) -> None:
  """Takes keys outside of the network, and refuses all others.

  Entries of `beside` state nothing new.

  Raises:
    ConfigError: a key is unknown, or contradicts the network.
  """
  written = config_lib.flatten(dataclasses.asdict(config))
  for entry in beside:
    entry.read(keys, written)
  for name in LENGTHS:
    keys.take(name, kinds.Size, 1)
  keys.ignore(*_HARMLESS, *IDS)
  keys.finish()


def write(
  entries: Sequence[Entry], config: config_lib.ModelConfig
) -> dict[str, Any]:
  """The keys of a network; whether they say all of it is for `check_same`."""
  shape, values = network(config), {}
  for entry in entries:
    values |= entry.write(shape)
  return values


def check_same(
  written: config_lib.ModelConfig, config: config_lib.ModelConfig
) -> None:
  """Refuses a network that a config.json has turned into another one.

  Raises:
    ConfigError: names the fields that differ.
  """
  ours, theirs = (dataclasses.asdict(network(c)) for c in (config, written))
  wrong = [
    f"config.model.{field}: got {value!r}, expected {other!r}"
    for field, (value, other) in config_lib.differences(ours, theirs).items()
  ]
  if wrong:
    raise config_lib.ConfigError("; ".join(wrong))


def build(fields: Mapping[str, Any]) -> config_lib.ModelConfig:
  """The network with these fields, by dotted name."""
  nested = traverse_util.unflatten_dict(fields, sep=".")
  run = {"model": nested, "data": {"tokenizer": "ids"}}
  return config_lib.build_run_config(run).model


def get(config: Any, field: str) -> Any:
  """The value of a field, by dotted name."""
  return operator.attrgetter(field)(config)


def network(config: config_lib.ModelConfig) -> config_lib.ModelConfig:
  """The function of a network: two that are the same function are equal.

  Fields without an effect on this network are at their defaults, and sizes
  that follow from others are written out.
  """
  residual = type(config.residual)()
  default = config_lib.ModelConfig(residual=residual)
  plain = config_lib.flatten(dataclasses.asdict(default))
  flat = config_lib.flatten(dataclasses.asdict(config))
  mixers, last = pattern(config.sublayer_kinds[::2])
  flat |= dict(
    mixers=mixers, last_mixer=last, num_kv_heads=config.kv_heads,
    head_width=config.head_size, mlp_width=config.mlp_size,
  )  # fmt: skip
  present, scheme = set(config.sublayer_kinds), config.residual.name
  attends = "attention" in present
  # Beginnings of names, and whether such fields have an effect.
  effects = {
    "num_kv_heads": attends, "head_width": attends, "rope_theta": attends,
    "attention.": attends, "kda.": "kda" in present, "mla.": "mla" in present,
    "moe.": "moe" in present,
    "activation.": config.activation.name != "silu",
    "rope.": attends and config.rope_theta and config.rope.scaling != "none",
    "residual.": scheme != "prenorm",
  }  # fmt: skip
  effective = {"residual.name"}
  if scheme in ("block_attnres", "full_attnres"):
    effects["residual."] = False
    effective |= {name for name in flat if name.startswith("residual.read.")}
    if flat["residual.read.heads"] == 1:  # As is 0.
      flat["residual.read.heads"] = 0
  without = tuple(
    name for name, has_effect in effects.items() if not has_effect
  )
  for name in flat:
    if name.startswith(without) and name not in effective:
      flat[name] = plain[name]
  residual = config.residual
  if scheme == "block_attnres" and (residual.block_size or residual.num_blocks):
    size = residual.sublayers_per_block(config.num_sublayers)
    flat["residual.block_size"] = min(size, config.num_sublayers)
  return build(flat | {name: plain[name] for name in EXECUTION if name in flat})


def pattern(kinds_: Sequence[str]) -> tuple[tuple[str, ...], str]:
  """The shortest pattern that repeats, and the last one if it differs."""
  letters = {kind: chr(i) for i, kind in enumerate(dict.fromkeys(kinds_))}
  text, count = "".join(letters[kind] for kind in kinds_), len(kinds_)
  for size in range(1, count + 1):
    if not count % size and text.startswith(text[size:]):
      return tuple(kinds_[:size]), ""
    if text[:-1].startswith(text[size:-1]):
      return tuple(kinds_[:size]), kinds_[-1]
  raise ValueError("there are no mixers")

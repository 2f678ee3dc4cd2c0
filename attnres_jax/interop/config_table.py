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
import math
from typing import Any, NoReturn

from attnres_jax import config as config_lib
from attnres_jax.config import fields as kinds

# They describe files, training or code, not the network.
_HARMLESS = (
    "_name_or_path", "_attn_implementation", "attn_implementation", "auto_map",
    "chunk_size_feed_forward", "dtype", "id2label", "initializer_range",
    "label2id", "output_attentions", "output_hidden_states", "pretraining_tp",
    "problem_type", "return_dict", "torch_dtype", "transformers_version",
    "use_cache",
)  # fmt: skip
_IDS = "bos_token_id", "eos_token_id", "pad_token_id"
_LENGTHS = "max_position_embeddings", "model_max_length"
_MISSING = object()
# Fields that change how a network is computed, stored or drawn at random, and
# not which function it is.
EXECUTION = (
    "attention_kernel", "init_std", "dtype", "parameter_dtype", "remat",
    "scan_layers", "depth_loop", "kda.chunk_size", "kda.save", "residual.form",
    "residual.schedule_size", "residual.read.query_init",
)  # fmt: skip


class Keys:
  """The keys of a config.json that nobody has taken yet.

  Attributes:
    where: the file, for errors.
  """

  def __init__(self, values: Mapping[str, Any], where: str = "config.json"):
    self._left = dict(values)
    self.where = where

  def take(self, name: str, kind: Any, default: Any = _MISSING) -> Any:
    """The value of a key, checked; null and absent give the default.

    Args:
      name: of the key.
      kind: what `fields.accept` knows, such as `fields.Size`.
      default: what null means.

    Raises:
      ConfigError: it is absent without a default, or cannot be accepted.
    """
    value = self._left.pop(name, None)
    if value is None:
      if default is _MISSING:
        self.fail(name, None, "a value")
      return default
    return kinds.accept(f"{self.where}: {name}", value, kind)

  def expect(self, name: str, *accepted: Any) -> None:
    """Refuses a key with any other value; absent and null are accepted.

    Raises:
      ConfigError: it has another value.
    """
    value = self._left.pop(name, None)
    same = any(type(value) is type(one) and value == one for one in accepted)
    if value is not None and not same:
      words = " or ".join(repr(one) for one in accepted) or "null"
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

  def check_ids(self, vocab_size: int) -> None:
    """Takes the keys of special tokens: ids, lists of ids (eos), or null.

    Raises:
      ConfigError: one is something else, or not in the vocabulary.
    """
    for name in _IDS:
      value = self._left.pop(name, None)
      several = name == "eos_token_id" and isinstance(value, list)
      for one in value if several else [value]:
        # LLaMA 1 says -1 for no padding.
        absent = one is None or (name == "pad_token_id" and one == -1)
        if not absent and (type(one) is not int or not 0 <= one < vocab_size):
          self.fail(name, value, f"ids from 0 to {vocab_size - 1}, or null")

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


@dataclasses.dataclass(frozen=True)
class Key:
  """A key that states a field.

  As for all entries, `read` returns fields by dotted name, given the fields of
  earlier entries. `write` returns keys, given a config in the form of
  `network`.

  Attributes:
    name: of the key.
    field: dotted name of the field; several for one that states them all.
    kind: see `Keys.take`.
    default: what an absent key means, or a function of the fields found.
    null: the value of the field for which null is written.
    words: values of the key, and the field's in their place.
  """

  name: str
  field: str | tuple[str, ...]
  kind: Any = kinds.Size
  default: Any = _MISSING
  null: Any = _MISSING
  words: Mapping[Any, Any] = dataclasses.field(default_factory=dict)

  def read(self, keys: Keys, found: Mapping[str, Any]) -> dict[str, Any]:
    default = self.default(found) if callable(self.default) else self.default
    value = keys.take(self.name, self.kind, default)
    names = self.field if isinstance(self.field, tuple) else (self.field,)
    return dict.fromkeys(names, self.words.get(value, value))

  def write(self, config: config_lib.ModelConfig) -> dict[str, Any]:
    name = self.field[0] if isinstance(self.field, tuple) else self.field
    value = get(config, name)
    backwards = {field: key for key, field in self.words.items()}
    return {
      self.name: None if value == self.null else backwards.get(value, value)
    }


class Fixed:
  """A key with which there is only one function; the first value is written."""

  def __init__(self, name: str, *accepted: Any, written: bool = True):
    self._name, self._accepted = name, accepted
    self._written = written

  def read(self, keys: Keys, found: Mapping[str, Any]) -> dict[str, Any]:
    del found
    keys.expect(self._name, *self._accepted)
    return {}

  def write(self, config: config_lib.ModelConfig) -> dict[str, Any]:
    del config
    first = self._accepted[0] if self._accepted else None
    return {self._name: first} if self._written else {}


class Same(Fixed):
  """A key that has to state what a field states already."""

  def __init__(self, name: str, field: str):
    super().__init__(name)
    self._field = field

  def read(self, keys: Keys, found: Mapping[str, Any]) -> dict[str, Any]:
    keys.expect(self._name, found[self._field])
    return {}

  def write(self, config: config_lib.ModelConfig) -> dict[str, Any]:
    return {self._name: get(config, self._field)}


class Ignored:
  """Keys that do not change the function."""

  def __init__(self, *names: str):
    self._names = names

  def read(self, keys: Keys, found: Mapping[str, Any]) -> dict[str, Any]:
    del found
    keys.ignore(*self._names)
    return {}

  def write(self, config: config_lib.ModelConfig) -> dict[str, Any]:
    del config
    return {}


@dataclasses.dataclass(frozen=True)
class Pair:
  """Two functions that are each other's inverse, for keys that belong together.

  Attributes:
    read: see `Key`.
    write: see `Key`.
  """

  read: Callable[[Keys, Mapping[str, Any]], dict[str, Any]]
  write: Callable[[config_lib.ModelConfig], dict[str, Any]]


Entry = Key | Fixed | Ignored | Pair


def read(
  entries: Sequence[Entry],
  keys: Keys,
  fields: Mapping[str, Any],
) -> config_lib.ModelConfig:
  """The network of a config.json, in float32.

  Args:
    entries: of the table.
    keys: of the file; all are taken.
    fields: which all networks of the family share, by dotted name.

  Raises:
    ConfigError: a key is unknown, or has a value that cannot be imported.
  """
  found = dict(fields)
  keys.ignore("model_type", "architectures")
  for entry in entries:
    found |= entry.read(keys, found)
  with naming(keys.where):
    config = build(found)
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
  """Takes keys that are not about the network, and refuses all other keys.

  Args:
    keys: of the file, or of an object in it.
    config: the network.
    beside: further entries, which state nothing new.

  Raises:
    ConfigError: a key is unknown, or contradicts the network.
  """
  found = config_lib.flatten(dataclasses.asdict(config))
  for entry in beside:
    entry.read(keys, found)
  for name in _LENGTHS:
    keys.take(name, kinds.Size, 1)
  keys.ignore("model_type", "architectures", *_HARMLESS)
  keys.check_ids(config.vocab_size)
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

  Args:
    written: what is read of it.
    config: what it was written for.

  Raises:
    ConfigError: names the fields that differ.
  """
  ours, theirs = (dataclasses.asdict(network(c)) for c in (config, written))
  wrong = [
    f"config.model.{field}: got {value!r}, expected {only!r}"
    for field, (value, only) in config_lib.differences(ours, theirs).items()
    # The square of a square root, in YaRN's factor of logits.
    if not (
      isinstance(value, float) and math.isclose(value, only, rel_tol=1e-12)
    )
  ]
  if wrong:
    raise config_lib.ConfigError("; ".join(wrong))


def build(fields: Mapping[str, Any]) -> config_lib.ModelConfig:
  """The network with these fields, by dotted name."""
  run = {"model": nested(fields), "data": {"tokenizer": "ids"}}
  return config_lib.build_run_config(run).model


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
  """Fields by dotted name as objects in objects."""
  found: dict[str, Any] = {}
  for name, value in fields.items():
    *parents, leaf = name.split(".")
    node = found
    for parent in parents:
      node = node.setdefault(parent, {})
    node[leaf] = value
  return found


def get(config: Any, field: str) -> Any:
  """The value of a field, by dotted name."""
  for name in field.split("."):
    config = getattr(config, name)
  return config


def network(config: config_lib.ModelConfig) -> config_lib.ModelConfig:
  """The function of a network: two that are the same function are equal.

  Fields without an effect on this network are at their defaults, and sizes
  that follow from others are written out.
  """
  plain = config_lib.ModelConfig()
  kinds_ = config.sublayer_kinds
  mixers, last = pattern(kinds_[::2])
  attends, latent = "attention" in kinds_, "mla" in kinds_
  theta = config.rope_theta if attends else plain.rope_theta
  turns = (attends and theta) or (latent and config.mla.rope_theta)
  rope = config.rope
  if not turns or rope.scaling == "none":
    pairs = rope.pairs if turns else plain.rope.pairs
    rope = dataclasses.replace(
      plain.rope, logit_scale=rope.logit_scale, pairs=pairs
    )
  moe = config.moe if "moe" in kinds_ else plain.moe
  if moe.groups == 1:
    moe = dataclasses.replace(moe, top_groups=1)
  found = dataclasses.asdict(
    dataclasses.replace(
      config,
      mixers=mixers,
      last_mixer=last,
      num_kv_heads=config.kv_heads if attends else 0,
      head_width=config.head_size if attends else 0,
      mlp_width=config.mlp_size,
      rope_theta=theta,
      attention=config.attention if attends else plain.attention,
      rope=rope,
      activation=plain.activation
      if config.activation.name == "silu"
      else config.activation,
      kda=config.kda if "kda" in kinds_ else plain.kda,
      mla=config.mla if latent else plain.mla,
      moe=moe,
      residual=_residual(config),
      lora=config.lora if config.lora.rank else plain.lora,
      depth_stride=0 if config.depth_memory == "none" else config.depth_stride,
    )
  )
  flat = config_lib.flatten(found)
  return build(flat | {name: get(plain, name) for name in EXECUTION})


def _residual(config: config_lib.ModelConfig) -> config_lib.ResidualConfig:
  residual = config.residual
  new = config_lib.ResidualConfig(residual.name)
  if residual.name == "prenorm":
    return new
  if residual.name not in ("block_attnres", "full_attnres"):
    return residual
  read = residual.read
  if read.heads == 1:  # As is 0.
    read = dataclasses.replace(read, heads=0)
  size = 0
  if residual.name == "block_attnres" and (
    residual.block_size or residual.num_blocks
  ):
    size = residual.sublayers_per_block(config.num_sublayers)
    size = min(size, config.num_sublayers)
  return dataclasses.replace(new, block_size=size, read=read)


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

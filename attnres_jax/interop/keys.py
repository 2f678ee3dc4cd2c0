# SPDX-License-Identifier: Apache-2.0
"""A config.json, every key of which has to be understood.

A key that changes the function of a network, and that nobody looked at, would
be silently ignored. So each is taken, expected to have one value, or ignored
by name; `finish` refuses the others.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

from attnres_jax import config as config_lib

# They describe files, training or how text is made, not the network.
HARMLESS = (
    "_name_or_path", "_attn_implementation", "attn_implementation",
    "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id",
    "id2label", "initializer_range", "label2id", "output_attentions",
    "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type",
    "return_dict", "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip
_MISSING = object()


class Keys:
  """The keys of a config.json that nobody has taken yet."""

  def __init__(self, values: Mapping[str, Any], prefix: str = "config.json"):
    self._left = dict(values)
    self._prefix = prefix

  def take(self, name: str, kind: type, default: Any = _MISSING) -> Any:
    """The value of a key, checked; null and absent give the default.

    Raises:
      ConfigError: it is absent without a default, or of another type.
    """
    value = self._left.pop(name, None)
    if value is None:
      if default is _MISSING:
        self.fail(name, None, f"a value of type {kind.__name__}")
      return default
    if kind is float and type(value) is int:
      value = float(value)
    if type(value) is not kind:
      self.fail(name, value, f"a value of type {kind.__name__}")
    return value

  def expect(self, name: str, *accepted: Any) -> None:
    """Refuses a key with any other value; absent and null are accepted.

    Raises:
      ConfigError: it has another value.
    """
    value = self._left.pop(name, None)
    if value is not None and value not in accepted:
      words = " or ".join(repr(one) for one in accepted)
      self.fail(name, value, f"{words}; nothing else can be imported")

  def ignore(self, *names: str) -> None:
    """Drops keys that do not matter."""
    for name in names:
      self._left.pop(name, None)

  def below(self, name: str) -> "Keys":
    """The keys of the object of this name; of an empty one if it is absent."""
    return Keys(self.take(name, dict, {}), f"{self._prefix}: {name}")

  def is_there(self, name: str) -> bool:
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
    config_lib.fail_argument(f"{self._prefix}: {name}", value, accepted)


# Fields of `MlaConfig` that every family has -> their keys.
_MLA = {
  "latent_rank": "kv_lora_rank",
  "nope_width": "qk_nope_head_dim",
  "shared_width": "qk_rope_head_dim",
  "value_width": "v_head_dim",
}


def read_mla(keys: Keys) -> dict[str, Any]:
  """The widths of MLA, as arguments of `MlaConfig`."""
  return {field: keys.take(name, int) for field, name in _MLA.items()}


def write_mla(mla: config_lib.MlaConfig) -> dict[str, int]:
  """The keys that `read_mla` reads."""
  return {name: getattr(mla, field) for field, name in _MLA.items()}

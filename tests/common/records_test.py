# SPDX-License-Identifier: Apache-2.0
"""Every JSON file that we or others write is read right, or told in one line.

One property for all classes of `records`: whatever stands in the place of any
value, a file is refused with its path and the key, or what is read can be
written and read again.
"""

import json
import math

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import records
from attnres_jax.data import prepare
from attnres_jax.data import token_files
from attnres_jax.interop import tensor_files
from attnres_jax.interop import weights_folder
from attnres_jax.scaling import grid
from attnres_jax.sweep import folder
from attnres_jax.sweep import state
from attnres_jax.train import checksums
from attnres_jax.train import claims
from attnres_jax.train import metrics
from attnres_jax.train import run_folder

SPLIT = {"documents": 1, "bytes": 9, "tokens": 12, "files": ["x.bin"]}
SIDECAR = {
  "dtype": "uint16", "count": 12, "header_bytes": 0, "vocab_size": 300,
  "separator_id": 256, "tokenizer": {"name": "bytes"}, "sha256": "ab",
}  # fmt: skip
# A file of each class.
FILES = {
  state.State: {
    "status": "running", "attempts": 2, "host": "h", "pid": 7, "token": "t",
    "started": 1.5, "heartbeat": 2.0, "seconds": 0.5, "chip_seconds": 4.0,
    "error": "",
  },
  grid.Run: {"name": "a-1", "overrides": {"seed": 1}, "config": {"seed": 1}},
  folder.Index: {"runs": ["a-1", "b.2"], "source": "c.py"},
  claims.Holder: {
    "host": "h", "pid": 7, "token": "t", "started": 1.5, "heartbeat": 2.5
  },
  token_files.Sidecar: SIDECAR,
  prepare.Shard: SIDECAR | {"documents": 1, "bytes": 9, "next_document": 1},
  token_files.Dataset: {
    "complete": True, "settings": {"shard_tokens": 9},
    "splits": {"train": SPLIT, "validation": SPLIT},
  },
  tensor_files.Index: {"weight_map": {"a": "x.safetensors"}},
  weights_folder.Facts: {
    "format": "huggingface", "family": "llama", "source": "there",
    "dtype": "F32", "dtypes": {"a": "BF16"},
    "config": {"max_position_embeddings": 64}, "files": ["tokenizer.json"],
  },
  run_folder.Summary: {
    "status": "finished", "step": 9, "validation_loss": 2.5, "train_loss": 2.0,
    "step_seconds": 0.1,
  },
  run_folder.Text: {
    "train": {"fingerprint": "ab"}, "validation": {"fingerprint": "cd"}
  },
  config_lib.RunConfig: json.loads(
    config_lib.to_json(config_lib.RunConfig.of_values({}))
  ),
  metrics.Place: {"step": 3, "split": "train"},
  checksums.Listing: {
    "files": {
      "model/x": {"xxh3": ["ab"], "bytes": 3},
      "_CHECKPOINT_METADATA": {"xxh3": ["cd"]},
    },
    "xxh3": "ef",
  },
}  # fmt: skip
DEFAULTS = config_lib.flatten(FILES[config_lib.RunConfig])
# Classes whose files may be empty objects.
NOTHING_NEEDED = {state.State, weights_folder.Facts, config_lib.RunConfig}
# Of others.
_PARTS = {token_files.Split, checksums.Sums, run_folder.SplitOfText}
VALUES = st.sampled_from(
  (
    None, True, False, 0, 1, -1, 2**31, 2**32, 10**12, 10**400, 0.5, 1e-40,
    1e300, math.nan, math.inf, -math.inf, "", "x", "../x", "a/b", "..", ".x",
    "done", "uint32", "F16", "\x1b[31m", "a\nb", "a\0b", "\ud800", "x" * 5000,
    [], [[]], ["a"], ["../a"], {}, {"train": 1}, {"a": []}, {"a": "b"},
  )
) | st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
  lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
  max_leaves=4,
)  # fmt: skip


def test_all_classes_are_here():
  def below(cls):
    return {cls}.union(*map(below, cls.__subclasses__()))

  ours = {c for c in below(records.Record) if c.__module__[:5] != "tests"}
  ours = ours - {records.Record} | {config_lib.RunConfig}
  assert ours == {*FILES, *_PARTS}


def _places(values, keys=()):
  """The keys of every value in an object, and of those in objects in it."""
  for key, value in values.items():
    yield (*keys, key)
    if isinstance(value, dict):
      yield from _places(value, (*keys, key))


@pytest.mark.parametrize("cls", FILES)
def test_a_good_file(cls, tmp_path):
  path = tmp_path / "a.json"
  path.write_text(json.dumps(FILES[cls]))
  record = records.read(path, cls)
  records.write(path, record)
  # `files` of facts, in which lists are tuples, are lists again.
  assert json.loads(path.read_text()) == FILES[cls]
  assert records.read(path, cls) == record


@pytest.mark.parametrize("cls", FILES)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_value_in_any_place(cls, data):
  values = json.loads(json.dumps(FILES[cls]))
  *parents, key = data.draw(st.sampled_from(list(_places(values))))
  where = values
  for parent in parents:
    where = where[parent]
  removed = data.draw(st.integers(0, 9)) == 0
  value = data.draw(VALUES)
  del where[key]
  if not removed:
    where[key] = value
  text = json.dumps(values)
  try:
    record = config_lib.from_json(text, "a.json", cls.of_values)
  except config_lib.ConfigError as error:
    message = str(error)
    assert message.isprintable() and message.startswith("a.json: ")
    told = message.removeprefix("a.json: ").partition(": ")[0]
    named = ".".join([*parents, key])
    if cls is config_lib.RunConfig:
      told = told.removeprefix("config.")
      named = told if told in DEFAULTS else named  # A rule of two parts.
    # The key, or one inside of its value or, of a rule of two keys, around it.
    assert told.startswith(named) or named.startswith(told), message
    assert "expected" in message
    return
  text = config_lib.to_json(record)
  again = config_lib.from_json(text, "a.json", cls.of_values)
  assert config_lib.to_json(again) == text


# Values of the right type that mean nothing, or lead elsewhere.
_COUNTS = -1, 1.5, 10**30, "3", True
BAD = {
  state.State: {
    "status": ("great", None), "attempts": ("three",), "mood": ("good",),
  },
  grid.Run: {"config": ([],), "name": (3,)},
  folder.Index: {"runs": (None, ["../a"], [".a"], ["a/b"], "a")},
  claims.Holder: {"pid": ("x",), "heartbeat": (math.nan, None)},
  token_files.Sidecar: {
    "dtype": ("int8", None), "count": _COUNTS, "header_bytes": _COUNTS,
    "vocab_size": (0, -3, 2**31, 5.0), "separator_id": (-1, 2**31),
    "tokenizer": ("bytes",), "sha256": (5,),
  },
  prepare.Shard: {
    key: (*_COUNTS, None) for key in ("count", "documents", "next_document")
  },
  token_files.Dataset: {
    "complete": (1, None), "settings": ([],),
    "splits": ({}, {"train": SPLIT}, {"train": []}, *(
      {"train": SPLIT | change, "validation": SPLIT}
      for change in (
        {"files": ["../x.bin"]}, {"files": [3]}, {"files": None},
        {"tokens": -1}, {"bytes": 2**60},
      )
    )),
  },
  tensor_files.Index: {"weight_map": ([], {"a": []}, {"a": "../x"}, {"a": ""})},
  weights_folder.Facts: {
    "dtype": ("F31", []), "dtypes": ([], {"a": []}, {"a": "x"}),
    "family": (3,), "files": ("x", [3], ["../secret.txt"]),
    "config": ([], {"max_position_embeddings": "x"}, {"model_max_length": 0}),
  },
  run_folder.Summary: {
    "status": ("stopped", None), "step": _COUNTS, "validation_loss": (-1, "2"),
  },
  run_folder.Text: {"train": ([], {}, {"fingerprint": None})},
  config_lib.RunConfig: {
    "model": ([], {"width": "3"}, {"width": 0}, {"residual": {"name": "x"}}),
    "seed": (-1, 2**32), "modle": ({},),
  },
  metrics.Place: {"step": _COUNTS, "split": (None, 3)},
  checksums.Listing: {
    "files": (
      [], {"a": ["0"]}, {"a": {"bytes": "3", "xxh3": ["0"]}},
      {"a": {"bytes": 10**12, "xxh3": ["0"]}}, {"a": {"xxh3": ["0"]}},
      {"../a": {"bytes": 3, "xxh3": ["0"]}},
    ),
  },
}  # fmt: skip


@pytest.mark.parametrize(
  "cls,key,value",
  [(c, k, v) for c in FILES for k, values in BAD[c].items() for v in values],
)
def test_a_value_that_means_nothing(cls, key, value):
  text = json.dumps(FILES[cls] | {key: value})
  with pytest.raises(config_lib.ConfigError, match=f"^a.json: .*{key}"):
    config_lib.from_json(text, "a.json", cls.of_values)


@pytest.mark.parametrize("cls", FILES)
@pytest.mark.parametrize(
  "content",
  ["", "{", "[]", "3", "null", "[" * 10_000, b"\xff", "{}", '{"a": 1}'],
)
def test_what_is_no_file_of_a_class(cls, content, tmp_path):
  path = tmp_path / "a.json"
  path.write_bytes(content if isinstance(content, bytes) else content.encode())
  if content not in ("{}", '{"a": 1}'):
    with pytest.raises(config_lib.ConfigError) as error:
      records.read(path, cls)
    assert str(error.value).startswith(f"{path}:")
    assert str(error.value).isprintable()
  elif content == "{}" and cls in NOTHING_NEEDED:
    assert records.read(path, cls) == cls.of_values({})
  elif cls in NOTHING_NEEDED - {weights_folder.Facts}:
    with pytest.raises(config_lib.ConfigError, match="a: got 'a', expected"):
      records.read(path, cls)
  elif cls is weights_folder.Facts:
    assert records.read(path, cls) == cls()
  else:
    with pytest.raises(config_lib.ConfigError, match=": missing, expected"):
      records.read(path, cls)


def test_files_beside_facts_are_no_links(tmp_path):
  (tmp_path / "secret.txt").write_text("abc")
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "tokenizer.json").symlink_to(tmp_path / "secret.txt")
  facts = tmp_path / "run" / weights_folder.FACTS
  facts.write_text('{"files": ["tokenizer.json"]}')
  with pytest.raises(config_lib.ConfigError, match="'tokenizer.json' is a li"):
    weights_folder.origin(facts.parent, config_lib.RunConfig())

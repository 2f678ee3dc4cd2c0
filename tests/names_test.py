# SPDX-License-Identifier: Apache-2.0
"""A name in a file of another person is a name, never a path.

Each reader below opens a folder whose JSON names a file outside of it, or
something that is no name. It has to refuse that in one line that names the
JSON, and must not open the file outside.
"""

import builtins
import json
import pathlib

from etils import epath
import hypothesis
from hypothesis import strategies as st
import pytest
import xxhash

from attnres_jax import config as config_lib
from attnres_jax.data import token_files
from attnres_jax.interop import tensor_files
from attnres_jax.interop import weights_folder
from attnres_jax.sweep import folder as sweep_folder
from attnres_jax.train import checksums

SECRET = "secret.txt"
PATHS = (
  f"../{SECRET}", f"a/../../{SECRET}", f"./../{SECRET}", "/etc/hostname", "..",
  ".", "", "a/", "a//b", f"..\\{SECRET}", "a\0b", "\x1b[2Jwiped", "a\nb",
  "\u202egnp.exe", "\ud800", "x" * 300, None, 7, ["a"], {"a": "b"},
)  # fmt: skip
names = st.sampled_from(PATHS) | st.text("./\\~a\x1b\u2028", max_size=8)
texts = names.filter(lambda name: isinstance(name, str))


def _dataset(folder, name):
  counts = {"documents": 1, "bytes": 1, "tokens": 1}
  split = counts | {"files": [name]}
  splits = {"train": split, "validation": split}
  values = {"complete": True, "settings": {}, "splits": splits}
  path = folder / token_files.DATASET_FILE
  path.write_text(json.dumps(values))
  return path, lambda: token_files.read_dataset("--x", epath.Path(folder))


def _index(folder, name):
  path = folder / tensor_files.INDEX
  path.write_text(json.dumps({"weight_map": {"tensor": name}}))
  return path, lambda: tensor_files.open_folder(folder)


def _companion(folder, name):
  path = folder / weights_folder.FACTS
  path.write_text(json.dumps({"files": [name]}))
  run = config_lib.build_run_config(config_lib.default_config().to_dict())
  return path, lambda: weights_folder.origin(folder, run)


def _checksums(folder, name):
  listed = {name: {"bytes": 3, "xxh3": ["0"]}}
  text = json.dumps(listed, sort_keys=True).encode()
  path = folder / checksums.FILE
  digest = xxhash.xxh3_128_hexdigest(text)
  path.write_text(json.dumps({"files": listed, "xxh3": digest}))

  def read():
    raise ValueError(*checksums.damage(epath.Path(folder)))

  return path, read


def _run(folder, name):
  path = folder / sweep_folder.SWEEP
  path.write_text(json.dumps({"source": "x", "runs": [name]}))
  return path, lambda: sweep_folder.names(folder)


# Reader -> names that its JSON can hold: keys of an object are texts.
READERS: dict = {
  _dataset: names, _index: names, _companion: names, _checksums: texts,
  _run: names,
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
def test_refuses_what_is_no_name(reader, tmp_path, monkeypatch):
  folder = tmp_path / "given"
  folder.mkdir()
  (tmp_path / SECRET).write_text("abc")
  opened, is_open = [], builtins.open

  def watch(file, *args, **kwargs):
    opened.append(str(file))
    return is_open(file, *args, **kwargs)

  monkeypatch.setattr(builtins, "open", watch)

  def check(name):
    stays = isinstance(name, str) and name.isprintable() and name
    if stays and pathlib.PurePosixPath(name).name == name and name != "..":
      hypothesis.assume("\\" in name)
    # Checksums name files of the folders below, too.
    if reader is _checksums and "/" in str(name):
      parts = name.split("/")
      hypothesis.assume({"", ".", ".."} & set(parts) or not name.isprintable())
    path, read = reader(folder, name)
    expected = "is damaged" if reader is _checksums else "got "
    with pytest.raises((ValueError, config_lib.RunError)) as error:
      read()
    text = str(error.value)
    assert (
      path.name in text and expected in text and len(text.splitlines()) == 1
    )
    assert text.isprintable(), text
    assert not any(SECRET in file for file in opened)

  settings = hypothesis.settings(
    max_examples=150, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
  )  # fmt: skip
  settings(hypothesis.given(READERS[reader])(check))()


def test_companions_are_no_links(tmp_path):
  (tmp_path / SECRET).write_text("abc")
  folder = tmp_path / "given"
  folder.mkdir()
  (folder / "tokenizer.json").symlink_to(tmp_path / SECRET)
  _, read = _companion(folder, "tokenizer.json")
  with pytest.raises(config_lib.ConfigError, match="'tokenizer.json' is a li"):
    read()

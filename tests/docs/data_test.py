# SPDX-License-Identifier: Apache-2.0
"""Executes every command of docs/data.md as the page prints it.

In place of the downloads, `tests.public_corpora` writes small files.
"""

import json
import re
import shlex
import subprocess

import pytest

from attnres_jax import data
from attnres_jax import main
from attnres_jax.common import command_line
from attnres_jax.data import prepare
from attnres_jax.data import sources
from attnres_jax.data import tokenizer as tokenizer_lib
from tests import tiny_run

public_corpora = pytest.importorskip("tests.public_corpora")

TEXT = (tiny_run.ROOT / "docs" / "data.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.S | re.M)
SCRIPTS = [block for kind, block in BLOCKS if not kind]
COMMANDS = [
  shlex.split(line)[2:]
  for script in SCRIPTS
  for line in script.replace("\\\n", " ").splitlines()
  if line.startswith("python -m")
]
RUNS = [words[1:] for words in COMMANDS if words[0] == "attnres_jax.main"]
# Small enough for a CPU, and for as little text as there is here.
SMALL = [
  f"--config.{field}"
  for field in (
    "model.width=16", "model.num_layers=2", "model.num_heads=2",
    "model.mlp_width=32", "model.residual.num_blocks=2", "train.steps=8",
    "data.sequence_length=16", "data.batch_size=8", "optim.warmup_steps=2",
    "train.eval_batches=2", "train.depth_every=0",
  )
]  # fmt: skip


def _texts(run):
  """The text that a run of the page reads: a folder, several, or one file."""
  named = dict(word.partition("=")[::2] for word in run)
  return named.get("--config.data.path") or named["--config.data.paths"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Where all commands before the runs have been executed."""
  folder = tmp_path_factory.mktemp("page")
  public_corpora.write(folder, 400_000)
  (folder / "configs").symlink_to(tiny_run.ROOT / "configs")
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(folder)
    for module, *arguments in COMMANDS:
      if module == "attnres_jax.data.prepare":
        assert prepare.main(arguments) == 0
    for script in SCRIPTS:
      if not script.startswith(("python -m", "hf ")):
        subprocess.run(["sh", "-euc", script], check=True)
  return folder


def test_downloads_name_the_files_that_are_written(folder):
  (script,) = [command for command in SCRIPTS if command.startswith("hf ")]
  for line in script.replace("\\\n", " ").splitlines():
    words = shlex.split(line)
    where = folder / words[words.index("--local-dir") + 1]
    patterns = [b for a, b in zip(words, words[1:]) if a == "--include"]
    for pattern in patterns or ["tokenizer.json"]:
      assert list(where.glob(pattern)), pattern


def test_prepared_splits(folder):
  rules = {}
  for name in ("fineweb_edu", "pile", "c4", "my_text"):
    dataset = json.loads(
      (folder / "tokens" / name / "dataset.json").read_text()
    )
    rules[name] = dataset["settings"]["split_rule"].split()[:3]
    for split in ("train", "validation"):
      assert dataset["splits"][split]["documents"] > 0
  assert rules == {
    "fineweb_edu": ["a", "document", "is"], "pile": ["the", "names", "of"],
    "c4": ["the", "names", "of"], "my_text": ["the", "last", "0.05"],
  }  # fmt: skip


@pytest.mark.parametrize("run", RUNS, ids=_texts)
def test_runs_find_their_text(run, folder, monkeypatch):
  monkeypatch.chdir(folder)
  options = main.make_parser().parse_args([*run, *SMALL])
  config = command_line.load_config(options.config)
  for split in ("train", "validation"):
    dataset = data.open_dataset(config.data, split)
    assert dataset.num_tokens > 1000
    batches = dataset.batches()
    assert next(batches)["counts"].any()
    batches.close()


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=_texts)
def test_runs_train(run, folder, monkeypatch, capsys):
  monkeypatch.chdir(folder)
  assert main.main([*run, *SMALL]) == 0
  assert "finished at step 8" in capsys.readouterr().out
  (workdir,) = [word.partition("=")[2] for word in run if "workdir" in word]
  reported = json.loads((folder / workdir / "data.json").read_text())
  for split in ("train", "validation"):
    assert reported[split]["fingerprint"]
    for file in reported[split]["files"]:
      assert len(file["sha256"]) == 64


def test_tables_are_complete():
  rows = re.findall(r"^\| `(\w+)` \|", TEXT, re.M)
  assert set(rows) == sources.SOURCES.keys() | tokenizer_lib.TOKENIZERS.keys()

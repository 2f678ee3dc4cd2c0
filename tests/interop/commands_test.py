# SPDX-License-Identifier: Apache-2.0
"""The documented commands: in, drawn from, trained on, out again."""

import json
import pathlib
import shutil
import warnings

import jax
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.data import text_format as text_format_lib
from attnres_jax.inference import sample
from attnres_jax.interop import export_huggingface
from attnres_jax.interop import huggingface
from attnres_jax.interop import import_huggingface
from attnres_jax.interop import weights_folder
from attnres_jax.train import checkpoint
from attnres_jax.train import loop
from tests import tiny_run
from tests.fuzz import laws
from tests.interop import small_checkpoint

pytestmark = pytest.mark.needs("tokenizers")
IMPORT, EXPORT = import_huggingface.main, export_huggingface.main


@pytest.fixture(scope="module")
def source(tmp_path_factory):
  """A checkpoint with a tokenizer."""
  folder = tmp_path_factory.mktemp("source")
  small_checkpoint.write(folder, "llama", dtype="BF16", num_layers=2)
  (folder / "tokenizer.json").write_text(small_checkpoint.tokenizer_json())
  (folder / "tokenizer_config.json").write_text("{}")
  return folder


@pytest.fixture(scope="module")
def imported(source):
  folder = source.parent / "imported"
  argv = [f"--path={source}", f"--workdir={folder}", "--dtype=float32"]
  assert IMPORT(argv) == 0
  return folder


def test_an_import(source, imported):
  config, model = checkpoint.load_model(imported)
  expected = huggingface.load(huggingface.read(source))
  jax.tree.map(np.testing.assert_array_equal, model, expected)
  assert config.model == huggingface.read(source).config
  assert config.data.tokenizer == "hf"
  assert pathlib.Path(config.data.tokenizer_path).parent == imported
  assert config.data.sequence_length == 64


def test_activations_are_as_wide_as_the_files(source, tmp_path):
  argv = [f"--path={source}", f"--workdir={tmp_path / 'a'}"]
  assert IMPORT([*argv, "--tokenizer=bytes"]) == 0
  config, _ = checkpoint.load_model(tmp_path / "a")
  assert config.model.dtype == "bfloat16"
  assert config.data.tokenizer == "bytes"


@pytest.mark.parametrize("name", ["mine.json", ""])
def test_a_tokenizer_elsewhere(source, tmp_path, name):
  """It is used, and exported, though the checkpoint has another one."""
  import tokenizers

  other = tmp_path / "other"
  other.mkdir()
  made = tokenizers.Tokenizer.from_str(small_checkpoint.tokenizer_json())
  made.add_tokens(["another"])
  made.save(str(other / (name or "tokenizer.json")))
  workdir, out = f"--workdir={tmp_path / 'a'}", tmp_path / "b"
  argv = [f"--path={source}", f"--tokenizer={other / name}"]
  assert IMPORT([*argv, workdir]) == 0
  config, _ = checkpoint.load_model(tmp_path / "a")
  vocabulary = pathlib.Path(config.data.tokenizer_path).read_bytes()
  assert vocabulary == (other / (name or "tokenizer.json")).read_bytes()
  assert EXPORT([workdir, f"--path={out}"]) == 0
  assert (out / "tokenizer.json").read_bytes() == vocabulary


def test_documents_end_with_a_token_at_which_answers_stop(source, tmp_path):
  """Though it has none of the usual names."""
  folder = tmp_path / "source"
  shutil.copytree(source, folder)
  path = folder / "tokenizer.json"
  path.write_text(path.read_text().replace("s>", "t>"))
  small_checkpoint.change_config(folder, eos_token_id=257)
  assert IMPORT([f"--path={folder}", f"--workdir={tmp_path / 'a'}"]) == 0
  config, _ = checkpoint.load_model(tmp_path / "a")
  text_format = text_format_lib.of_data(config.data)
  assert (text_format.tokenizer.separator_id,) == text_format.end_ids


def test_sampling(imported, capsys):
  argv = [f"--workdir={imported}", "--prompt=def", "--num_tokens=3"]
  assert sample.main(argv) == 0
  assert capsys.readouterr().out.startswith("def")


@pytest.mark.more
def test_training_goes_on_and_the_result_goes_out(imported, tmp_path, capsys):
  fields = small_checkpoint.run_fields(tmp_path)
  config = config_lib.load_config(str(imported / "config.py"), fields)
  assert config.train.start_from == str(imported)
  run = tmp_path / "run"
  summary = loop.train_and_evaluate(config, run)
  assert summary["status"] == "finished"
  (event,) = tiny_run.events(run, "started from")
  assert event["of_step"] == 0 and not event["optimiser"]
  _, model = checkpoint.load_model(run)
  argv = [f"--workdir={run}", f"--path={tmp_path / 'out'}", "--dtype=F32"]
  assert EXPORT(argv) == 0
  exported = huggingface.load(huggingface.read(tmp_path / "out"))
  jax.tree.map(np.testing.assert_array_equal, exported, model)
  _, before = checkpoint.load_model(imported)
  assert not np.array_equal(
    before.sublayers["mlp"].core.up[...], model.sublayers["mlp"].core.up[...]
  )
  values = json.loads((tmp_path / "out" / "config.json").read_text())
  assert values["eos_token_id"] == 2 and values["model_type"] == "llama"
  for name in ("tokenizer.json", "tokenizer_config.json"):
    copied = (tmp_path / "out" / name).read_bytes()
    assert copied == (imported / name).read_bytes()
  card = (tmp_path / "out" / "README.md").read_text()
  assert "`llama` family" in card and "(step 2)" in card


def test_an_export_of_an_import_is_the_source(source, imported, tmp_path):
  out = tmp_path / "out"
  assert EXPORT([f"--workdir={imported}", f"--path={out}"]) == 0
  weights = "model.safetensors"
  assert (out / weights).read_bytes() == (source / weights).read_bytes()


def test_a_run_does_not_resume_in_the_folder_of_an_import(imported, tmp_path):
  fields = small_checkpoint.run_fields(tmp_path)
  config = config_lib.load_config(str(imported / "config.py"), fields)
  with pytest.raises(config_lib.ConfigError, match="has weights only"):
    loop.train_and_evaluate(config, imported)


@pytest.mark.parametrize(
  "arguments,words",
  [
    (["--path={source}/gone"], "expected a folder with config.json"),
    (["--workdir={source}"], "expected a new or empty folder"),
    (["--tokenizer={source}/config.json"], "data.tokenizer_path: got"),
    (["--tokenizer={big}"], "at most the 300 tokens of the network, not 311"),
    (["--path={bare}"], "a folder with tokenizer.json"),
    (["--path={source}", "--dtype=float16"], "invalid choice: 'float16'"),
  ],
)
def test_bad_imports_write_nothing(source, tmp_path, arguments, words):
  import tokenizers

  bare = tmp_path / "bare"
  small_checkpoint.write(bare, "llama", num_layers=2)

  big = tokenizers.Tokenizer.from_str(small_checkpoint.tokenizer_json())
  big.add_tokens([f"token {i}" for i in range(53)])
  big.save(str(tmp_path / "big.json"))
  named = dict(source=source, bare=bare, big=tmp_path / "big.json")
  given = [f"--path={source}", f"--workdir={tmp_path / 'new'}"]
  given += [argument.format(**named) for argument in arguments]
  status, _, err = laws.outcome(IMPORT, given)
  assert status and words in err
  assert not (tmp_path / "new").exists()


def test_only_a_tokenizer_is_copied(tmp_path, capsys):
  """A run of somebody else may name any file as its tokenizer."""
  secret = tmp_path / "secret.txt"
  secret.write_text('{"key": "abc"}')
  model = small_checkpoint.model("llama")
  data = config_lib.DataConfig(tokenizer="hf", tokenizer_path=str(secret))
  config = config_lib.RunConfig(model=model.config, data=data)
  weights_folder.write(tmp_path / "a", config, model, {}, {})
  argv = [f"--workdir={tmp_path / 'a'}", f"--path={tmp_path / 'b'}"]
  assert EXPORT(argv) == 2
  assert f"tokenizer_path: got '{secret}'" in capsys.readouterr().err
  assert not (tmp_path / "b").exists()


def _run_of_ours(folder, config, factor):
  """The folder of a run that trained here."""
  model = models.build_model(config.model)
  model = jax.tree.map(lambda a: a * factor, model)
  weights_folder.write(folder, config, model, {}, {})


@pytest.mark.needs("transformers>=5")
@pytest.mark.needs("torch")
@pytest.mark.parametrize("residual", ["prenorm", "block_attnres"])
def test_the_code_of_the_card_writes_text(
  residual, tmp_path, monkeypatch, capsys
):
  """Until the separator, on which every text ends."""
  import transformers

  monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "code"))
  monkeypatch.chdir(tmp_path)
  config = config_lib.RunConfig(model=config_lib.ModelConfig(
    vocab_size=257, width=32, num_layers=2, num_heads=2, mlp_width=48,
    residual=config_lib.residual_config(residual, num_blocks=2),
  ))  # fmt: skip
  _run_of_ours(tmp_path / "run", config, factor=3.0)
  folder = tmp_path / "out"
  assert EXPORT([f"--workdir={tmp_path / 'run'}", f"--path={folder}"]) == 0
  values = json.loads((folder / "config.json").read_text())
  for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
    assert values[name] == 256
  card = (folder / "README.md").read_text()
  code = card.partition("```python\n")[2].partition("```")[0]
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # As a user answers the question whether to run the code beside weights.
    exec(code.replace('"out"', f'"{folder}"'), {})
    assert "Once" in capsys.readouterr().out
    model = transformers.AutoModelForCausalLM.from_pretrained(
      folder, trust_remote_code=True
    )
    assert model.generation_config.eos_token_id == 256
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  padded = tokenizer(["a", "bc"], padding=True)["input_ids"]
  assert padded == [[256, 256, 97], [256, 98, 99]]


def test_an_export_has_the_length_of_further_training(tmp_path):
  model = small_checkpoint.model()
  data = config_lib.DataConfig(sequence_length=128)
  config = config_lib.RunConfig(model=model.config, data=data)
  facts = dict(family="llama", config=dict(max_position_embeddings=64))
  weights_folder.write(tmp_path / "a", config, model, facts, {})
  argv = [f"--workdir={tmp_path / 'a'}", f"--path={tmp_path / 'b'}"]
  assert EXPORT(argv) == 0
  values = json.loads((tmp_path / "b" / "config.json").read_text())
  assert values["max_position_embeddings"] == 128

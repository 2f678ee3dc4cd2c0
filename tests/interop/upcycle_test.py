# SPDX-License-Identifier: Apache-2.0
"""An upcycled network is the same function, and its new parameters learn."""

import dataclasses
import json

from flax import nnx
import jax
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import trees
from attnres_jax.data import text_format as text_format_lib
from attnres_jax.interop import export_huggingface
from attnres_jax.interop import import_huggingface
from attnres_jax.interop import upcycle
from attnres_jax.interop import weights_folder
from attnres_jax.train import checkpoint
from tests import tiers
from tests.interop import small_checkpoint

Residual = config_lib.residual_config
# Of four sublayers, the last block has one.
SCHEMES = {
  "full": Residual("full_attnres"),
  "full_defined": Residual("full_attnres", form="one_softmax"),
  "full_heads": Residual(
    "full_attnres", read=config_lib.DepthReadConfig(heads=4)
  ),
  "block": Residual("block_attnres", block_size=3),
  "block_defined": Residual("block_attnres", block_size=3, form="one_softmax"),
  "delta": Residual("delta_mh", num_blocks=2),
}
MAIN = "full", "block", "delta"
TOKENS = np.random.default_rng(0).integers(0, 300, (2, 9), dtype=np.int32)
SCHEME = ["--residual=block_attnres", "--num_blocks=2"]
# A large epsilon and small values, to which a norm is not indifferent.
EPS = 1e-2


@pytest.fixture(scope="module")
def plain():
  model = small_checkpoint.model("qwen2", norm_eps=EPS, num_layers=2)
  table = model.embedding.table
  table[...] = table[...] * 0.2
  return model


@jax.jit
def _both(model):
  return small_checkpoint.logits_and_gradient(model, TOKENS)


@pytest.fixture(scope="module")
def expected(plain):
  logits_BTV, gradient = _both(plain)
  return logits_BTV, trees.to_flat(gradient)


@tiers.parametrize(
  "case",
  [
    pytest.param(case, marks=() if case in MAIN else pytest.mark.slow)
    for case in SCHEMES
  ],
  first=["block"],
)
def test_it_is_the_same_function_and_learns(case, plain, expected):
  model = upcycle.upcycle(plain, SCHEMES[case])
  assert model.config.residual.name == SCHEMES[case].name
  logits_BTV, gradients = expected
  actual, gradient = _both(model)
  np.testing.assert_allclose(actual, logits_BTV, rtol=0, atol=1e-5)
  if case == "delta":
    np.testing.assert_array_equal(actual, logits_BTV)
  new = {}
  for name, leaf in trees.to_flat(gradient).items():
    if name.startswith("residual/"):
      new[name.split("/")[-2]] = np.asarray(leaf)
      continue
    scale = np.abs(gradients[name]).max()
    np.testing.assert_allclose(
      leaf, gradients[name], rtol=0, atol=1e-4 * scale, err_msg=name
    )
  # Of delta_mh, the others wait until a factor is not zero.
  learning = {name for name, leaf in new.items() if np.abs(leaf).max() > 1e-6}
  assert learning == ({"gate"} if case == "delta" else {"query"})
  if case != "delta":
    assert (np.abs(new["query"][1:]).max(1) > 1e-6).all()


def test_without_the_factor_it_is_another_function(plain, expected):
  model = upcycle.upcycle(plain, SCHEMES["block"])
  config = dataclasses.replace(model.config, residual=SCHEMES["block"])
  like = jax.eval_shape(lambda: type(model)(config, rngs=nnx.Rngs(params=0)))
  mean = trees.from_flat(like, trees.to_flat(model))
  assert np.abs(_both(mean)[0] - expected[0]).max() > 0.05


@pytest.mark.parametrize(
  "name,words",
  [
    ("rescaled", "read 2 of this one differs by"),
    ("deepnorm", "sublayers of this one have no pre-norm"),
    ("keel", "this one has no norm before the head"),
    ("delta_attnres", "read 2 of this one differs by"),
    # Its reads are PreNorm's, but keys and values have gains of their own.
    ("mudd", "mixers of this one have further norms"),
    ("block_atnres", "did you mean 'block_attnres'?"),
  ],
)
def test_schemes_that_are_refused(name, words, plain):
  with pytest.raises(config_lib.ConfigError) as error:
    upcycle.upcycle(plain, Residual(name, num_blocks=2))
  assert words in str(error.value)


def test_a_number_of_blocks_that_main_would_refuse(plain):
  with pytest.raises(config_lib.ConfigError, match="num_blocks: got 3"):
    upcycle.upcycle(plain, Residual("block_attnres", num_blocks=3))


@pytest.mark.parametrize("options", [dict(score="sigmoid"), dict(null="zero")])
def test_factors_that_are_refused(options):
  with pytest.raises(config_lib.ConfigError, match="'mean' with a null source"):
    config_lib.DepthReadConfig(scale="sum", **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
  """Folders of an imported network, before and after Block AttnRes."""
  folder = tmp_path_factory.mktemp("upcycled")
  source, a, b = (folder / name for name in ("source", "a", "b"))
  small_checkpoint.write(source, num_layers=2)
  (source / "tokenizer.json").write_text(small_checkpoint.tokenizer_json())
  argv = [f"--path={source}", f"--workdir={a}", "--dtype=float32"]
  assert import_huggingface.main(argv) == 0
  assert upcycle.main([f"--workdir={a}", f"--out={b}", *SCHEME]) == 0
  return a, b


@pytest.mark.more
@pytest.mark.needs("tokenizers")
def test_the_command(folders, tmp_path, capsys):
  a, b = folders
  _, plain = checkpoint.load_model(a)
  config, model = checkpoint.load_model(b)
  expected = upcycle.upcycle(plain, config.model.residual)
  jax.tree.map(np.testing.assert_array_equal, model, expected)
  facts = json.loads((b / "interop.json").read_text())
  assert facts["upcycled_from"] == str(a) and facts["family"] == "llama"
  assert (b / "tokenizer.json").read_bytes() == (
    a / "tokenizer.json"
  ).read_bytes()
  # There is no way back, nor to a third scheme.
  again = [f"--workdir={b}", f"--out={tmp_path / 'c'}", *SCHEME]
  assert upcycle.main(again) == 2
  assert "no scheme computes the same function" in capsys.readouterr().err
  argv = [f"--workdir={b}", f"--path={tmp_path / 'out'}"]
  assert export_huggingface.main([*argv, "--family=llama"]) == 2
  error = capsys.readouterr().err
  assert "residual.name: got 'block_attnres', expected 'prenorm'" in error
  assert not (tmp_path / "out").exists() and not (tmp_path / "c").exists()
  # It is of no family of other libraries any more.
  assert export_huggingface.main(argv) == 0
  config = json.loads((tmp_path / "out" / "config.json").read_text())
  assert config["model_type"] == "attnres"


def test_texts_of_a_run_of_ours_open_and_end_as_before(plain, tmp_path):
  config = config_lib.RunConfig(model=plain.config)
  weights_folder.write(tmp_path / "a", config, plain, {}, {})
  argv = [f"--workdir={tmp_path / 'a'}", f"--out={tmp_path / 'b'}", *SCHEME]
  assert upcycle.main(argv) == 0
  for name in "a", "b":
    text_format = text_format_lib.of_data(config.data, tmp_path / name)
    assert text_format.open_ids == text_format.end_ids == (256,)

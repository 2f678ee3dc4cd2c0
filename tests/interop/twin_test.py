# SPDX-License-Identifier: Apache-2.0
"""The class in PyTorch computes what ours does, is trained and generates."""

import dataclasses
import warnings

import jax
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.interop import huggingface
from tests import tiny_network
from tests.interop import small_checkpoint

LENGTH = 9
_Attention = config_lib.AttentionConfig
_Read = config_lib.DepthReadConfig
_KINDS, _with = tiny_network.KINDS, dataclasses.replace
CASES = {
  # Every kind of sublayer; blocks of three leave a last one of one.
  "block": dict(block_size=3, **_KINDS),
  "full": dict(name="full_attnres", **_KINDS),
  "plain": dict(name="prenorm", **_KINDS),
  "grouped": dict(
    num_heads=4, num_kv_heads=2, logit_soft_cap=5.0,
    attention=_Attention(qkv_bias=True, output_bias=True, qk_norm=True),
    rope=config_lib.RopeConfig(scaling="llama3", original_length=8),
    read=_Read(heads=4, scale="sum", logit_scale=0.5),
  ),
  "latents": dict(
    mixers=("mla",), moe=_KINDS["moe"],
    mla=_with(_KINDS["mla"], query_rank=6),
  ),
  "k3": dict(
    block_size=2, mixers=("kda", "mla"),
    activation=config_lib.ActivationConfig("situ", 0.7, 0.9),
    kda=_with(_KINDS["kda"], full_rank_gate=True, decay_bound=5.0),
    mla=_with(_KINDS["mla"], output_gate=True),
    moe=_with(_KINDS["moe"], latent_width=6, latent_norm=True),
  ),
  "tied": dict(
    name="full_attnres", tie_embeddings=True, rope_theta=0.0, mlp_width=0
  ),
}  # fmt: skip


def _network(case):
  """Every parameter is random, queries, gains and biases included."""
  config = tiny_network.config(**CASES[case])
  rng = np.random.default_rng(0)

  def drawn(path, leaf):
    name = jax.tree_util.keystr(path)
    middle = 1.0 if "gain" in name else 0.0
    noise = rng.standard_normal(leaf.shape, "float32") * np.float32(0.3)
    return jax.numpy.asarray(middle + noise)

  abstract = jax.eval_shape(lambda: models.build_model(config))
  return jax.tree_util.tree_map_with_path(drawn, abstract)


def _tokens():
  return np.random.default_rng(1).integers(0, 16, (2, LENGTH), dtype=np.int32)


def _export(model, folder):
  huggingface.export(
    model, folder, dtype="F32", facts={}, card="A test.\n", family="attnres"
  )


# Its new name is `cache`, which older versions do not know.
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.needs("torch")
@pytest.mark.needs("transformers>=5")
@pytest.mark.parametrize(
  "case",
  [
    pytest.param(case, marks=pytest.mark.slow)
    if case in ("full", "plain") else case
    for case in CASES
  ],
)  # fmt: skip
def test_logits_gradients_and_text(case, tmp_path, monkeypatch):
  import torch
  import transformers

  monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "code"))
  model, tokens = _network(case), _tokens()
  _export(model, tmp_path / "out")
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    twin = transformers.AutoModelForCausalLM.from_pretrained(
      tmp_path / "out", trust_remote_code=True, dtype="float32"
    ).eval()
  ids = torch.tensor(tokens).long()
  out = twin(ids, labels=ids)
  logits, gradient = small_checkpoint.logits_and_gradient(model, tokens)
  np.testing.assert_allclose(out.logits.detach(), logits, atol=1e-4)
  assert np.std(logits) > 0.1
  with torch.no_grad():
    half = twin(ids, labels=ids, num_items_in_batch=4 * (LENGTH - 1)).loss
  torch.testing.assert_close(half, out.loss.detach() / 2)

  # Trainable: the gradient of each tensor, as the export lays it out.
  out.loss.backward()
  _export(gradient, tmp_path / "gradient")
  theirs = dict(twin.named_parameters())
  tensors = huggingface.read(tmp_path / "gradient").tensors
  for name, tensor in tensors.items():
    if name.endswith("e_score_correction_bias"):
      continue  # Ours is the load.
    expected = tensor.read()
    actual = theirs[name].grad
    actual = np.zeros(expected.shape) if actual is None else actual.numpy()
    size = np.abs(expected).max() + 1e-3
    np.testing.assert_allclose(actual, expected, atol=2e-4 * size, err_msg=name)

  # Greedy, with the cache; each token is the argmax of the whole prefix.
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    text = twin.generate(ids, max_new_tokens=5, do_sample=False).numpy()
  assert text.shape == (2, LENGTH + 5)
  text_logits = model(jax.numpy.asarray(text[:, :-1], "int32"))
  np.testing.assert_array_equal(
    np.argmax(text_logits, axis=-1)[:, LENGTH - 1 :], text[:, LENGTH:]
  )

  _check_padding(twin, ids)
  _check_caches(twin, ids)


def _check_caches(twin, ids):
  """A cache that `generate` is given: the same text, or one line of error."""
  import torch
  import transformers

  options = dict(max_new_tokens=4, do_sample=False, pad_token_id=None)
  text = twin.generate(ids, **options)

  def cache(tokens):
    with torch.no_grad():
      output = twin(tokens, use_cache=True)
    return output.cache if "cache" in output else output.past_key_values

  def check(given, **more):
    drawn = twin.generate(ids, past_key_values=given, **options, **more)
    torch.testing.assert_close(drawn, text)

  for length in 1, LENGTH - 1:
    begun = cache(ids[:, :length])
    check(begun)
    check(begun, attention_mask=torch.ones_like(ids))  # And it is unchanged.
  check(transformers.DynamicCache())
  both = twin.generate(ids, return_dict_in_generate=True, **options)
  more = torch.cat([both.sequences, ids[:, :2]], dim=1)
  torch.testing.assert_close(
    twin.generate(more, past_key_values=both[next(iter(both.keys() - {
      "sequences"}))], **options),
    twin.generate(more, **options),
  )  # fmt: skip
  other = transformers.DynamicCache()
  other.update(torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 4), 0)
  for wrong, words in (
    (other, "got a DynamicCache, expected what this model"),
    (cache(ids), f"of {LENGTH} tokens, expected input_ids with these and more"),
  ):
    with pytest.raises(ValueError, match=words) as error:
      twin.generate(ids, past_key_values=wrong, **options)
    assert "\n" not in str(error.value)


def _check_padding(twin, ids):
  """Padded rows are those rows alone; what cannot be right is refused."""
  import torch

  lengths = LENGTH, 4
  for side in "left", "right":
    mask, padded = torch.zeros_like(ids), torch.full_like(ids, 7)
    for row, length in enumerate(lengths):
      at = slice(-length, None) if side == "left" else slice(length)
      mask[row, at], padded[row, at] = 1, ids[row, :length]
    with torch.no_grad():
      logits = twin(padded, attention_mask=mask).logits
      for row, length in enumerate(lengths):
        expected = twin(ids[row : row + 1, :length]).logits[0]
        torch.testing.assert_close(
          logits[row][mask[row] == 1], expected, atol=1e-4, rtol=0
        )
    options = dict(max_new_tokens=4, do_sample=False, pad_token_id=15)
    if side == "right":
      with pytest.raises(ValueError, match="pad on the left"):
        twin.generate(padded, attention_mask=mask, **options)
      continue
    for beams in 1, 2:
      options["num_beams"] = beams
      text = twin.generate(padded, attention_mask=mask, **options)
      for row, length in enumerate(lengths):
        row_ids = ids[row : row + 1, :length]
        ones = torch.ones_like(row_ids)
        expected = twin.generate(row_ids, attention_mask=ones, **options)
        new = expected[0, length:].tolist()
        assert text[row, LENGTH : LENGTH + len(new)].tolist() == new
  with torch.no_grad():
    right = torch.arange(LENGTH)[None].expand(2, -1)
    torch.testing.assert_close(
      twin(ids, position_ids=right).logits, twin(ids).logits
    )
  gap = torch.ones_like(ids)
  gap[1, 3] = 0
  for wrong, words in (
    (dict(attention_mask=gap), "padding inside a row's text"),
    (dict(attention_mask=gap[:, 1:]), "has shape"),
    (dict(position_ids=right // 2), "have to count"),
  ):
    with pytest.raises(ValueError, match=words):
      twin(ids, **wrong)

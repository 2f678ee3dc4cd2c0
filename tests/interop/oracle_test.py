# SPDX-License-Identifier: Apache-2.0
"""Every family against its own class in transformers, small and random.

With a class of our own: tests/interop/twin_test.py. transformers has no class
of Kimi K3, whose reference is tests/interop/k3_reference.py.
"""

import copy
import functools
import warnings

import jax
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import trees
from attnres_jax.interop import huggingface
from attnres_jax.models import loss as loss_lib

pytestmark = [pytest.mark.needs("torch"), pytest.mark.needs("transformers>=5")]

LENGTH = 48
SHAPE = dict(
  vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
  num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
# At 48 tokens, some frequencies are scaled, some kept, some interpolated.
LLAMA3 = dict(
  rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
  original_max_position_embeddings=32, rope_theta=100.0,
)  # fmt: skip
KIMI = dict(
  moe_intermediate_size=32, kv_lora_rank=16, qk_rope_head_dim=8,
  qk_nope_head_dim=16, v_head_dim=16, num_experts=8, num_experts_per_token=2,
  num_key_value_heads=4, pad_token_id=None, bos_token_id=1, eos_token_id=2,
  linear_attn_config=dict(
    head_dim=16, num_heads=4, short_conv_kernel_size=4,
    kda_layers=[1, 2, 4], full_attn_layers=[3],
  ),
)  # fmt: skip
CASES = {
  "llama": ("Llama", dict(tie_word_embeddings=False)),
  "llama_tied": ("Llama", dict(tie_word_embeddings=True)),
  "llama_scaled": ("Llama", dict(rope_parameters=LLAMA3)),
  "llama_biased": ("Llama", dict(attention_bias=True, head_dim=8)),
  "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
  "qwen3": ("Qwen3", dict(head_dim=32, rms_norm_eps=1e-5)),
  "kimi_linear": ("KimiLinear", KIMI),
}  # fmt: skip


@functools.cache
def _network(case):
  """The network of torch; biases and gains are random, too."""
  import torch
  import transformers

  name, fields = CASES[case]
  config = getattr(transformers, f"{name}Config")(**SHAPE | fields)
  config._attn_implementation = "eager"
  torch.manual_seed(0)
  network = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
  for name, weight in network.state_dict().items():
    small = weight.ndim < 2 or name.endswith("A_log")
    spread = 0.3 if small else 0.08
    start = torch.ones_like(weight) if small else torch.zeros_like(weight)
    if name.endswith("e_score_correction_bias"):
      spread, start = 0.1, torch.zeros_like(weight)
    # In place. Some are not initialised at all.
    weight.copy_(start + spread * torch.randn_like(weight))
  return network


def _tokens():
  return np.random.default_rng(0).integers(0, 256, (2, LENGTH), dtype=np.int32)


def _their_logits(network):
  import torch

  with torch.no_grad():
    return network(torch.tensor(_tokens()).long()).logits.numpy()


def _save(network, folder, **options):
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    network.save_pretrained(folder, **options)


def _load_theirs(folder):
  import transformers

  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    return transformers.AutoModelForCausalLM.from_pretrained(
      folder, attn_implementation="eager"
    )


@pytest.mark.parametrize("case", CASES)
class TestFamily:
  def test_logits(self, case, tmp_path):
    _save(_network(case), tmp_path, max_shard_size="150KB")
    source = huggingface.read(tmp_path)
    assert len({t.file for t in source.tensors.values()}) > 2
    model = huggingface.load(source)
    ours = np.asarray(jax.jit(lambda model, x: model(x))(model, _tokens()))
    theirs = _their_logits(_network(case))
    assert theirs.std() > 0.3
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)

  def test_gradients_of_the_loss(self, case, tmp_path):
    import torch

    network, tokens = _network(case), _tokens()
    network.zero_grad()
    ids = torch.tensor(tokens).long()
    network(ids, labels=ids).loss.backward()
    _save(network, tmp_path / "weights")
    # Files of gradients, so that they have the same names and layouts.
    gradients = copy.deepcopy(network)
    for g, parameter in zip(gradients.parameters(), network.parameters()):
      g.data.copy_(parameter.grad)
    _save(gradients, tmp_path / "gradients")
    theirs = trees.to_flat(
      huggingface.load(huggingface.read(tmp_path / "gradients"))
    )
    source = huggingface.read(tmp_path / "weights")
    model = huggingface.load(source)
    run = config_lib.RunConfig(model=source.config)

    def mean(model):
      examples = loss_lib.Examples.of({"tokens": tokens})
      h_BTD = model.hidden(examples.inputs)
      sums = loss_lib.loss_sums(run, h_BTD, model.embedding.head_DV(), examples)
      return sums.total / examples.weights.sum()

    ours = trees.to_flat(jax.jit(jax.grad(mean))(model))
    for name, leaf in ours.items():
      if "selection_bias" in name:
        continue  # Not trained by a gradient.
      scale = np.abs(theirs[name]).max()
      assert scale > 1e-6, name
      np.testing.assert_allclose(
        leaf, theirs[name], rtol=0, atol=2e-4 * scale, err_msg=name
      )

  def test_plain_transformers_loads_an_export(self, case, tmp_path):
    _save(_network(case), tmp_path / "theirs")
    source = huggingface.read(tmp_path / "theirs")
    huggingface.export(
      huggingface.load(source), tmp_path / "ours", dtype="F32",
      facts={"max_position_embeddings": 64}, card="A test.\n",
      family=source.family, shard_bytes=150_000,
    )  # fmt: skip
    again = _load_theirs(tmp_path / "ours")
    assert type(again) is type(_network(case))
    expected = dict(_network(case).named_parameters())
    for name, parameter in again.named_parameters():
      assert bool((parameter == expected[name]).all()), name
    np.testing.assert_array_equal(
      _their_logits(again), _their_logits(_network(case))
    )

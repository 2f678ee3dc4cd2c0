# SPDX-License-Identifier: Apache-2.0
"""The paper's architecture and recipe; shrunk, it learns from real text.

All parts together: KDA, MLA, a dense first block, balanced experts, Muon, WSD,
Block AttnRes.
"""

import pytest

from attnres_jax import config as config_lib
from attnres_jax.train import loop
from tests import tiny_run

SPEC = f"{tiny_run.ROOT}/configs/kimi_linear.py:size=48b,runlocal"
STEPS = 24
FIELDS = {
  # One layer of each kind, and more than one block: they compile in half the
  # time.
  "model.num_layers": 2,
  "model.mixers": ("kda", "mla"),
  "model.residual.block_size": 3,
  "data.sequence_length": 64,
  "train.steps": STEPS,
  "train.eval_every": 12,
  "train.depth_every": 0,
  "checkpoint.every_steps": 12,
  "mesh.data": 1,
}


def _config(arg):
  return config_lib.load_config(f"{tiny_run.ROOT}/configs/kimi_linear.py:{arg}")


# Table 2: transformer blocks, heads, width, expert width, peak learning rate,
# sequences per batch, and tokens over tokens per batch.
@pytest.mark.parametrize(
  "size,shape,lr,batch,steps",
  [
    ("194m", (12, 12, 896, 400), 2.99e-3, 192, 24605),
    ("241m", (13, 13, 960, 432), 2.80e-3, 256, 21648),
    ("296m", (14, 14, 1024, 464), 2.50e-3, 320, 23689),
    ("436m", (16, 16, 1168, 528), 2.20e-3, 384, 27943),
    ("528m", (17, 17, 1264, 560), 2.02e-3, 432, 33626),
  ],
)
def test_small_sizes_are_those_of_the_paper(size, shape, lr, batch, steps):
  config = _config(f"size={size}")
  model, optim = config.model, config.optim
  assert shape == (
    model.num_layers, model.num_heads, model.width, model.moe.expert_width,
  )  # fmt: skip
  assert model.sublayer_kinds[:8:2] == ("kda", "kda", "kda", "mla")
  assert model.sublayer_kinds[-2] == "mla"
  assert (model.moe.num_experts, model.moe.top_k) == (256, 8)
  assert (optim.name, optim.schedule, optim.peak_lr) == ("muon", "cosine", lr)
  assert (config.data.batch_size, config.data.sequence_length) == (batch, 8192)
  assert (config.train.steps, optim.warmup_steps) == (steps, steps // 100)


@pytest.mark.parametrize(
  "size,batch_tokens,steps",
  [("48b", 8_388_608, 119_209), ("48b_32m", 33_554_432, 29_802)],
)
def test_48b_is_that_of_the_paper(size, batch_tokens, steps):
  config = _config(f"size={size}")
  model, data = config.model, config.data
  assert (model.num_sublayers, model.residual.block_size) == (54, 6)
  assert (model.moe.num_experts, model.moe.dense_layers) == (256, 1)
  assert (model.vocab_size, model.mlp_size) == (163_840, 9216)
  assert not model.tie_embeddings and model.norm_eps == 1e-5
  assert data.batch_size * data.sequence_length == batch_tokens
  assert data.sequence_length == 4096
  assert config.train.steps == steps
  assert (config.optim.name, config.optim.schedule) == ("muon", "wsd")


@pytest.mark.more
def test_it_learns(tmp_path):
  loop.train_and_evaluate(config_lib.load_config(SPEC, FIELDS), tmp_path)
  rows = tiny_run.rows(tmp_path, "train")
  # Bytes: ln(257) = 5.55 at first; below 4 once the letter frequencies are
  # known.
  assert 5.3 < rows[1]["loss"] < 5.8
  assert rows[STEPS]["loss"] < rows[1]["loss"] - 1.5
  validation = tiny_run.rows(tmp_path, "validation")
  assert validation[STEPS]["loss"] < validation[12]["loss"] < rows[1]["loss"]


def test_one_recipe_per_network():
  recipe, of_table_2, of_table_4 = (
    config_lib.load_config(f"configs/{spec}")
    for spec in (
      "kimi_linear.py:size=436m",
      "scaling.py:scale=paper,size=436m",
      "paired.py:scale=paper",
    )
  )
  assert recipe.optim == of_table_2.optim == of_table_4.optim
  assert recipe.data == of_table_2.data == of_table_4.data
  # Table 2 counts 512 experts, which is an inference; see docs/kimi_linear.md.
  assert of_table_2.model == of_table_4.model

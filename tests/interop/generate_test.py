# SPDX-License-Identifier: Apache-2.0
"""An imported network writes what transformers' generate writes.

Ids, text and the reason of the end, over tokenizers of several kinds that this
test trains and prompts of many scripts.
"""

import copy
import json
import os
import random

import pytest

from attnres_jax.interop import import_huggingface
from tests.data import text_format_test
from tests.inference import texts

NUM_TOKENS = 12


def _checkpoint(folder, kind):
  """A small Llama with a tokenizer of this kind; several ids end a text."""
  import torch
  import transformers

  made = text_format_test.train(kind)
  size = made.get_vocab_size()
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    vocab_size=size, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256,
    initializer_range=0.6, bos_token_id=1, eos_token_id=2,
  )  # fmt: skip
  model = transformers.LlamaForCausalLM(config)
  rng = random.Random(0)
  # So many that a good part of all texts ends before its length.
  ends = [2, 3, *rng.sample(range(4, size), size // 15)]
  model.generation_config.eos_token_id = ends
  model.generation_config.pad_token_id = 0
  model.save_pretrained(folder)
  made.save(str(folder / "tokenizer.json"))
  names = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>")
  described = names | dict(tokenizer_class="PreTrainedTokenizerFast")
  (folder / "tokenizer_config.json").write_text(json.dumps(described))
  tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
  return model, tokenizer, set(ends)


def _theirs(model, tokenizer, prompt, ends):
  import torch

  # What the tokenizer puts behind a text would end it.
  ids = tokenizer(prompt)["input_ids"][:-1]
  with torch.no_grad():
    all_ids = model.generate(
      torch.tensor([ids]),
      attention_mask=torch.ones(1, len(ids), dtype=torch.long),
      max_new_tokens=NUM_TOKENS,
      do_sample=False,
    )[0].tolist()
  drawn = all_ids[len(ids) :]
  decode = lambda some: tokenizer.decode(some, skip_special_tokens=True)
  stopped = drawn[-1] in ends
  shown = all_ids[:-1] if stopped else all_ids
  # A character may begin in the prompt.
  before, after = decode(ids), decode(shown)
  text = after.removeprefix(os.path.commonprefix([before, after]))
  return drawn, text, "stop" if stopped else "length"


def _is_tie(model, tokenizer, prompt, ours, theirs):
  """Whether rounding alone decides between the first tokens that differ.

  Tokenizers are trained a little differently every time, and so a test may draw
  a network with such a tie.
  """
  import torch

  same = [a == b for a, b in zip(ours[0], theirs[0])]
  if all(same):
    return False
  at = same.index(False)
  ids = tokenizer(prompt)["input_ids"][:-1] + theirs[0][:at]
  exact = copy.deepcopy(model).double()
  with torch.no_grad():
    logits = exact(torch.tensor([ids])).logits[0, -1]
  mine, other = logits[ours[0][at]], logits[theirs[0][at]]
  return bool(min(mine, other) >= logits.max() - 1e-5 * logits.abs().max())


def _check(tmp_path, kind, count):
  source, folder = tmp_path / "source", tmp_path / "run"
  source.mkdir()
  model, tokenizer, ends = _checkpoint(source, kind)
  flags = [f"--path={source}", f"--workdir={folder}"]
  assert import_huggingface.main(flags) == 0
  rng = random.Random(1)
  prompts = [text_format_test._text(rng) for _ in range(count)]
  reasons, ties = set(), 0
  drawn = texts.drawn(folder, prompts, NUM_TOKENS)
  for prompt, ours in zip(prompts, drawn, strict=True):
    expected = _theirs(model, tokenizer, prompt, ends)
    if ours != expected and _is_tie(model, tokenizer, prompt, ours, expected):
      ties += 1
      continue
    assert ours == expected
    reasons.add(ours[2])
  assert reasons == {"stop", "length"} and ties <= 1


@pytest.mark.needs("transformers")
def test_texts_are_those_of_generate(tmp_path):
  _check(tmp_path, "byte_fallback", 25)


@pytest.mark.slow
@pytest.mark.needs("transformers")
@pytest.mark.parametrize("kind", text_format_test.KINDS)
def test_many_texts_are_those_of_generate(tmp_path, kind):
  _check(tmp_path, kind, 400)

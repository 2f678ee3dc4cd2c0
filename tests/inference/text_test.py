# SPDX-License-Identifier: Apache-2.0
"""Text is released once it is certain, and not before."""

import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.data import text_format
from attnres_jax.inference import text

TOKENIZER = data.make_tokenizer(config_lib.DataConfig())
FORMAT = text_format.of_tokenizer(TOKENIZER)


def _pieces(written):
  decoder = FORMAT.decoder()
  pieces = [decoder.add(token) for token in TOKENIZER.encode(written).tolist()]
  return [*pieces, decoder.end()]


def test_characters_are_whole():
  assert _pieces("aé€🙂b") == [
    "a", "", "é", "", "", "€", "", "", "", "🙂", "b", "",
  ]  # fmt: skip


def test_any_bytes_are_decoded_as_a_whole():
  """Whatever is before a character, its bytes stay together."""
  rng = np.random.default_rng(0)
  some = [*"aß€🙂".encode(), 0xFF, 0xC3, 0xF0, 0xE2, 0x80]
  for size in range(2, 15):
    for _ in range(100):
      written = bytes(rng.choice(some, size).tolist())
      assert "".join(_pieces(written)) == written.decode(errors="replace")


def test_a_prompt_that_is_no_text():
  with pytest.raises(config_lib.ConfigError, match="prompt: .* UTF-8 text"):
    text.request(FORMAT, "\ud800", 1)

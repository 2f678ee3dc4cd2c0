# SPDX-License-Identifier: Apache-2.0
"""The command; the engine has its own tests."""

import io
import sys

import pytest

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.common import text_table
from attnres_jax.data import text_format as text_format_lib
from attnres_jax.inference import draw
from attnres_jax.inference import engine as engine_lib
from attnres_jax.inference import sample
from attnres_jax.inference import text
from attnres_jax.inference import trained
from tests import tiny_network
from tests.fuzz import laws
from tests.inference import texts

TOKENIZER = data.make_tokenizer(config_lib.DataConfig())


@pytest.fixture(scope="module")
def model():
  return tiny_network.model(
    "prenorm", num_layers=1, vocab_size=257, init_std=0.5
  )


@pytest.fixture
def run(monkeypatch, model, tmp_path):
  """Runs the command on that network; returns its status."""
  config = config_lib.load_config("configs/lm.py:runlocal")
  monkeypatch.setattr(trained, "load", lambda options: (config, model, 9))

  def run(*flags):
    return sample.main([f"--workdir={tmp_path}", *map(str, flags)])

  return run


def _sampled(model, num_tokens, **settings):
  """The text that continues "ab"."""
  text_format = text_format_lib.of_tokenizer(TOKENIZER)
  request = text.request(
    text_format, "ab", num_tokens, draw.Settings(**settings), past_end=True
  )
  engine = engine_lib.Engine(model, slots=1, length=99)
  pieces = text.complete(engine, text_format, [request])
  return "".join(piece.text for piece in pieces)


def test_text_opens_a_document(model):
  shown = _sampled(model, 4, temperature=0.0)
  engine = engine_lib.Engine(model, slots=1, length=8)
  request = engine_lib.Request(
    [TOKENIZER.separator_id, 97, 98], 4, draw.Settings(temperature=0.0)
  )
  ids = [token.id for token in texts.run(engine, [request])]
  assert shown == TOKENIZER.decode(ids)


def test_one_prompt_is_printed_as_it_is_drawn(run, model, capsys, monkeypatch):
  expected = _sampled(model, 5, temperature=0.8, seed=1)
  flushed = []
  complete = text.complete

  def watched(*args):
    for piece in complete(*args):
      yield piece
      flushed.append(capsys.readouterr().out)

  monkeypatch.setattr(text, "complete", watched)
  flags = "--prompt=ab", "--num_tokens=5", "--seed=1", "--past_end"
  assert run(*flags) == 0
  assert len(flushed) == 5 and flushed[0].startswith("ab")
  assert "".join(flushed) + capsys.readouterr().out == f"ab{expected}\n"


@pytest.mark.more
def test_a_loop_that_is_left_frees_its_slots(model):
  engine = engine_lib.Engine(model, slots=2, length=16)
  text_format = text_format_lib.of_tokenizer(TOKENIZER)
  short = text.request(text_format, "ab", 9)
  for _ in text.complete(engine, text_format, [short] * 3):
    break
  assert not engine.busy
  long = text.request(text_format, "ab", 99)
  with pytest.raises(config_lib.ConfigError, match="--num_tokens: got 99"):
    list(text.complete(engine, text_format, [short, long]))
  assert not engine.busy


def test_beyond_the_trained_length(run, capsys, monkeypatch):
  monkeypatch.setattr(text, "complete", lambda *args: iter(()))
  trained = config_lib.load_config("configs/lm.py:runlocal").data
  flags = "--temperature=0", "--num_tokens=2", "--past_end"
  assert run(f"--prompt={'a' * trained.sequence_length}", *flags) == 0
  captured = capsys.readouterr()
  assert f"trained on {trained.sequence_length}" in captured.err
  assert run("--prompt=a", *flags) == 0
  assert "trained on" not in capsys.readouterr().err


@pytest.mark.parametrize(
  "flags,message",
  [
    (["--temperature=-1"], "--temperature: got -1"),
    (["--num_tokens=0"], "--num_tokens: got 0"),
    (["--seed=-1"], "--seed: got -1"),
    (["--prompt=\ud800"], "prompt: got"),
  ],
)
def test_bad_flags_are_named(run, flags, message):
  status, _, err = laws.outcome(run, *flags)
  assert status and message in err


class _Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.mark.parametrize("out", [io.StringIO, _Terminal])
def test_a_terminal_gets_no_codes(run, monkeypatch, out):
  """A network draws any bytes; a file or pipe gets them unchanged."""
  monkeypatch.setattr(sys, "stdout", out())
  flags = ["--prompt=\x1b[2Ja"]
  assert run(*flags, "--num_tokens=40", "--past_end", "--temperature=100") == 0
  shown = sys.stdout.getvalue()
  if out is _Terminal:
    assert "\ufffd[2Ja" in shown
    assert text_table.printable(shown) == shown
  else:
    assert "\x1b[2Ja" in shown

# SPDX-License-Identifier: Apache-2.0
"""The command and `sample_text`; the engine has its own tests."""

import io
import json
import sys

import pytest

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.common import text_table
from attnres_jax.inference import draw
from attnres_jax.inference import engine as engine_lib
from attnres_jax.inference import sample
from attnres_jax.inference import text
from attnres_jax.inference import trained
from tests import tiny_network

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
  monkeypatch.setattr(trained, "load", lambda options: (config, model))

  def run(*flags):
    return sample.main([f"--workdir={tmp_path}", *map(str, flags)])

  return run


def test_text_opens_a_document(model):
  found = sample.sample_text(
    model, TOKENIZER, "ab", num_tokens=4, temperature=0.0
  )
  engine = engine_lib.Engine(model, slots=1, length=8)
  request = engine_lib.Request(
    [TOKENIZER.separator_id, 97, 98], 4, draw.Settings(temperature=0.0)
  )
  ids = [token.id for token in engine.run([request])]
  assert found == TOKENIZER.decode(ids)


def test_one_prompt_is_printed_as_it_is_drawn(run, model, capsys, monkeypatch):
  expected = sample.sample_text(model, TOKENIZER, "ab", num_tokens=5, seed=1)
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


def test_many_prompts_as_json(run, capsys, tmp_path):
  file = tmp_path / "prompts.jsonl"
  lines = [dict(prompt="ab"), dict(prompt="a\nb"), dict(prompt="")]
  file.write_text("\n".join(map(json.dumps, lines)))
  flags = f"--prompts={file}", "--json", "--num_tokens=4", "--past_end"
  assert run(*flags, "--logprobs=2", "--slots=2") == 0
  found = sorted(
    map(json.loads, capsys.readouterr().out.splitlines()),
    key=lambda line: line["index"],
  )
  assert [line["prompt"] for line in found] == ["ab", "a\nb", ""]
  assert [len(line["ids"]) for line in found[:2]] == [4, 4]
  for line in found[:2]:
    assert line["text"] == TOKENIZER.decode(line["ids"])
    assert line["finish"] == "length"
    assert len(line["logprobs"]) == len(line["top"]) == len(line["ids"])
    assert all(len(top) == 2 for top in line["top"])
  # The same prompt alone.
  assert run("--prompt=ab", "--json", "--num_tokens=4", "--past_end") == 0
  (alone,) = map(json.loads, capsys.readouterr().out.splitlines())
  assert alone["ids"] == found[0]["ids"]


def test_a_line_per_prompt(run, capsys, tmp_path):
  file = tmp_path / "prompts.txt"
  file.write_text("ab\ncd\n")
  assert run(f"--prompts={file}", "--num_tokens=2", "--past_end") == 0
  out = capsys.readouterr().out
  assert "ab" in out and "cd" in out and out.endswith("\n\n")


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
    (["--slots=0"], "--slots: got 0"),
    (["--prompt=\ud800"], "prompt: got"),
    (["--length=5", "--num_tokens=6"], "--num_tokens: got"),
    (["--prompts=none.txt"], "none.txt: No such file"),
    (["--prompt=a", "--prompts=b"], "--prompt: got 'a', expected nothing"),
  ],
)
def test_bad_flags_are_named(run, flags, message, capsys):
  assert run(*flags) in (1, 2)
  error = capsys.readouterr().err
  assert message in error and error.count("\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="has no /dev/zero")
def test_prompts_without_an_end(run, capsys):
  assert run("--prompts=/dev/zero") == 2
  assert "--prompts: got '/dev/zero', exp" in capsys.readouterr().err


@pytest.mark.parametrize(
  "line", ["ab", '{"text": "ab"}', '{"prompt": "ab", "top": 1}']
)
def test_bad_lines_are_named(run, line, tmp_path, capsys):
  file = tmp_path / "prompts.jsonl"
  file.write_text('{"prompt": "a"}\n' + line)
  assert run(f"--prompts={file}") == 2
  assert f"{file}:2" in capsys.readouterr().err


class _Terminal(io.StringIO):
  def isatty(self):
    return True


@pytest.mark.parametrize("out", [io.StringIO, _Terminal])
@pytest.mark.parametrize("several", [False, True])
def test_a_terminal_gets_no_codes(run, monkeypatch, tmp_path, out, several):
  """A network draws any bytes; a file or pipe gets them unchanged."""
  monkeypatch.setattr(sys, "stdout", out())
  flags = ["--prompt=\x1b[2Ja"]
  if several:
    path = tmp_path / "prompts.txt"
    path.write_text("\x1b[2Ja\n\x1b[2Jb")
    flags = [f"--prompts={path}"]
  assert run(*flags, "--num_tokens=40", "--past_end", "--temperature=100") == 0
  found = sys.stdout.getvalue()
  if out is _Terminal:
    assert "\ufffd[2Ja" in found
    assert text_table.printable(found) == found
  else:
    assert "\x1b[2Ja" in found

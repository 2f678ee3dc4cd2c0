# SPDX-License-Identifier: Apache-2.0
"""No text of others steers the terminal of who reads it."""

import io
import sys
import unicodedata

from hypothesis import given
from hypothesis import strategies as st
import pytest
import tqdm

from attnres_jax import config as config_lib
from attnres_jax.common import command_line
from attnres_jax.common import text_table


@given(st.text(st.characters() | st.sampled_from("\x1b\x9b\r\b\u202e\u2028")))
def test_nothing_is_left_that_steers(text):
  shown = text_table.printable(text)
  assert len(shown) == len(text) and text_table.printable(shown) == shown
  for before, after in zip(text, shown):
    category = unicodedata.category(before)
    steers = category in ("Cc", "Cs", "Zl", "Zp") and before not in "\n\t"
    steers |= unicodedata.bidirectional(before) in (
      "LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"
    )  # fmt: skip
    assert after == ("\ufffd" if steers else before)


def _prints():
  print("out\x1b[2J")
  print("err\x1b[2J", file=sys.stderr)
  sys.stdout.writelines(["lines\x1b[2J\n"])


def _fails():
  raise config_lib.ConfigError("file: got \x1b[2J")


def _is_absent():
  raise FileNotFoundError(2, "no such file", "\x1b[2J")


@pytest.mark.parametrize("command", [_prints, _fails, _is_absent])
def test_a_command_prints_no_codes(command, capsys):
  before = sys.stdout, sys.stderr
  command_line.run(command)
  assert (sys.stdout, sys.stderr) == before
  output = "".join(capsys.readouterr())
  assert output.count("\ufffd[2J") == output.count("[2J") >= 1


def test_bars_stay_in_their_line(capsys):
  bar = lambda: tqdm.tqdm(total=1, desc="a\x1b[2J\rb").close()
  command_line.run(bar)
  error = capsys.readouterr().err
  assert error.startswith("\ra\ufffd[2J\ufffdb: ") and error.endswith("\n")
  assert "\x1b" not in error and "\r" not in error.replace("\ra", "")


def test_streams_that_cannot_be_replaced(monkeypatch):
  """None where it was closed from the start; ASCII gets escapes."""
  narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
  monkeypatch.setattr(sys, "stdout", narrow)
  monkeypatch.setattr(sys, "stderr", None)
  assert command_line.run(lambda: print("é\x1b[2J")) == 0
  narrow.flush()
  assert narrow.buffer.getvalue() == b"\\xe9\\ufffd[2J\n"

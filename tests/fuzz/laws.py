# SPDX-License-Identifier: Apache-2.0
"""The law of the fuzzer, and how a test draws its cases.

For any input: success, or exactly one line on stderr and exit status 1 or 2;
never a traceback.
"""

import contextlib
import io

import hypothesis
from hypothesis import strategies as st
import pytest

# Texts that no field or flag expects.
TEXTS = (
    "", " ", "a", "nan", "1e3", "0x10", "prenorm", "full_attnres", "kda",
    "../..", "/", "/dev/null", "/dev/null/x", "/proc/self/x", "~nobody/x", "~",
    "s3://bucket/x", "gs://bucket/x", "foo://x", "://", "a=b", "a:b", "a,b",
    "*", "[", "**", "é", "a\0b", "\udc80", "x\ny", "x" * 300, "x" * 5000,
)  # fmt: skip


def shares(default, slow):
  """How often a test draws: by default, and if `slow`."""
  return pytest.mark.parametrize(
    "cases", [default, pytest.param(slow, marks=pytest.mark.slow)]
  )


def explore(cases, check, *strategies):
  """Calls a check with so many draws; always the same."""

  @hypothesis.settings(
    max_examples=cases,
    derandomize=True,
    phases=[hypothesis.Phase.generate],  # Cases are small as they are.
    deadline=None,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
  )
  @hypothesis.given(st.tuples(*strategies))
  def run(drawn):
    check(*drawn)

  run()


def outcome(command, *args, per_run=False):
  """(exit status, stdout, stderr) of a command, which must obey the law.

  With `per_run`, the command shows several runs, with at most one line for each
  damaged run.
  """
  out, err = io.StringIO(), io.StringIO()
  with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    try:
      status = command(*args) or 0
    except SystemExit as end:
      status = end.code or 0
  # A progress bar redraws its line.
  lines = [line for line in err.getvalue().split("\n") if line[:1] != "\r"]
  out, err = out.getvalue(), "\n".join(lines)
  assert status in (0, 1, 2), (status, err)
  if status and not (per_run and out):
    assert err.startswith("error: ") and err.count("\n") == 1, err
  assert not per_run or all(line[:7] == "error: " for line in err.splitlines())
  return status, out, err

# SPDX-License-Identifier: Apache-2.0
"""The law of the fuzzer, and how a test draws its cases.

For any input: success, or exactly one line on stderr and exit status 1 or 2;
never a traceback.
"""

import contextlib
import io

from hypothesis import strategies as st
import pytest

from attnres_jax.common import command_line

# Numbers, texts and types of values that no field or flag expects.
NUMBERS = (
    -1, 0, 1, 2, 3, 7, 1000, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 10**12, 10**20,
    10**400, -(2**63), 0.0, -0.0, 0.5, 1.0, 1.5, 1e-300, 1e-45, 1e-9, 1e38,
    1e39, 1e300, float("inf"), -float("inf"), float("nan"),
)  # fmt: skip
TEXTS = (
    "", " ", "a", "nan", "1e3", "0x10", "prenorm", "full_attnres", "kda",
    "../..", "/", "/dev/null", "/dev/null/x", "/proc/self/x", "~nobody/x", "~",
    "s3://bucket/x", "gs://bucket/x", "foo://x", "://", "a=b", "a:b", "a,b",
    "*", "[", "**", "é", "a\0b", "\udc80", "x\ny", "x" * 300, "x" * 5000,
)  # fmt: skip
OTHERS = (True, False, None, (), [], {}, [[]], {"a": 1}, ("kda",) * 9, b"x")

texts = st.sampled_from(TEXTS)
values = st.sampled_from(NUMBERS + TEXTS + OTHERS) | st.integers() | st.floats()


def shares(default, slow):
  """How often the `explore` of a test draws: by default, and if `slow`."""
  return pytest.mark.parametrize(
    "cases", [default, pytest.param(slow, marks=pytest.mark.slow)]
  )


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


def guarded(function, *args):
  """`outcome` of a function that is the body of a command."""
  return outcome(command_line.run, function, *args)

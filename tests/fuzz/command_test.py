# SPDX-License-Identifier: Apache-2.0
"""Any command line of any command."""

import types

from hypothesis import strategies as st
import jax
import pytest

from attnres_jax import main
from attnres_jax.common import topology
from attnres_jax.flops import __main__ as flops_main
from attnres_jax.plan import __main__ as plan_main
from attnres_jax.plan import report as aot_report
from attnres_jax.plan import text as aot_text
from attnres_jax.train import loop
from tests import tiny_run
from tests.fuzz import laws

CONFIGS = (
    f"{tiny_run.ROOT}/configs/lm.py:size=micro",
    f"{tiny_run.ROOT}/configs/lm.py:size=micro,runlocal",
    f"{tiny_run.ROOT}/configs/lm.py:size=",
    f"{tiny_run.ROOT}/configs/lm.py:sise=micro",
    f"{tiny_run.ROOT}/configs/kimi_linear.py",
    f"{tiny_run.ROOT}/README.md",
    f"{tiny_run.ROOT}",
)  # fmt: skip
# Invalid config files.
SOURCES = {
  "syntax": "def get_config(arg=None:\n",
  "import": "import nothing_of_this_name\n",
  "raises": "def get_config(arg):\n  raise KeyError('x\\ny')\n",
  "exits": "import sys\nsys.exit(7)\n",
  "recursion": "def get_config(arg):\n  return get_config(arg)\n",
  "other": "def get_config(arg):\n  return [1]\n",
  "empty": "",
  "not_callable": "get_config = 3\n",
  "nothing": "def get_config(arg): ...\n",
  "no_arguments": "def get_config(): ...\n",
  "encoding": b"x = '\xff\xfe'\n",
  "null": b"x = 1\0\n",
}
FLAGS = {
    "config": CONFIGS + laws.TEXTS, "workdir": laws.TEXTS,
    "num_processes": laws.TEXTS,
    "process_id": ("0", "-1", "9"), "coordinator_address": laws.TEXTS,
    "json": laws.TEXTS, "topology": laws.TEXTS, "num_slices": laws.TEXTS,
    "step": ("train", "decode", "x"),
    "config.optim.peak_lr": laws.TEXTS, "config.model.width": laws.TEXTS,
    "distributed": ("true", "false", "x"), "flagfile": laws.TEXTS,
    "verbosity": ("0", "x"), "nothing": laws.TEXTS,
}  # fmt: skip
BARE = ("--distributed", "--", "extra", "-", "--=", "--config", "--nojson")


@pytest.fixture
def here(tmp_path, monkeypatch):
  """A separate working directory, because relative paths are written too."""
  monkeypatch.chdir(tmp_path)
  for name, text in SOURCES.items():
    data = text if isinstance(text, bytes) else text.encode()
    (tmp_path / f"{name}.py").write_bytes(data)
  return tmp_path


def _lines(options, bare=()):
  """Argument lists: random options with random values, and other words."""
  # No system passes a null character to a program.
  lists = [
    st.tuples(
      st.just(name), st.sampled_from([c for c in choices if "\0" not in c])
    ).map(lambda pair: f"--{pair[0]}={pair[1]}")
    for name, choices in options.items()
  ]
  words = st.one_of(*lists, *[st.just(word) for word in bare])
  return st.lists(words, max_size=5)


@pytest.mark.more
@laws.shares(120, 3000)
def test_commands_with_flags(here, monkeypatch, cases):
  """main, flops and plan, up to their computation."""
  done = {"status": "finished", "step": 3}
  monkeypatch.setattr(loop, "train_and_evaluate", lambda *a, **kw: done)
  device = types.SimpleNamespace(device_kind="TPU v5")
  monkeypatch.setattr(topology, "devices", lambda *a: [device])
  monkeypatch.setattr(aot_report, "make_report", lambda *a: {"fits": True})
  monkeypatch.setattr(aot_text, "to_text", lambda report: "")
  connect = lambda **given: (_ for _ in ()).throw(ValueError("no cluster"))
  monkeypatch.setattr(jax.distributed, "initialize", connect)
  commands = {"main": main, "flops": flops_main, "plan": plan_main}

  def call(name, arguments):
    return commands[name].main(arguments)

  lines = _lines(FLAGS, BARE)
  with_config = lines.map(lambda line: [f"--config={CONFIGS[0]}", *line])
  sources = [f"--config={here}/{name}.py" for name in SOURCES]
  bad_file = st.sampled_from(sources).map(lambda file: [file, "--workdir=x"])

  laws.explore(
    cases,
    lambda name, line: laws.outcome(call, name, line),
    st.sampled_from(sorted(commands)),
    st.one_of(lines, with_config, bad_file),
  )

# SPDX-License-Identifier: Apache-2.0
"""Any command line of any command."""

import types

from hypothesis import strategies as st
import pytest

from attnres_jax import main
from attnres_jax.common import command_line
from attnres_jax.data import prepare
from attnres_jax.flops import __main__ as flops_main
from attnres_jax.inference import sample
from attnres_jax.pipeline import __main__ as pipeline_main
from attnres_jax.plan import __main__ as plan_main
from attnres_jax.plan import report as aot_report
from attnres_jax.plan import topology
from attnres_jax.sweep import cli
from attnres_jax.sweep import worker
from attnres_jax.train import loop
from tests import tiny_run
from tests.fuzz import laws
from tests.sweep import tiny_sweep

CONFIGS = (
    f"{tiny_run.ROOT}/configs/lm.py:size=micro",
    f"{tiny_run.ROOT}/configs/lm.py:size=micro,runlocal",
    f"{tiny_run.ROOT}/configs/lm.py:size=",
    f"{tiny_run.ROOT}/configs/lm.py:sise=micro",
    f"{tiny_run.ROOT}/configs/kimi_linear.py",
    f"{tiny_run.ROOT}/README.md",
    f"{tiny_run.ROOT}",
)  # fmt: skip
# Invalid config files, and sweeps that fail.
SOURCES = {
  "syntax": "def get_config(arg=None:\n",
  "import": "import nothing_of_this_name\n",
  "raises": "def get_config(arg):\n  raise KeyError('x\\ny')\n",
  "exits": "import sys\nsys.exit(7)\n",
  "recursion": "def get_config(arg):\n  return get_config(arg)\n",
  "other": "def get_config(arg):\n  return [1]\n",
  "empty": "",
  "not_callable": "get_config = 3\nsweep = 3\n",
  "no_runs": "def get_config(arg): ...\ndef sweep(add): ...\n",
  "bad_run": "def get_config(arg): ...\ndef sweep(add):\n  add(x=1)\n",
  "no_arguments": "def get_config(): ...\ndef sweep(): ...\n",
  "encoding": b"x = '\xff\xfe'\n",
  "null": b"x = 1\0\n",
}
FLAGS = {
    "config": CONFIGS + laws.TEXTS, "workdir": laws.TEXTS,
    "num_processes": laws.TEXTS,
    "process_id": ("0", "-1", "9"), "coordinator_address": laws.TEXTS,
    "json": laws.TEXTS, "topology": laws.TEXTS, "num_slices": laws.TEXTS,
    "step": ("train", "decode", "x"), "compare": laws.TEXTS,
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
  tiny_sweep.write(tmp_path / "good.py")
  (tmp_path / "texts").mkdir()
  (tmp_path / "texts" / "a.txt").write_text("some text " * 50)
  (tmp_path / "texts" / "b.jsonl").write_text('{"text": "a"}\n' * 9)
  (tmp_path / "deep.json").write_text("[" * 100_000)
  return tmp_path


def _lines(options, bare=()):
  """Argument lists: random options with random values, and other words."""
  # No system passes a null character to a program.
  one = [
    st.tuples(
      st.just(name), st.sampled_from([c for c in choices if "\0" not in c])
    ).map(lambda pair: f"--{pair[0]}={pair[1]}")
    for name, choices in options.items()
  ]
  words = st.one_of(*one, *[st.just(word) for word in bare])
  return st.lists(words, max_size=5)


@laws.shares(120, 3000)
def test_commands_with_flags(here, monkeypatch, explore):
  """main, flops and plan, up to their computation."""
  done = {"status": "stopped", "step": 3}
  monkeypatch.setattr(loop, "train_and_evaluate", lambda *a, **kw: done)
  device = types.SimpleNamespace(device_kind="TPU v5")
  monkeypatch.setattr(topology, "devices", lambda *a: [device])
  monkeypatch.setattr(aot_report, "make_report", lambda *a: {"fits": True})
  monkeypatch.setattr(aot_report, "to_text", lambda report: "")
  monkeypatch.setattr(aot_report, "compare", lambda a, b: "")
  connect = lambda **given: (_ for _ in ()).throw(ValueError("no cluster"))
  monkeypatch.setattr(command_line.jax.distributed, "initialize", connect)
  commands = {"main": main, "flops": flops_main, "plan": plan_main}

  def call(name, arguments):
    return commands[name].main(arguments)

  lines = _lines(FLAGS, BARE)
  with_config = lines.map(lambda line: [f"--config={CONFIGS[0]}", *line])
  sources = [f"--config={here}/{name}.py" for name in SOURCES]
  bad_file = st.sampled_from(sources).map(lambda one: [one, "--workdir=x"])

  explore(
    "command lines (main, flops, plan)",
    lambda name, line: laws.outcome(call, name, line),
    st.sampled_from(sorted(commands)),
    st.one_of(lines, with_config, bad_file),
  )


@laws.shares(60, 1500)
def test_pipeline_command(explore):
  names = (
      "stage", "virtual_stages", "microbatches", "sublayers", "block_size",
      "microbatch",
  )  # fmt: skip
  counts = ("-1", "0", "1", "2", "3", "16", "x", "", "1e3", "9" * 5000)
  options = dict.fromkeys(names, counts)
  options |= {"rule": ("cached", "x"), "show": ("life", "holds", "x")}
  explore(
    "command lines (pipeline)",
    lambda line: laws.outcome(pipeline_main.main, line),
    _lines(options, ("extra",)),
  )


@laws.shares(60, 1500)
def test_prepare(here, explore):
  kept = {path: path.read_bytes() for path in (here / "texts").iterdir()}
  paths = ("texts", "texts/*.txt", "deep.json", *laws.TEXTS)
  # Nothing outside this folder may be written or traversed.
  paths = [path for path in paths if path not in ("/", "../..", "~", "**", "*")]
  options = {
      "source": ("text", "jsonl", "stdlib", "parquet", "tokens", "x"),
      "path": paths, "validation_path": paths, "tokenizer_path": paths,
      "validation_fraction": ("0.5", "0", "1", "nan", "x", "-1", "1e-45"),
      "text_field": ("text", "", "x"),
      "tokenizer": ("bytes", "hf", "ids", "x"),
      "shard_tokens": ("0", "-1", "9", "x", "9" * 30),
      "output": ["out", "texts", *paths],
  }  # fmt: skip
  lines = _lines(options, ("--overwrite",))
  whole = lines.map(
    lambda line: ["--source=text", "--path=texts", "--output=out", *line]
  )

  def check(line):
    laws.outcome(prepare.main, line)
    for path, data in kept.items():
      assert path.read_bytes() == data, "prepare changed what it reads"

  explore(
    "command lines (prepare)",
    check,
    st.one_of(lines, whole),
  )


@laws.shares(60, 1500)
def test_sample(here, monkeypatch, explore):
  """Arguments only; `run_folder_test` damages what it reads."""
  (here / "texts" / "checkpoints" / "5").mkdir(parents=True)
  (here / "texts" / "checkpoints" / "x").mkdir()
  folders = ("texts", ".", *laws.TEXTS)
  options = {
      "workdir": folders, "prompt": laws.TEXTS,
      "num_tokens": ("0", "-1", "3", "x", "9" * 30),
      "temperature": ("0", "-1", "nan", "inf", "1e-45", "x"),
      "seed": ("-1", "0", "4294967296", "x"), "step": ("5", "-1", "0", "x"),
      "prompts": ("prompts.jsonl", "texts", *laws.TEXTS), "stop": laws.TEXTS,
      "top_k": ("0", "-1", "x"), "top_p": ("0", "2", "nan"),
      "slots": ("0", "1"),
  }  # fmt: skip
  (here / "prompts.jsonl").write_text(
    '{"prompt": "a"}\n{"prompt": "b", "seed": 1.5}'
  )
  explore(
    "command lines (sample)",
    lambda line: laws.outcome(sample.main, line),
    _lines(options, ("extra",)),
  )


@laws.shares(40, 1000)
def test_worker(here, explore):
  """Up to the claim of a run: none of these exists."""
  options = {
      "config": CONFIGS + laws.TEXTS, "config.seed": laws.TEXTS,
      "folder": [path for path in laws.TEXTS if path not in ("/", "~")],
      "run": laws.TEXTS, "num_processes": ("2", "x"), "process_id": ("0", "2"),
      "coordinator_address": laws.TEXTS, "patience_seconds": ("0", "nan", "x"),
  }  # fmt: skip
  required = ["--folder=texts", "--run=x"]
  explore(
    "command lines (worker)",
    lambda line: laws.outcome(worker.main, [*required, *line]),
    _lines(options, ("extra",)),
  )


@laws.shares(60, 1500)
def test_sweep(here, explore):
  configs = [f"{name}.py" for name in SOURCES] + ["good.py:", *CONFIGS]
  folders = [path for path in laws.TEXTS if path not in ("/", "~", "../..")]
  options = {
      "config": configs + ["good.py:width=x", "good.py:steps=0", ""],
      "workdir": folders, "launcher": ("local", "slurm", "x"),
      "set": laws.TEXTS, "max_parallel": ("0", "-1", "2", "x"),
      "only": ("seed1", "(", "x"), "out": laws.TEXTS,
  }  # fmt: skip
  actions = ("status", "collect", "report", "run", "x")
  experiment = tiny_sweep.EXPERIMENT

  explore(
    "command lines (sweep)",
    lambda line: laws.outcome(cli.main, experiment, [*line, "--dry_run"]),
    _lines(options, actions),
  )

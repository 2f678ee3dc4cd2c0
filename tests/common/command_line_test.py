# SPDX-License-Identifier: Apache-2.0
"""The one kit of flags, with commands that use it."""

import dataclasses
import json
import re
import subprocess
import sys
import traceback

from absl import flags as absl_flags
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
from ml_collections import config_flags
import pytest

from attnres_jax import config as config_lib
from attnres_jax import main
from attnres_jax.common import command_line
from attnres_jax.config import describe
from attnres_jax.config import errors
from attnres_jax.config import load
from attnres_jax.inference import sample
from attnres_jax.pipeline import __main__ as pipeline_main
from attnres_jax.plan import __main__ as plan_main
from attnres_jax.plan import search
from attnres_jax.sweep import cli
from attnres_jax.sweep import worker
from attnres_jax.train import described
from experiments.scaling_law import run as scaling_law
from tests import tiny_run
from tests.fuzz import laws

SPEC = f"{tiny_run.ROOT}/configs/lm.py:size=micro"
PARSERS = {
  "main": main.make_parser(),
  "plan": plan_main.make_parser(),
  "search": search.make_parser(),
  "pipeline": pipeline_main._parser(),
  "sweep": cli.make_parser(scaling_law.EXPERIMENT),
  "worker": worker.make_parser(),
}


@pytest.mark.parametrize("name", PARSERS)
def test_numbers_are_checked_like_fields(name):
  """No flag takes a number that is not finite, nor less than it can use."""
  parser = PARSERS[name]
  flags = [action for action in parser._actions if action.dest in parser._kinds]
  # Every number has a kind.
  for action in parser._actions:
    assert not isinstance(action.default, (int, float)) or (
      isinstance(action.default, bool) or action in flags
    )
  for action in flags:
    for bad in ("nan", "inf", "-1", "1e400", "x", ""):
      given = ["--folder=x"] * (name == "worker")
      given += [f"{action.option_strings[0]}={bad}"]
      status, _, line = laws.outcome(parser.parse_args, given)
      assert status == 2 and action.option_strings[0] in line, line


@pytest.mark.parametrize("name", [name for name in PARSERS if name != "worker"])
def test_every_command_takes_the_config(name):
  parser = PARSERS[name]
  options = parser.parse_args(
    [
      f"--config={SPEC}",
      "--config.model.width=32",
      "--config.data.segment_ids=no",
    ]
  ).config
  assert options.fields == {"model.width": "32", "data.segment_ids": "no"}
  assert options.load().model.width == 32
  help_text = parser.format_help()
  assert "--config.FIELD" in help_text and "--help_config" in help_text


@pytest.mark.parametrize(
  "name,arguments,error",
  [
    ("sweep", ["status", "--launcher=ray"], "--launcher: .* action=status"),
    ("sweep", ["report", "--only=x"], "--only: .* action=report"),
    ("search", ["--only=x"], "--only: has no effect without --sweep"),
    ("main", ["--process_id=1"], "--process_id: .* without --distributed"),
    ("main", ["--config.seed=1"], "--config: missing"),
    ("main", ["--config"], "argument --config: expected one argument"),
    ("main", ["--help_config", "--config"], "argument --config: expected one"),
    ("plan", ["--step=decode", "--until=code"], "--until: .* step=decode"),
  ],
)
def test_no_flag_without_effect(name, arguments, error):
  status, _, line = laws.outcome(PARSERS[name].parse_args, arguments)
  assert status == 2 and re.match(f"error: {error}", line)


def test_home(monkeypatch):
  monkeypatch.setenv("HOME", "/h")
  options = PARSERS["main"].parse_args(
    ["--config=~/a.py:x", "--config.data.path=~/d", "--workdir=~/r"]
  )
  assert options.workdir == "/h/r" and options.config.spec == "/h/a.py:x"
  config = config_lib.load_config(SPEC, {"data.paths": ()})
  for name in ("path", "validation_path", "tokenizer_path"):
    data = dataclasses.replace(config.data, **{name: "~/d"})
    assert getattr(data, name) == "/h/d"
  prompt = sample._parser().parse_args(["--workdir=r", "--prompt=~/x"]).prompt
  assert prompt == "~/x"


def test_help_config_names_every_field_and_its_meaning():
  text = describe.to_text()
  fields = config_lib.flatten(config_lib.default_config().to_dict())
  names = re.findall(r"^--config\.([\w.]+)=", text, re.M)
  assert sorted(names) == sorted(fields)
  for entry in text.split("--config.")[1:]:
    assert re.fullmatch(r"[\w.]+=.* {2}\(.+\)\n( {4}\S.*\n?)+", entry), entry
  flags = ["--help_config", "model.residual"]
  status, shown, _ = laws.outcome(main.main, flags)
  assert not status
  assert shown.count("--config.") == shown.count("--config.model.residual.")
  status, _, err = laws.outcome(main.main, ["--help_config=model.risidual"])
  assert status == 2 and "did you mean 'model.residual'?" in err


REFERENCES = """\
from attnres_jax import config as c

def get_config():
  config = c.default_config()
  config.model.num_heads = config.model.get_ref("num_layers")
  config.model.width = 8 * config.model.get_ref("num_heads")
  config.model.mlp_width = 3 * config.model.get_ref("width")
  config.train.eval_every = config.train.get_ref("steps") // 4
  config.name = "x_" + config.model.residual.get_ref("name")
  config.model.residual.block_size = 2
  return config
"""
LIVE = {
  "model.num_layers": st.integers(2, 9),
  "model.num_heads": st.sampled_from((1, 2, 4)),
  "model.width": st.sampled_from((8, 16, 64)),
  "model.mlp_width": st.integers(1, 99),
  "train.steps": st.integers(4, 99),
  "model.residual.name": st.sampled_from(("prenorm", "full_attnres")),
  "optim.peak_lr": st.sampled_from((1e-3, 0.5)),
  "model.tie_embeddings": st.booleans(),
}
overrides = st.lists(
  st.sampled_from(sorted(LIVE)).flatmap(
    lambda name: st.tuples(st.just(name), LIVE[name])
  ),
  max_size=4,
  unique_by=lambda pair: pair[0],
)


@given(overrides)
@settings(max_examples=40, deadline=None)
def test_references_stay_live_as_in_config_flags(tmp_path_factory, pairs):
  path = tmp_path_factory.getbasetemp() / "references.py"
  path.write_text(REFERENCES)
  args = [f"--config={path}", *(f"--config.{n}={v}" for n, v in pairs)]
  values = absl_flags.FlagValues()
  config = load.load_file(str(path)).get_config()
  argv = ["program", *args[1:]]
  config_flags.DEFINE_config_dict(
    "config", config, flag_values=values, sys_argv=argv
  )
  values(argv)
  expected = values.config.to_dict()
  try:
    expected = config_lib.build_run_config(expected)
    described.check(expected)
  except config_lib.ConfigError as error:
    expected = str(error)
  try:
    actual = PARSERS["main"].parse_args(args).config.load()
  except config_lib.ConfigError as error:
    actual = str(error)
  assert actual == expected


@pytest.mark.parametrize("arguments", ["size=tiny", "size=large", "runlocal"])
def test_what_follows_from_other_fields_of_lm(arguments):
  spec = f"{tiny_run.ROOT}/configs/lm.py:{arguments}"
  new = {
    "model.width": 512,
    "train.steps": 3000,
    "model.residual.name": "prenorm",
  }
  old, config = config_lib.load_config(spec), config_lib.load_config(spec, new)
  exact = old.model.mlp_width * 512 / old.model.width
  assert exact <= config.model.mlp_width < exact + 32
  assert config.model.mlp_width % 32 == 0
  assert config.optim.warmup_steps == 150
  assert config.name == old.name.replace("block_attnres", "prenorm")
  # What is given does not follow.
  given = {"model.mlp_width": 96, "optim.warmup_steps": 7, "name": "x"}
  config = config_lib.load_config(spec, new | given)
  assert (config.model.mlp_width, config.optim.warmup_steps) == (96, 7)
  assert config.name == "x"
  # However short the run is, its warm-up ends before it.
  for steps in (1, 2, 9):
    short = config_lib.load_config(spec, {"train.steps": steps})
    assert short.optim.warmup_steps <= steps // 2


@pytest.mark.parametrize(
  "file", sorted(path.name for path in (tiny_run.ROOT / "configs").glob("*.py"))
)
def test_names_follow_the_scheme(file):
  spec = f"{tiny_run.ROOT}/configs/{file}"
  old = config_lib.load_config(spec)
  new = config_lib.load_config(spec, {"model.residual.name": "full_attnres"})
  scheme = old.model.residual.name
  assert scheme in old.name
  assert new.name == old.name.replace(scheme, "full_attnres")


@pytest.mark.parametrize(
  "field,text,value",
  [
    # Whole numbers may be powers of ten.
    ("train.steps", "1e4", 10_000),
    *(
      ("train.steps", bad, None)
      for bad in ("1e-4", "1.5", "nan", "inf", "1e400")
    ),
    # Tuples are never letters.
    ("model.mixers", "kda,attention", ("kda", "attention")),
    ("model.mixers", "kda", ("kda",)),
    ("model.mixers", "('kda', 'mla')", ("kda", "mla")),
    ("model.mixers", "['kda']", ("kda",)),
    ("model.mixers", "'kda'", None),
    ("model.mixers", "(1, 2", None),
    # Regular expressions stay as they are.
    ("optim.freeze", "(embedding|head)", ("(embedding|head)",)),
    ("optim.freeze", "[eh].*/table", ("[eh].*/table",)),
    ("optim.freeze", "^a{1,2}$", ("^a{1,2}$",)),
    (
      "optim.freeze", "^a{1,2}$,[b,c],(d,e|f)", ("^a{1,2}$", "[b,c]", "(d,e|f)")
    ),
    ("optim.freeze", "()", ()),
    ("optim.freeze", '("^a{1,2}$", "b")', ("^a{1,2}$", "b")),
  ],
)  # fmt: skip
def test_a_field_from_text(field, text, value):
  if value is None:
    with pytest.raises(config_lib.ConfigError, match=f"^config.{field}: got"):
      config_lib.parse_field(field, text)
  else:
    assert config_lib.parse_field(field, text) == value


def test_the_config_of_an_old_run(tmp_path):
  old = config_lib.load_config(SPEC, {"optim.peak_lr": 0.25})
  path = tmp_path / "config.json"
  path.write_text(config_lib.to_json(old))
  new = config_lib.Source(str(path), {"train.steps": "70"}).load()
  train = dataclasses.replace(old.train, steps=70)
  assert new == dataclasses.replace(old, train=train)
  path.write_text(json.dumps({"model": {"num_layers": 3 * 10**8}}))
  with pytest.raises(config_lib.ConfigError, match="up to 2000"):
    config_lib.load_config(str(path))
  with pytest.raises(config_lib.ConfigError, match="takes no argument"):
    config_lib.load_config(f"{path}:size=s")


def test_dataclasses_in_a_config_file(tmp_path):
  path = tmp_path / "typed.py"
  path.write_text(
    "from __future__ import annotations\nimport dataclasses\n"
    "from attnres_jax import config as c\n"
    "@dataclasses.dataclass\nclass Size:\n  width: int = 24\n"
    "def get_config():\n  config = c.default_config()\n"
    "  config.model.width = Size().width\n"
    "  config.model.residual.block_size = 2\n  return config\n"
  )
  assert config_lib.load_config(str(path)).model.width == 24
  with pytest.raises(config_lib.ConfigError, match="takes no argument"):
    config_lib.load_config(f"{path}:x")


@pytest.mark.parametrize("number,fits", [(4, True), (5, False), (8, True)])
def test_a_number_of_blocks_is_what_is_built(number, fits):
  fields = {"model.num_layers": 4, "model.residual.num_blocks": number}
  if fits:
    model = config_lib.load_config(SPEC, fields).model
    size = model.residual.sublayers_per_block(model.num_sublayers)
    assert -(-model.num_sublayers // size) == number
  else:
    with pytest.raises(config_lib.ConfigError, match="such as 4 or 8"):
      config_lib.load_config(SPEC, fields)


@pytest.mark.parametrize(
  "error,status",
  [
    (jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: Barrier\ntimed out"), 1),
    (RuntimeError("Failed to recognize coordinator address"), 1),
    (ValueError("coordinator_address should be defined."), 2),
  ],
)
def test_processes_that_come_too_late_may_come_next_time(
  error, status, monkeypatch, capsys
):
  def initialize(**given):
    raise error

  monkeypatch.setattr(jax.distributed, "initialize", initialize)
  options = PARSERS["worker"].parse_args(["--folder=x", "--distributed"])
  assert command_line.run(command_line.connect, options) == status
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("error: --distributed: ")


@pytest.mark.more
def test_an_absent_platform_is_one_line(tmp_path):
  process = subprocess.run(
    [sys.executable, "-m", "attnres_jax.main", f"--config={SPEC}",
     f"--workdir={tmp_path / 'run'}"],
    env=tiny_run.environment() | {"JAX_PLATFORMS": "cuda"},
    cwd=tiny_run.ROOT, capture_output=True, text=True, timeout=120,
  )  # fmt: skip
  assert process.returncode == 2
  line = "error: JAX_PLATFORMS: got 'cuda', expected"
  assert process.stderr.startswith(line) and process.stderr.count("\n") == 1


@pytest.mark.parametrize("name", PARSERS)
def test_no_flag_is_other_than_utf_8(name):
  """Names of files may be any bytes, which Python makes half characters."""
  for arg in ("--workdir=a\udcff", "\udcff"):
    status, _, text = laws.outcome(PARSERS[name].parse_args, [arg])
    assert status == 2 and "expected text in UTF-8" in text


@pytest.mark.parametrize("last", [True, False])
def test_help_config_has_the_values_of_the_config_that_is_named(last):
  flags = ["--config=configs/lm.py:size=micro", "--config.optim.peak_lr=0.5"]
  request = ["--help_config", "optim"]
  given = [*flags, *request] if last else [*request, *flags]
  status, text, _ = laws.outcome(main.main, given)
  assert not status and "--config.optim.peak_lr=0.5  (" in text
  steps = config_lib.load_config("configs/lm.py:size=micro").optim.warmup_steps
  assert f"--config.optim.warmup_steps={steps}  (" in text
  status, _, err = laws.outcome(main.main, [*request, "--config=none.py"])
  assert status == 2 and "none.py" in err


def test_jax_says_nothing_of_its_frames_in_any_log():
  """It adds a note to whatever is raised inside a trace, and to its cause."""

  @jax.jit
  def step(x):
    try:
      return jax.jit(lambda y: 1 / 0)(x)
    except ZeroDivisionError as error:
      raise config_lib.ConfigError("no") from error

  with pytest.raises(config_lib.ConfigError) as caught:
    step(1.0)
  caught.value.add_note("ours")
  # Errors may cause each other.
  caught.value.__cause__.__cause__ = caught.value
  log = lambda: "".join(traceback.format_exception(caught.value))
  assert "For simplicity, JAX" in log()
  assert errors.without_jax_notes(caught.value) == ["ours"]
  assert "For simplicity, JAX" not in log() and "ours" in log()

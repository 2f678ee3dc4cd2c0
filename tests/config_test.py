# SPDX-License-Identifier: Apache-2.0
"""Every way in which a configuration can be wrong, and its one-line error."""

import dataclasses
import functools
import math
import subprocess
import sys
import typing

from flax import nnx
import jax.numpy as jnp
import pytest

from attnres_jax import config as c
from attnres_jax import main
from attnres_jax.config import dotted
from attnres_jax.config import fields
from attnres_jax.data import sources
from attnres_jax.data import tokenizer
from attnres_jax.models import residuals
from attnres_jax.optimizer import schedules
from attnres_jax.scaling import grid
from tests import tiers


def _build(**overrides):
  config = c.default_config()
  config.model.residual.num_blocks = 4
  for name, value in overrides.items():
    node = config
    *parents, leaf = name.split("__")
    for part in parents:
      node = node[part]
    with node.ignore_type():
      node[leaf] = value
  return c.build_run_config(config)


SCALING = "attnres_jax:scaling", "configs/scaling.py"

# A field, its value, and what is accepted beside the bounds of numbers.
ERRORS = [
  ("model.dtype", "float16", "one of bfloat16, float32"),
  ("model.remat", "fulll", "one of attention, dots, full, none (did you mean"),
  ("model.num_heads", 5, "a divisor of model.width=128, or an explicit"),
  ("model.num_kv_heads", 3, "a divisor of model.num_heads=4"),
  ("model.head_width", 7, "an even number with rotary positions"),
  ("model.vocab_size", 100, "at least the tokenizer's 257"),
  ("model.residual.form", "two_fase", "one of one_softmax, two_phase (did"),
  ("model.mixers", (), "one to 8 (model.num_layers) mixers"),
  ("model.mixers", ("kda",) * 9, "one to 8 (model.num_layers) mixers"),
  ("model.mixers", "kdaa", "a tuple of str"),
  ("model.mixers", ("mlp", "moe"), "one that mixes"),
  ("model.width", 100, "a multiple of 8, for an even width of each of"),
  ("model.rope.high_turns", 1.0, "a number above model.rope.low_turns=1.0"),
  ("model.moe.num_experts", 4, "at least model.moe.top_k=8, or 0"),
  ("model.moe.latent_norm", True, "False with model.moe.latent_width=0"),
  ("model.moe.dense_layers", 9, "at most model.num_layers=8"),
  ("optim.freeze", ("(",), "regular expressions (missing"),
  ("optim.rates", ("a=0",), "patterns with factors above 0, such as"),
  ("optim.rates", ("(=2",), "regular expressions (missing"),
  ("optim.accumulate_steps", 5, "a divisor of data.batch_size=12"),
  ("mesh.data", 0, "a number of devices, or -1 for all"),
  ("optim.clip_norm", 1e39, "a number within the range of float32"),
  ("optim.eps", 1e-40, "a number within the range of float32"),
  ("optim.b1", 1.0, "a number of at least 0, below 1"),
  ("optim.decay_fraction", 1.1, "a number from 0 to 1"),
  ("data.validation_fraction", 1.0, "a number between 0 and 1"),
  ("name", "a\0b", "text without a null character"),
  ("name", "a\udcff", "text in UTF-8"),
  ("model.norm_eps", "1e-6", "a value of type float"),
  ("model.tie_embeddings", 1, "a value of type bool"),
  ("model.residual", "prenorm", "fields of ResidualConfig"),
]


@pytest.mark.parametrize("field,value,accepted", ERRORS)
def test_one_line_names_field_value_and_what_is_accepted(
  field, value, accepted
):
  with pytest.raises(c.ConfigError) as error:
    _build(**{field.replace(".", "__"): value})
  message = str(error.value)
  start = f"config.{field}: got {value!r}, expected {accepted}"
  assert message.startswith(start)
  assert "\n" not in message


def _of_scheme(name):
  residual = c.residual_config(name)
  return c.to_dict(c.RunConfig(model=c.ModelConfig(residual=residual)))


_NUMBERS = [
  (name, value, scheme)
  for scheme in (
    "block_attnres",
    "full_attnres",
    "mhc",
    "laurel_lr",
    "gated_residual",
  )
  for name, value in c.flatten(_of_scheme(scheme)).items()
  if (scheme == "block_attnres" or name.startswith("model.residual."))
  and isinstance(value, (int, float))
  and not isinstance(value, bool)
]


@pytest.mark.parametrize("field,usual,scheme", _NUMBERS)
def test_every_number_has_bounds_and_a_type(field, usual, scheme):
  """The error of a number says which field, which value, and what else."""
  wrong = [-(10**9), 10**400, "64", True, None]
  wrong += [math.nan, math.inf] if isinstance(usual, float) else [64.5]
  *parents, leaf = field.split(".")
  for value in wrong:
    fields = _of_scheme(scheme)
    functools.reduce(dict.__getitem__, parents, fields)[leaf] = value
    with pytest.raises(c.ConfigError) as error:
      c.build_run_config(fields)
    message = str(error.value)
    shown = "" if isinstance(value, int) and value > 10**9 else f"{value!r}"
    assert message.startswith(f"config.{field}: got {shown}"), message
    assert "\n" not in message


def test_values_that_are_fine():
  assert _build(model__head_width=7, model__rope_theta=0).model.head_size == 7
  assert _build(optim__peak_lr=1).optim.peak_lr == 1.0  # int for float
  assert isinstance(_build(optim__peak_lr=1).optim.peak_lr, float)
  assert _build(data__tokenizer="ids").model.vocab_size == 0
  assert _build().model.vocab_size == 257


def test_derived_sizes():
  model = c.ModelConfig(width=96, num_heads=4, num_layers=5)
  assert (model.num_sublayers, model.kv_heads, model.head_size) == (10, 4, 24)
  assert model.mlp_size == 256  # 8/3 of 96
  assert c.ModelConfig(width=100, num_heads=2).mlp_size == 288  # 266.7 up
  assert c.ModelConfig(mlp_width=7).mlp_size == 7
  assert c.ModelConfig(num_kv_heads=2).kv_heads == 2


def test_vocabulary_comes_from_the_tokenizer():
  run = c.RunConfig()
  assert run.with_vocab_size(300).model.vocab_size == 300
  larger = run.with_vocab_size(300).with_vocab_size(257)
  assert larger.model.vocab_size == 300  # padded vocabularies are fine
  with pytest.raises(c.ConfigError, match="at least the tokenizer's 301"):
    run.with_vocab_size(300).with_vocab_size(301)


def test_differences():
  old = c.to_dict(_build())
  new = c.to_dict(_build(model__width=64, train__steps=7))
  assert c.differences(old, old) == {}
  assert c.differences(old, new) == {
    "model.width": (128, 64),
    "train.steps": (400, 7),
  }
  del new["model"]["remat"]
  new["extra"] = {"deep": 1}
  assert c.differences(old, new) == {
    "extra.deep": (None, 1),
    "model.remat": ("none", None),
    "model.width": (128, 64),
    "train.steps": (400, 7),
  }


@pytest.mark.parametrize(
  "text,expected",
  [
    (None, {}),
    ("", {}),
    ("n=3", dict(n=3)),
    ("x=2", dict(x=2.0)),
    ("x=1e-3,name=a=b", dict(x=1e-3, name="a=b")),
    ("flag", dict(flag=True)),
    ("flag=no,n=-1", dict(flag=False, n=-1)),
    ("flag=TRUE", dict(flag=True)),
    ("on=0", dict(on=False)),
  ],
)
def test_parse_arg(text, expected):
  defaults = dict(n=1, x=0.5, name="", flag=False, on=True)
  assert vars(c.parse_arg(text, **defaults)) == defaults | expected


@pytest.mark.parametrize(
  "text,message",
  [
    ("m=3", "config argument 'm': unknown, expected one of flag, n$"),
    ("n=x", "config argument 'n': got 'x', expected int"),
    ("n=1.5", "config argument 'n': got '1.5', expected int"),
    ("n", "config argument 'n': got 'true', expected int"),
    ("flag=maybe", "config argument 'flag': got 'maybe', expected bool"),
  ],
)
def test_parse_arg_errors(text, message):
  with pytest.raises(c.ConfigError, match=message):
    c.parse_arg(text, n=1, flag=False)


def test_a_missing_file():
  with pytest.raises(c.ConfigError, match="'no/such.py': not found"):
    c.load_config("no/such.py:size=s")


def test_defaults_are_the_dataclasses():
  assert c.default_config().to_dict() == dataclasses.asdict(c.RunConfig())


def test_configs_are_installed_with_the_library():
  """`attnres_jax:NAME` is the file of configs/, without a clone."""
  for argument in ("size=tiny,residual=full_attnres", ""):
    installed = c.load_config(f"attnres_jax:lm:{argument}")
    assert installed == c.load_config(f"configs/lm.py:{argument}")
  # One that uses its neighbours, and its sweep.
  sweeps = [grid.load(f"{name}:scale=laptop") for name in SCALING]
  assert sweeps[0] == sweeps[1]
  message = (
    "config 'attnres_jax:ml': not found, expected one of .*attnres_jax:lm"
  )
  with pytest.raises(c.ConfigError, match=message):
    c.load_config("attnres_jax:ml")


MICRO = "configs/lm.py:size=micro,residual=block_attnres"


@pytest.mark.parametrize(
  "name,words",
  [
    ("modle.width", "config.modle: got 'modle', expected one of checkpoint,"),
    ("model.residual.size", "expected one of block_size,"),
    *(
      (name, f"(did you mean config.{meant}?)")
      for name, meant in (
        ("optim.lr", "optim.peak_lr"), ("learning_rate", "optim.peak_lr"),
        ("model.nblocks", "model.residual.num_blocks"),
        ("batch_size", "data.batch_size"), ("model.widht", "model.width"),
        ("train.sequence_length", "data.sequence_length"),
      )
    ),
  ],
)  # fmt: skip
def test_an_unknown_field_names_the_one_that_is_meant(name, words):
  with pytest.raises(c.ConfigError) as caught:
    c.load_config(MICRO, {name: 1})
  assert words in str(caught.value)
  with pytest.raises(c.ConfigError, match="did you mean 'model'"):
    c.build_run_config({"modle": {}})


def test_every_unknown_flag_has_a_hint_of_the_same_kind(capsys):
  with pytest.raises(SystemExit):
    main.make_parser().parse_args([f"--config={MICRO}", "--learning_rate=3"])
  assert "(did you mean config.optim.peak_lr?)" in capsys.readouterr().err


def _acting():
  """Fields that act beside some values of others, with how to have both.

  A field, fields beside which it acts, and fields beside which it does not.
  """
  text = {"data.tokenizer": "hf", "data.tokenizer_path": "x"}
  experts = {"model.moe.num_experts": 8, "model.moe.expert_width": 8}
  kinds = lambda kind: {"model.mixers": (kind,)}
  of = {
    "optim.decay_fraction": ({"optim.schedule": "wsd"}, {}),
    "optim.final_lr_fraction": (
      {"optim.schedule": "linear"}, {"optim.schedule": "constant"}
    ),
    "optim.muon_": ({"optim.name": "muon"}, {}),
    "data.text_field": ({"data.source": "jsonl", "data.path": "x"}, {}),
    "data.validation_fraction": ({}, {"data.validation_path": "x"}),
    "data.tokenizer_path": (text, {"data.tokenizer": "bytes"}),
    "data.separator": (text, {"data.tokenizer": "bytes"}),
    "train.max_skipped_share": ({"train.on_nan": "skip"}, {}),
    "model.moe.": (experts, {}),
    "model.rope.scaling": ({}, {"model.rope_theta": 0.0}),
    "model.rope.": ({"model.rope.scaling": "llama3"}, {}),
    "model.activation.": ({"model.activation.name": "situ"}, {}),
    "model.attention.": ({}, kinds("kda")),
    "model.kda.": (kinds("kda"), {}),
    "model.mla.": (kinds("mla"), {}),
    "pipeline.": ({"mesh.stage": 2}, {}),
  }  # fmt: skip
  for name, default in c.flatten(c.to_dict(c.RunConfig())).items():
    *parents, leaf = name.split(".")
    part, acts = c.RunConfig(), {}
    for each in (*parents, leaf):
      (field,) = (f for f in dataclasses.fields(part) if f.name == each)
      acts |= fields.conditions(field)
      part = getattr(part, each)
    if acts:
      (beside, *_) = (both for key, both in of.items() if name.startswith(key))
      yield name, default, *beside


@pytest.mark.parametrize("name,default,acts,fails", list(_acting()))
def test_a_field_that_cannot_act_is_refused(name, default, acts, fails):
  c.load_config(MICRO, {name: default} | acts)
  with pytest.raises(c.ConfigError, match=f"^config.{name}: .* acts only"):
    c.load_config(MICRO, {name: default} | fails)
  # What only the file says is accepted.
  c.load_config(MICRO, {name: default} | fails, by_hand=False)


@pytest.mark.parametrize("scheme", residuals.RESIDUALS)
def test_a_field_of_residual_that_its_scheme_does_not_read(scheme):
  """Set by hand; sweeps set it for the runs it is for."""
  model = c.load_config(MICRO, {"model.residual.name": scheme}).model
  takes = {f.name for f in dataclasses.fields(model.residual)}
  if not residuals.scheme_of(model).has_blocks:
    takes -= {"block_size", "num_blocks"}
  for leaf, value in dict(
    block_size=2, num_blocks=2, rank=2, streams=2, schedule_size=2,
    gate="scalar", stream_dtype="bfloat16", form="one_softmax",
  ).items():  # fmt: skip
    name = f"model.residual.{leaf}"
    given = {"model.residual.name": scheme, name: value}
    if leaf in takes:
      c.load_config(MICRO, given)
      continue
    with pytest.raises(
      c.ConfigError, match=f"^config.{name}: .* with model.re"
    ):
      c.load_config(MICRO, given)
  sizes = set()
  for size in (1, 2):
    part = dataclasses.replace(model.residual, num_blocks=0, block_size=size)
    changed = dataclasses.replace(model, residual=part)
    sizes.add(residuals.abstract_residual(changed).block_size)
  assert (len(sizes) == 2) == ("num_blocks" in takes) == ("block_size" in takes)


@pytest.mark.parametrize(
  "given,message",
  [
    ({"model.mixers": ("nope",)}, "model.mixers: got 'nope'"),
    ({"model.residual.name": "nope"}, "model.residual.name: got 'nope'"),
    ({"model.residual.read.heads": 5}, "read.heads: got 5, .* divisor of"),
    ({"optim.schedule": "nope"}, "optim.schedule: got 'nope'"),
    (
      {"optim.schedule": "wsd", "optim.decay_shape": "cosin"},
      "optim.decay_shape: got 'cosin'",
    ),
    (
      {"train.steps": 7, "optim.warmup_steps": 7},
      "optim.warmup_steps: got 7, .*than train.steps=7",
    ),
    (  # Where the decay begins.
      {
        "train.steps": 100, "optim.warmup_steps": 76, "optim.schedule": "wsd",
        "optim.decay_fraction": 0.25,
      },
      "optim.warmup_steps: got 76, .* at most 75",
    ),
    ({"optim.qk_clip": 9.0, "model.mixers": ("kda",)}, "qk_clip: .*softmax"),
    ({"optim.qk_clip": 9.0, "model.qkv_norm": True}, "qk_clip: .*without norm"),
    ({"data.source": "jsonl"}, "data.path: got ''"),
    ({"data.tokenizer": "hf"}, "data.tokenizer_path: got ''"),
    (
      {"model.residual.block_size": 3, "model.residual.num_blocks": 4},
      "model.residual.num_blocks: got 4",
    ),
    (
      {"model.residual.block_size": 99, "model.residual.num_blocks": 0},
      "model.residual.block_size: got 99, expected at most the ",
    ),
    (
      {"model.mixers": ("kda", "kda", "mla"), "model.num_layers": 8},
      "model.num_layers: got 8, expected a multiple of the 3 mixers",
    ),
    (
      {"model.depth_loop": "scan", "model.residual.name": "prenorm"},
      "model.depth_loop: got 'scan', expected 'unrolled' with",
    ),
    (
      {"model.depth_loop": "scan", "model.value_residual": True},
      "model.depth_loop: got 'scan'",
    ),
  ],
)  # fmt: skip
def test_what_a_step_would_refuse_is_refused_when_a_config_is_loaded(
  given, message
):
  with pytest.raises(c.ConfigError, match=message) as error:
    c.load_config(MICRO, given)
  assert str(error.value).startswith("config.")


@tiers.parametrize("names", [["block_attnres"], [*residuals.RESIDUALS]])
def test_loading_a_config_starts_no_device(names):
  """A process of several may not have, before it is connected."""
  program = (
    "from attnres_jax import config as c, models\n"
    f"for name in {names}:\n"
    f"  c.load_config({MICRO!r}, {{'model.residual.name': name}})\n"
    "from jax._src import xla_bridge as b\n"
    "assert not b.backends_are_initialized()"
  )
  subprocess.run([sys.executable, "-c", program], check=True)


class Lacking(residuals.base.Residual):
  """A scheme without `write`."""

  def init(self, embedding_BTD):
    return embedding_BTD

  def input(self, carry, slot):
    return carry

  def readout(self, state):
    return state


class WithoutAxes(residuals.RESIDUALS["prenorm"]):
  """A scheme whose parameter does not say what its axes are."""

  def __init__(self, config, *, rngs):
    super().__init__(config, rngs=rngs)
    self.factor = nnx.Param(jnp.ones(config.width))


@pytest.mark.parametrize(
  "scheme,line",
  [
    (Lacking, "error: the scheme Lacking has no `write` ("),
    (WithoutAxes, "error: residual/factor has no axes; name them where"),
  ],
)
def test_a_scheme_with_a_fault_has_one_line_and_no_folder(
  scheme, line, tmp_path, capsys, monkeypatch
):
  monkeypatch.setitem(residuals.RESIDUALS, "mine", scheme)
  flags = [
    f"--config={MICRO}",
    "--config.model.residual.name=mine",
    f"--workdir={tmp_path}/run",
  ]
  assert main.main(flags) == 2
  text = capsys.readouterr().err
  assert text.startswith(line) and text.count("\n") == 1
  assert not list(tmp_path.iterdir())


def test_a_field_that_does_not_say_what_it_affects_is_told_at_import():
  with pytest.raises(TypeError, match=r"config\.optim\.new: say what"):

    class _Options(fields.Checked, prefix="optim"):
      old: fields.Update[fields.Size] = 1
      new: fields.Size = 1

  with pytest.raises(ValueError, match="expected some of"):
    fields.affects("speed")


def test_choices_are_those_of_the_registries():
  registries = {
    "data.source": sources.SOURCES,
    "data.tokenizer": tokenizer.TOKENIZERS,
    "optim.schedule": schedules.SCHEDULES,
  }
  for name, registry in registries.items():
    assert set(typing.get_args(dotted.kind_of(name, ""))) == set(registry)
    with pytest.raises(c.ConfigError, match=f"^config.{name}: got 'x"):
      c.load_config(MICRO, {name: "xx"})


def test_what_a_user_sets_wins_over_what_the_file_derives():
  residual = c.load_config(MICRO).model.residual
  assert residual.num_blocks and not residual.block_size
  residual = c.load_config(
    MICRO, {"model.residual.block_size": 2}
  ).model.residual
  assert residual.block_size == 2 and not residual.num_blocks
  both = {"model.residual.block_size": 2, "model.residual.num_blocks": 2}
  with pytest.raises(c.ConfigError, match="num_blocks: got 2"):
    c.load_config(MICRO, both)

# SPDX-License-Identifier: Apache-2.0
"""Every config file builds with every argument, without computing anything.

A config file lists its arguments in `ARGUMENTS`: each key of `parse_arg` with
its values. Each value is built in turn, with and without `runlocal`, and the
others at their defaults. Full sizes are slow, except the first of each file
(`more`), and so are all combinations, unless there are many.
"""

import dataclasses
import importlib.util
import itertools
import pathlib

import jax
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.models import residuals
from attnres_jax.train import train_state

MOST_COMBINATIONS = 50
FILES = sorted((pathlib.Path(__file__).parents[1] / "configs").glob("*.py"))
(LM,) = (file for file in FILES if file.stem == "lm")


def _module(file):
  spec = importlib.util.spec_from_file_location(f"configs_{file.stem}", file)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def _values(module):
  """The arguments of a config; None stands for every scheme, of which few."""
  return {
    name: residuals.headline() if values is None else values
    for name, values in module.ARGUMENTS.items()
  }


def _arguments():
  for file in FILES:
    arguments = _values(_module(file))
    in_turn = [{key, "runlocal"} for key in arguments if key != "runlocal"]
    some = list(_combined(arguments, in_turn))
    for i, arg in enumerate(some):
      marks = []
      if "runlocal=False" in arg:
        marks = [pytest.mark.slow if i else pytest.mark.more]
      yield pytest.param(file, arg, id=f"{file.stem}:{arg}", marks=marks)
    every = list(_combined(arguments, [arguments]))
    for arg in every if len(every) <= MOST_COMBINATIONS else ():
      if arg not in some:
        yield pytest.param(
          file, arg, id=f"{file.stem}:{arg}", marks=pytest.mark.slow
        )


def _combined(arguments, groups):
  """All values of the arguments of each group, the others at their defaults."""
  combined = {}
  for group in groups:
    names = [name for name in arguments if name in group]
    for values in itertools.product(*(arguments[name] for name in names)):
      pairs = zip(names, values, strict=True)
      combined[",".join(f"{name}={value}" for name, value in pairs)] = None
  return combined


@pytest.mark.parametrize("file,arg", list(_arguments()))
def test_builds(file, arg):
  config = config_lib.load_config(f"{file}:{arg}")
  length = config.data.sequence_length + 1
  shape = config.data.batch_size, length - 1
  # Many arguments change neither the network nor the optimiser.
  key = config.model, config.optim.name, shape
  if key not in _TRACED:
    _TRACED[key] = _trace(config, shape)
  parameters, logits = _TRACED[key]
  assert logits == (*shape, config.model.vocab_size)
  if "runlocal=True" in arg:
    # A minute on a laptop's CPU: model FLOPs of all steps.
    trained = config.train.steps * config.data.batch_size * length
    assert 6 * parameters * trained < 2e11
    assert config.model.dtype == "float32" and config.train.steps <= 100


_TRACED = {}


def _trace(config, shape):
  """Number of parameters, and shape of the logits."""
  mesh = sharding.make_mesh(config_lib.MeshConfig(data=1))
  # Microbatches may be those of a plan.
  optim = dataclasses.replace(config.optim, accumulate_steps=1)
  config = dataclasses.replace(config, optim=optim)
  model = train_state.make_program(config, mesh).abstract_state.model
  tokens = jax.ShapeDtypeStruct(shape, "int32")
  logits = jax.eval_shape(lambda model, tokens: model(tokens), model, tokens)
  return sum(a.size for a in jax.tree.leaves(model)), logits.shape


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
class TestFile:
  def test_arguments_are_all_there_is(self, file, monkeypatch):
    seen = {}

    def parse_arg(arg, **defaults):
      seen.update(defaults)
      return original(arg, **defaults)

    original = config_lib.parse_arg
    monkeypatch.setattr(config_lib, "parse_arg", parse_arg)
    module = _module(file)
    module.get_config()
    assert set(seen) == set(module.ARGUMENTS)
    for name, default in seen.items():
      assert default in _values(module)[name]
    if "residual" in seen:
      assert set(_values(module)["residual"]) <= set(residuals.RESIDUALS)


@pytest.mark.parametrize("stem", ["lm", "kimi_linear"])
def test_language_models_cover_every_scheme(stem):
  (file,) = [file for file in FILES if file.stem == stem]
  assert _module(file).ARGUMENTS["residual"] is None


@pytest.mark.parametrize("size", _module(LM).SIZES)
def test_blocks_of_presets_are_alike(size):
  """Then one scan runs all blocks, and a program has one of them."""
  model = config_lib.load_config(f"{LM}:size={size}", {}).model
  per_block = model.residual.sublayers_per_block(model.num_sublayers)
  assert per_block % len(set(model.sublayer_kinds)) == 0
  assert model.num_sublayers % per_block == 0

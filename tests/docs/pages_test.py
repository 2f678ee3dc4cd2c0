# SPDX-License-Identifier: Apache-2.0
"""Pages name commands, flags, links, files and fields that are there."""

import importlib
import importlib.util
import pathlib
import re

import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import command_line
from attnres_jax.sweep import cli
from tests.docs import pages

ROOT = pages.ROOT
FIELDS = config_lib.flatten(config_lib.default_config().to_dict())
_PARTS = "|".join({name.partition(".")[0] for name in FIELDS if "." in name})
FIELD = rf"(?:config\.|`)((?:{_PARTS})\.[a-z_.]+[a-z])(?![\w.(])"


class _Parsed(BaseException):
  """Ends a command after its arguments have been read."""


def _parse(module, arguments):
  """What the parser of a command makes of arguments."""
  parse_args = command_line.Parser.parse_args

  def parse_and_end(self, args=None, namespace=None):
    raise _Parsed(parse_args(self, args, namespace))

  with pytest.MonkeyPatch.context() as patch, pytest.raises(_Parsed) as parsed:
    patch.setattr(command_line.Parser, "parse_args", parse_and_end)
    pages.main(module)(arguments)
  return parsed.value.args[0]


@pytest.mark.parametrize("page", pages.PAGES)
def test_commands_parse(page, monkeypatch):
  monkeypatch.chdir(ROOT)
  for module, arguments in pages.commands(page):
    # A recipe names the copy of a template, and what its reader fills in.
    module = module.replace("experiments.mine.", "experiments.TEMPLATE.")
    arguments = [
      re.sub("=[A-Z:]+$", "=1", argument).replace("/mine/", "/TEMPLATE/")
      for argument in arguments
    ]
    options = _parse(module, arguments)
    source = getattr(options, "config", None)
    if source is None:
      continue
    if not source.spec.startswith("runs/"):
      file = source.spec.partition(":")[0]
      assert (ROOT / file).is_file(), (page, file)
      if hasattr(options, "seeds"):
        assert cli.load_runs(options), source.spec
      else:
        assert source.load()
    for name, value in source.fields.items():
      config_lib.parse_field(name, value)


@pytest.mark.parametrize("page", pages.PAGES)
def test_links(page):
  for link in re.findall(r"\]\(([^)\s]+)", pages.PAGES[page]):
    if link.startswith(("http:", "https:")):
      continue
    path, _, anchor = link.partition("#")
    target = ROOT / pathlib.Path(page).parent / path if path else ROOT / page
    assert target.exists(), link
    if anchor:
      heads = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
      assert anchor in map(_anchor, heads), link


def _anchor(heading):
  """The anchor that GitHub makes of a heading."""
  letters = re.sub(r"[^\w\- ]", "", heading.lower())
  return letters.replace(" ", "-")


@pytest.mark.parametrize("page", pages.PAGES)
def test_names(page):
  """Files, modules and what is in them, and fields of configs."""
  text = pages.PAGES[page]
  # A recipe writes a new file.
  new = re.findall(r"^The file, `([^`]+)`", text, re.M)
  for name in re.findall(r"`([a-z_]+/[\w/]+\.py)`", text):
    places = [ROOT / name, ROOT / "attnres_jax" / name]
    assert name in new or any(map(pathlib.Path.exists, places)), name
  for name in re.findall(r"`((?:attnres_jax|attnres_kernels)[\w.]+)`", text):
    assert _resolves(name), name
  for name in re.findall(FIELD, text):
    is_field = any(f"{field}.".startswith(f"{name}.") for field in FIELDS)
    assert is_field or name.endswith((".json", ".jsonl", ".py")), name


def _resolves(name):
  try:
    return importlib.util.find_spec(name) is not None
  except ModuleNotFoundError:
    module, _, attribute = name.rpartition(".")
    return hasattr(importlib.import_module(module), attribute)

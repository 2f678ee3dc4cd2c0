# SPDX-License-Identifier: Apache-2.0
r"""Imports a Hugging Face checkpoint: the folder of a run that can be trained.

  python -m attnres_jax.interop.import_huggingface \
    --path=DIR --workdir=runs/llama
  python -m attnres_jax.inference.sample --workdir=runs/llama --prompt="Once"
  python -m attnres_jax.main --config=runs/llama/config.py --workdir=runs/tuned

DIR has config.json, safetensors (one file, or several with an index) and
tokenizer.json. Everything is checked before anything is written. With several
devices, every leaf is sharded over them.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import pathlib
import sys
from typing import Any

import jax

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.common import command_line
from attnres_jax.common import files
from attnres_jax.common import sharding
from attnres_jax.data import text_format as text_format_lib
from attnres_jax.interop import config_table
from attnres_jax.interop import huggingface
from attnres_jax.interop import weights_folder

# Copied, so that an export has them, too.
COMPANIONS = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip
_VOCABULARY = "tokenizer.json"
_DEFAULT_LENGTH = 2048


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns its exit status."""
  parser = command_line.Parser(
    "python -m attnres_jax.interop.import_huggingface", __doc__
  )
  add = parser.add_argument
  add("--path", required=True, help="folder of the checkpoint")
  add("--workdir", required=True, help="new folder, as of a run")
  add(
    "--dtype", choices=("float32", "bfloat16"),
    help="of activations; bfloat16 if the files are, else float32",
  )  # fmt: skip
  add(
    "--parameter_dtype", choices=("float32", "bfloat16"), default="float32",
    help="of matrices; bfloat16 halves their memory (model.parameter_dtype)",
  )  # fmt: skip
  add(
    "--tokenizer", default="",
    help="vocabulary file or its folder if it is elsewhere, or `bytes`",
  )  # fmt: skip
  return command_line.run(_import, parser.parse_args(argv))


def _import(options: argparse.Namespace) -> None:
  workdir = weights_folder.check_new("--workdir", options.workdir)
  folder = pathlib.Path(files.check_path("--path", options.path, ()))
  source = huggingface.read(folder)
  dtype = options.dtype
  if dtype is None:
    dtype = "bfloat16" if source.dtype == "BF16" else "float32"
  model_config = dataclasses.replace(
    source.config, dtype=dtype, parameter_dtype=options.parameter_dtype
  )
  source = dataclasses.replace(source, config=model_config)
  companions = {
    name: (folder / name).read_bytes()
    for name in COMPANIONS
    if (folder / name).is_file()
  }
  name, path = _tokenizer(options.tokenizer, folder, companions)
  length = _longest(source.values)
  described: dict[str, Any] = dict(
    tokenizer=name, tokenizer_path=path, sequence_length=length
  )
  described["separator"] = _separator(
    config_lib.DataConfig(**described), folder, model_config
  )
  if path:
    # In place of the checkpoint's, where transformers looks for it.
    companions[_VOCABULARY] = pathlib.Path(path).read_bytes()
    described["tokenizer_path"] = str(workdir.absolute() / _VOCABULARY)
  config = config_lib.RunConfig(
    name=f"{source.family}_{folder.absolute().name}",
    model=model_config,
    data=config_lib.DataConfig(**described),
  )
  devices = len(jax.devices())
  mesh = None
  if devices > 1:
    mesh = sharding.make_mesh(config_lib.MeshConfig(data=1, fsdp=devices))
  model = huggingface.load(source, mesh)
  facts = {
    "format": "huggingface",
    "family": source.family,
    "source": folder.absolute().name,
    "dtype": source.dtype,
    "dtypes": source.dtypes,
    "config": {
      key: source.values[key]
      for key in (*config_table.IDS, *config_table.LENGTHS)
      if key in source.values
    },
  }
  weights_folder.write(workdir, config, model, facts, companions)
  count = sum(leaf.size for leaf in jax.tree.leaves(model))
  print(
    f"{source.family}, {count:,} parameters from {len(source.tensors)} tensors"
    f" ({source.dtype}): {workdir}"
  )


def _longest(values: dict[str, Any]) -> int:
  """Tokens of the longest sequence that a network was trained on."""
  values = values | values.get("text_config", {})
  lengths = [values[name] for name in config_table.LENGTHS if values.get(name)]
  return lengths[0] if lengths else _DEFAULT_LENGTH


def _tokenizer(
  given: str, folder: pathlib.Path, companions: dict[str, bytes]
) -> tuple[str, str]:
  """Name and vocabulary file of the tokenizer."""
  if given == "bytes":
    return "bytes", ""
  if given:
    path = files.check_path("--tokenizer", given, ())
    return "hf", str(path / _VOCABULARY if path.is_dir() else path)
  if _VOCABULARY not in companions:
    config_lib.fail_argument(
      "--path", str(folder), f"a folder with {_VOCABULARY} (or --tokenizer)"
    )
  return "hf", str(folder / _VOCABULARY)


def _separator(
  config: config_lib.DataConfig,
  folder: pathlib.Path,
  model: config_lib.ModelConfig,
) -> str:
  """What ends documents of further training; empty for the usual token.

  Refuses a vocabulary with more tokens than the network.
  """
  # This also checks what the files beside the vocabulary say.
  text_format = text_format_lib.of_checkpoint(config, folder)
  tokenizer: Any = text_format.tokenizer
  ends = text_format.end_ids
  if ends and max(ends) >= model.vocab_size:
    config_lib.fail_argument(
      f"{folder}: eos_token_id", max(ends), f"ids below {model.vocab_size}"
    )
  separator = ""
  if tokenizer.separator_id not in ends:
    # Otherwise the network learns an end at which no answer stops.
    names = (tokenizer.name_of(id) for id in ends if tokenizer.skips(id))
    separator = next(filter(None, names), "")
  config = dataclasses.replace(config, separator=separator)
  size = data.make_tokenizer(config).vocab_size
  if size > model.vocab_size:
    config_lib.fail_argument(
      "--tokenizer",
      config.tokenizer_path or config.tokenizer,
      f"at most the {model.vocab_size} tokens of the network, not {size}",
    )
  return separator


if __name__ == "__main__":
  sys.exit(main())

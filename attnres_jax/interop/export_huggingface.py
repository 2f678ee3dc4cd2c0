# SPDX-License-Identifier: Apache-2.0
r"""Exports a network as a Hugging Face checkpoint.

  python -m attnres_jax.interop.export_huggingface \
    --workdir=runs/tuned --path=DIR

DIR gets safetensors (with an index if there are several), config.json, the
tokenizer and a model card. Networks with plain residuals (`prenorm`) that a
family of `families` describes load in plain transformers. Others, and Full and
Block AttnRes, load with the class in PyTorch that is written beside them.
"""

import argparse
from collections.abc import Mapping, Sequence
import sys
from typing import Any

from attnres_jax import config as config_lib
from attnres_jax.common import command_line
from attnres_jax.common import trees
from attnres_jax.config import fields
from attnres_jax.data import text_format as text_format_lib
from attnres_jax.inference import trained
from attnres_jax.interop import config_table
from attnres_jax.interop import families
from attnres_jax.interop import huggingface
from attnres_jax.interop import tensor_files
from attnres_jax.interop import tokenizer_files
from attnres_jax.interop import weights_folder

_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A network of the `{family}` family with {parameters:,} parameters, exported by
AttnRes-JAX (step {step}).
{origin}
```python
{code}
```
"""
_MODEL = """\
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({loaded})"""
# `pipeline` needs a tokenizer.
_PIPELINE = """\
from transformers import pipeline

write = pipeline("text-generation", model={loaded})
print(write("Once", max_new_tokens=20)[0]["generated_text"])"""


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns its exit status."""
  parser = command_line.Parser(
    "python -m attnres_jax.interop.export_huggingface", __doc__
  )
  add = parser.add_argument
  trained.add_flags(parser)
  add("--path", required=True, help="new folder")
  add(
    "--dtype", choices=tuple(tensor_files.DTYPES),
    help="dtype of weights; the import's, else F32",
  )  # fmt: skip
  add("--family", choices=tuple(families.FAMILIES), help="found by default")
  add(
    "--shard_bytes", type=fields.FileBytes, default=huggingface.SHARD_BYTES,
    help="largest file in bytes, unless a tensor is larger",
  )  # fmt: skip
  return command_line.run(_export, parser.parse_args(argv))


def _export(options: argparse.Namespace) -> None:
  path = weights_folder.check_new("--path", options.path)
  config, model, step = trained.load(options)
  facts, also = weights_folder.origin(options.workdir, config)
  text_format = text_format_lib.of_data(config.data, options.workdir)
  if not text_format.imported:
    # Of a tokenizer of ours, whatever the network began with.
    also = tokenizer_files.of_run(config.data, text_format)
  family = options.family or _family_of(facts, model.config)
  dtype = options.dtype or facts.get("dtype", "F32")
  dtypes = {} if options.dtype else facts.get("dtypes", {})
  lengths = {"max_position_embeddings": config.data.sequence_length}
  for name in config_table.LENGTHS:
    if (length := facts.get("config", {}).get(name)) is not None:
      lengths[name] = max(length, config.data.sequence_length)
  described = lengths | text_format.describe()
  template = _PIPELINE if "tokenizer_config.json" in also else _MODEL
  trusted = ", trust_remote_code=True" if families.FAMILIES[family].code else ""
  origin = facts.get("source")
  card = _CARD.format(
    name=config.name, family=family, step=step,
    origin=f"It began with the weights of `{origin}`.\n" if origin else "",
    parameters=sum(a.size for a in trees.to_flat(model).values()),
    code=template.format(loaded=f'"{path.name}"{trusted}'),
  )  # fmt: skip
  huggingface.export(
    model, path, dtype=dtype, facts=described, card=card, dtypes=dtypes,
    also=also, family=family, shard_bytes=options.shard_bytes,
  )  # fmt: skip
  print(f"{family}, step {step}: {path}")


def _family_of(facts: Mapping[str, Any], config: config_lib.ModelConfig) -> str:
  """The family that a network came from, or the first that fits.

  An upcycled network no longer belongs to that family.
  """
  if "upcycled_from" in facts or not facts.get("family"):
    return families.of_network(config)
  name = f"{weights_folder.FACTS}: family"
  config_lib.choose(name, facts["family"], families.FAMILIES)
  return facts["family"]


if __name__ == "__main__":
  sys.exit(main())

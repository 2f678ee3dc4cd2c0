# SPDX-License-Identifier: Apache-2.0
"""Continues a text with an export of ours, in PyTorch.

  python -m experiments.downstream.run_twin --path=runs/out --prompt="def "

For networks whose tokens are bytes. Needs the extra `torch`.
"""

import argparse
from collections.abc import Sequence
import sys

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax.common import command_line
from attnres_jax.common import files
from attnres_jax.config import fields


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns its exit status."""
  parser = command_line.Parser(
    "python -m experiments.downstream.run_twin", __doc__
  )
  parser.add_argument("--path", required=True, help="folder of the export")
  parser.add_argument(
    "--prompt", type=command_line.text, default="", help="start of a document"
  )
  parser.add_argument("--num_tokens", type=int, default=64)
  return command_line.run(_run, parser.parse_args(argv))


def _run(options: argparse.Namespace) -> None:
  fields.accept("--num_tokens", options.num_tokens, fields.Tokens)
  path = files.check_path("--path", options.path, ())
  import torch
  import transformers

  network = transformers.AutoModelForCausalLM.from_pretrained(
    str(path), trust_remote_code=True
  )
  tokenizer = data.make_tokenizer(config_lib.DataConfig())
  ids = [tokenizer.separator_id, *tokenizer.encode(options.prompt).tolist()]
  text = network.generate(
    torch.tensor([ids]), max_new_tokens=options.num_tokens, do_sample=False
  )
  print(tokenizer.decode(text[0, 1:].tolist()))


if __name__ == "__main__":
  sys.exit(main())

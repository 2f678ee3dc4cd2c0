# SPDX-License-Identifier: Apache-2.0
"""Writes a small random Llama of transformers, for texts as bytes.

  python -m experiments.downstream.random_llama --out=runs/random

Needs the extra `torch`.
"""

import argparse
from collections.abc import Sequence
import pathlib
import sys

from attnres_jax import config as config_lib
from attnres_jax.common import command_line
from attnres_jax.common import files


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns its exit status."""
  parser = command_line.Parser(
    "python -m experiments.downstream.random_llama", __doc__
  )
  parser.add_argument("--out", required=True, help="new folder")
  parser.add_argument("--width", type=int, default=64)
  parser.add_argument("--layers", type=int, default=4)
  return command_line.run(_write, parser.parse_args(argv))


def _write(options: argparse.Namespace) -> None:
  out = pathlib.Path(files.check_folder("--out", options.out))
  if out.exists() and any(out.iterdir()):
    config_lib.fail_argument("--out", options.out, "a new or empty folder")
  import torch
  import transformers

  torch.manual_seed(0)
  network = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
      vocab_size=config_lib.BYTE_VOCAB_SIZE,
      hidden_size=options.width,
      intermediate_size=3 * options.width,
      num_hidden_layers=options.layers,
      num_attention_heads=4,
      num_key_value_heads=2,
      max_position_embeddings=256,
      bos_token_id=config_lib.BYTE_VOCAB_SIZE - 1,
      eos_token_id=config_lib.BYTE_VOCAB_SIZE - 1,
    )
  )
  network.save_pretrained(out)
  print(f"{sum(p.numel() for p in network.parameters()):,} parameters: {out}")


if __name__ == "__main__":
  sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Samples text from a trained run.

  python -m attnres_jax.inference.sample --workdir=runs/tiny --prompt="def "

prints each token of the text when it is drawn. docs/inference.md continues many
texts from Python.

A text may be longer than the sequences that the network was trained on; stderr
then says so. Recurrent mixers and attention without positions continue in any
case; rotary positions are often used badly where training had none.
"""

import argparse
from collections.abc import Sequence
import sys

from attnres_jax.common import command_line
from attnres_jax.common import text_table
from attnres_jax.config import fields
from attnres_jax.inference import settings as settings_lib
from attnres_jax.inference import trained


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns its exit status."""
  return command_line.run(_sample_run, _parser().parse_args(argv))


def _sample_run(options: argparse.Namespace) -> None:
  settings = command_line.of_fields(settings_lib.Settings, options)
  fields.accept("--num_tokens", options.num_tokens, fields.Tokens)
  config, model, _ = trained.load(options)
  from attnres_jax.data import text_format as text_format_lib
  from attnres_jax.inference import engine as engine_lib
  from attnres_jax.inference import text

  text_format = text_format_lib.of_data(config.data, options.workdir)
  request = text.request(
    text_format, options.prompt, options.num_tokens, settings,
    past_end=options.past_end,
  )  # fmt: skip
  size = len(request.prompt) + request.num_tokens
  most = config.data.sequence_length
  if size > most:
    print(
      f"note: a text of up to {size} tokens, with its prompt; the network was"
      f" trained on {most}",
      file=sys.stderr,
    )
  out = sys.stdout
  if not out.isatty():
    # A file or another program gets the text unchanged.
    out = text_table.unfiltered(out)
  print(options.prompt, end="", file=out, flush=True)
  engine = engine_lib.Engine(model, slots=1, length=size)
  for piece in text.complete(engine, text_format, [request]):
    print(piece.text, end="", file=out, flush=True)
  print(file=out)


def _parser() -> command_line.Parser:
  parser = command_line.Parser(
    "python -m attnres_jax.inference.sample", __doc__
  )
  add = parser.add_argument
  trained.add_flags(parser)
  free = command_line.text
  add("--prompt", type=free, default="", help="text to continue")
  add(
    "--num_tokens",
    type=fields.Tokens,
    default=256,
    help="how many tokens to add",
  )
  parser.add_fields(settings_lib.Settings, temperature=0.8)
  add(
    "--past_end", action="store_true",
    help="continue after the end of a document",
  )  # fmt: skip
  return parser


if __name__ == "__main__":
  sys.exit(main())

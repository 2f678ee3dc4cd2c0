# SPDX-License-Identifier: Apache-2.0
"""Samples text from a trained run.

  python -m attnres_jax.inference.sample --workdir=runs/tiny --prompt="def "

prints each token of the text when it is drawn. `--prompts=FILE` continues many
prompts, several at a time: a file with one prompt per line, or a .jsonl file
whose lines have a `prompt`. With `--json`, each prompt becomes one line of JSON
when its text is complete.

A text may be longer than the sequences that the network was trained on; stderr
then says so. Recurrent mixers and attention without positions continue in any
case; rotary positions are often used badly where training had none.
"""

import argparse
from collections.abc import Iterator, Sequence
import dataclasses
import functools
import json
import sys
from typing import Any

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax import models
from attnres_jax.common import command_line
from attnres_jax.common import files
from attnres_jax.common import text_table
from attnres_jax.config import fields
from attnres_jax.data import text_format as text_format_lib
from attnres_jax.inference import draw
from attnres_jax.inference import engine as engine_lib
from attnres_jax.inference import text
from attnres_jax.inference import trained

_MAX_PROMPTS = 2**26  # Bytes.


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns its exit status."""
  return command_line.run(_sample_run, _parser().parse_args(argv))


def sample_text(
  model: models.Transformer,
  tokenizer: data.Tokenizer,
  prompt: str,
  *,
  num_tokens: int,
  temperature: float = 0.8,
  seed: int = 0,
) -> str:
  """Continues `prompt` as the start of a document by `num_tokens` tokens.

  Args:
    model: any network.
    tokenizer: of the network.
    prompt: any text.
    num_tokens: how many tokens to draw; the text goes on after the end of a
      document.
    temperature: divides the logits; 0 for the most likely token.
    seed: the same seed draws the same text.

  Raises:
    ConfigError: a number cannot be used, or the network cannot decode.
  """
  settings = draw.Settings(temperature=temperature, seed=seed)
  prompts = [text.Prompt(prompt, num_tokens, settings, past_end=True)]
  text_format = text_format_lib.own(tokenizer)
  engine = _make_engine(model, text_format, prompts, slots=1)
  return "".join(p.text for p in text.complete(engine, text_format, prompts))


def _sample_run(options: argparse.Namespace) -> None:
  prompts = list(_prompts(options))
  trained.check_flags(options)
  fields.accept("--logprobs", options.logprobs, fields.Count)
  config, model = trained.load(options)
  text_format = text_format_lib.of_data(config.data, options.workdir)
  engine = _make_engine(
    model,
    text_format,
    prompts,
    slots=min(options.slots, len(prompts)),
    chunk=options.chunk,
    length=options.length,
    num_top=options.logprobs,
  )
  most = config.data.sequence_length
  if engine.length > most:
    print(
      f"note: texts of up to {engine.length} tokens, with their prompts; the"
      f" network was trained on {most}",
      file=sys.stderr,
    )
  show = _show_json if options.json else _show_text
  show(prompts, text.complete(engine, text_format, prompts), text_format)


def _make_engine(
  model: models.Transformer,
  text_format: text_format_lib.TextFormat,
  prompts: Sequence[text.Prompt],
  *,
  length: int = 0,
  **options: Any,
) -> engine_lib.Engine:
  """An engine with room for the longest of the prompts, unless told."""
  if not length:
    length = max(
      len(p.request(text_format).prompt) + p.num_tokens for p in prompts
    )
  return engine_lib.Engine(model, length=length, **options)


def _prompts(options: argparse.Namespace) -> Iterator[text.Prompt]:
  """The prompts of the flags or of a file.

  Raises:
    ConfigError: both are given, or a line cannot be used.
  """
  settings = draw.Settings(
    **{
      field.name: getattr(options, field.name)
      for field in dataclasses.fields(draw.Settings)
    }
  )
  make = functools.partial(
    text.Prompt,
    num_tokens=options.num_tokens,
    settings=settings,
    stop=tuple(options.stop),
    past_end=options.past_end,
    parse_special=options.parse_special,
  )
  if options.prompts is None:
    yield make(options.prompt)
    return
  if options.prompt:
    config_lib.fail_argument(
      "--prompt", options.prompt, "nothing beside --prompts"
    )
  path = files.check_path("--prompts", options.prompts, ("gs", "s3"))
  if files.is_remote(path):
    content = files.read(path)
  else:
    with path.open("rb") as file:  # Of a pipe, nobody knows the size.
      content = file.read(_MAX_PROMPTS + 1)
  if len(content) > _MAX_PROMPTS:
    config_lib.fail_argument(
      "--prompts", options.prompts, f"a file of at most {_MAX_PROMPTS} bytes"
    )
  try:
    lines = content.decode().splitlines()
  except UnicodeDecodeError:
    config_lib.fail_argument("--prompts", options.prompts, "a file of UTF-8")
  if not lines:
    config_lib.fail_argument("--prompts", options.prompts, "a line per prompt")
  is_json = path.suffix == ".jsonl"
  for stream, line in enumerate(lines):
    # Texts share the seed of the flags, and differ in their streams.
    try:
      yield make(_of_line(line) if is_json else line, stream=stream)
    except config_lib.ConfigError as error:
      raise config_lib.ConfigError(f"{path}:{stream + 1}: {error}") from error


def _of_line(line: str) -> str:
  try:
    values = json.loads(line)
  except (json.JSONDecodeError, RecursionError):
    values = None
  match values:
    case {"prompt": str(prompt)} if len(values) == 1:
      return prompt
  config_lib.fail_argument("line", line, 'only {"prompt": "def "}')


def _show_text(
  prompts: Sequence[text.Prompt],
  pieces: Iterator[text.Piece],
  text_format: text_format_lib.TextFormat,
) -> None:
  """One text token by token; of several, each when it is complete."""
  del text_format
  out, texts = sys.stdout, [prompt.text for prompt in prompts]
  if not out.isatty():
    # A file or another program gets the text unchanged.
    out = text_table.unfiltered(out)
  if len(prompts) == 1:
    print(texts[0], end="", file=out, flush=True)
    for piece in pieces:
      print(piece.text, end="", file=out, flush=True)
    print(file=out)
    return
  for piece in pieces:
    texts[piece.index] += piece.text
    if piece.finish:
      print(texts[piece.index], end="\n\n", file=out, flush=True)


def _show_json(
  prompts: Sequence[text.Prompt],
  pieces: Iterator[text.Piece],
  text_format: text_format_lib.TextFormat,
) -> None:
  """One line per prompt."""
  found: dict[int, list[text.Piece]] = {}
  for piece in pieces:
    found.setdefault(piece.index, []).append(piece)
    if not piece.finish:
      continue
    parts = found.pop(piece.index)
    tokens = [part.token for part in parts]
    top = [
      [
        dict(id=id, text=text_format.decode([id]), logprob=logprob)
        for id, logprob in token.top
      ]
      for token in tokens
    ]
    line = dict(
      index=piece.index,
      prompt=prompts[piece.index].text,
      text="".join(part.text for part in parts),
      finish=piece.finish,
      ids=[token.id for token in tokens],
      logprobs=[token.logprob for token in tokens],
    ) | (dict(top=top) if any(top) else {})
    print(json.dumps(line), flush=True)


def _parser() -> command_line.Parser:
  parser = command_line.Parser(
    "python -m attnres_jax.inference.sample", __doc__
  )
  add = parser.add_argument
  trained.add_flags(parser, length="0 for what the prompts need")
  free = command_line.text
  add("--prompt", type=free, default="", help="text to continue")
  add("--prompts", metavar="FILE", help="many texts, one per line, or .jsonl")
  add("--json", action="store_true", help="print a line of JSON per prompt")
  add("--num_tokens", type=int, default=256, help="how many tokens to add")
  parser.add_fields(draw.Settings, temperature=0.8)
  add(
    "--stop", type=free, action="append", default=[],
    help="end before this text; may be repeated",
  )  # fmt: skip
  add(
    "--past_end", action="store_true",
    help="continue after the end of a document",
  )  # fmt: skip
  add(
    "--parse_special", action="store_true",
    help="read special tokens written in a prompt, such as <|im_end|>, as these"
    " tokens (default: as text)",
  )  # fmt: skip
  add(
    "--logprobs", type=int, default=0,
    help="with --json, how many likely tokens to list at each place",
  )  # fmt: skip
  return parser


if __name__ == "__main__":
  sys.exit(main())

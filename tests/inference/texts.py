# SPDX-License-Identifier: Apache-2.0
"""Tokens of an engine, and texts of the network in a folder."""

from attnres_jax.data import text_format as text_format_lib
from attnres_jax.inference import draw
from attnres_jax.inference import engine as engine_lib
from attnres_jax.inference import text
from attnres_jax.train import checkpoint


def run(engine, requests):
  """Yields every token; `Token.request` counts the requests from 0."""
  waiting, numbers = list(enumerate(requests)), {}
  while waiting or engine.busy:
    while waiting and engine.num_free:
      i, request = waiting.pop(0)
      numbers[engine.submit(request)] = i
    for token in engine.step():
      yield token._replace(request=numbers[token.request])


def drawn(workdir, prompts, num_tokens):
  """Ids, most likely text, and why it ended, in the order of the prompts."""
  config, model = checkpoint.load_model(workdir)
  text_format = text_format_lib.of_data(config.data, workdir)
  settings = draw.Settings(temperature=0.0)
  requests = [
    (text.request(text_format, prompt, num_tokens, settings), ())
    for prompt in prompts
  ]
  length = max(len(request.prompt) for request, _ in requests) + num_tokens
  engine = engine_lib.Engine(model, length=length)
  answers = [([], [], None) for _ in prompts]
  for piece in text.complete(engine, text_format, requests):
    ids, texts, _ = answers[piece.index]
    answers[piece.index] = (
      [*ids, piece.token.id],
      [*texts, piece.text],
      (piece.finish),
    )
  return [(ids, "".join(texts), finish) for ids, texts, finish in answers]

# SPDX-License-Identifier: Apache-2.0
"""Tokens of an engine, and texts of the network in a folder."""


def run(engine, requests):
  """Yields every token; `Token.request` counts the requests from 0."""
  waiting, numbers = list(enumerate(requests)), {}
  while waiting or engine.busy:
    while waiting and engine.num_free:
      i, request = waiting.pop(0)
      numbers[engine.submit(request)] = i
    for token in engine.step():
      yield token._replace(request=numbers[token.request])

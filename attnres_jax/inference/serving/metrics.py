# SPDX-License-Identifier: Apache-2.0
"""What a server counts and times, in the text form of Prometheus."""

from collections.abc import Callable

import prometheus_client as prometheus

_SECONDS = tuple(
  base * 10.0**power for power in range(-3, 2) for base in (1, 2, 5)
) + (100.0,)


class Metrics:
  """Counters and histograms of one server; safe in any thread.

  Attributes:
    requests: answered, by path and status; 499 if the client has left.
    prompt_tokens: of prompts, as they are complete.
    completion_tokens: drawn.
    prefix_hits: prompts that began like an earlier one.
    prefix_tokens: their tokens that were not computed again.
    wait_seconds: until a text gets a slot.
    first_token_seconds: from a request to the first token of each text.
    token_seconds: between two tokens of a text.
  """

  def __init__(self):
    self._registry = prometheus.CollectorRegistry()
    self.requests = prometheus.Counter(
      "attnres_requests",
      "Answered requests; status 499: the client has left.",
      ["path", "status"],
      registry=self._registry,
    )
    self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
    self.completion_tokens = self._counter(
      "completion_tokens", "Tokens that were drawn."
    )
    self.prefix_hits = self._counter(
      "prefix_hits", "Prompts that began like an earlier one."
    )
    self.prefix_tokens = self._counter(
      "prefix_tokens", "Tokens of prompts that were not computed again."
    )
    self.wait_seconds = self._histogram(
      "wait_seconds", "Until a text gets a slot."
    )
    self.first_token_seconds = self._histogram(
      "first_token_seconds", "From a request to the first token of a text."
    )
    self.token_seconds = self._histogram(
      "token_seconds", "Between two tokens of a text."
    )

  def gauge(self, name: str, words: str, read: Callable[[], float]) -> None:
    """Adds a number that is read when metrics are asked for."""
    gauge = prometheus.Gauge(f"attnres_{name}", words, registry=self._registry)
    gauge.set_function(read)

  def text(self) -> bytes:
    return prometheus.generate_latest(self._registry)

  def _counter(self, name: str, words: str) -> prometheus.Counter:
    return prometheus.Counter(f"attnres_{name}", words, registry=self._registry)

  def _histogram(self, name: str, words: str) -> prometheus.Histogram:
    return prometheus.Histogram(
      f"attnres_{name}", words, buckets=_SECONDS, registry=self._registry
    )


CONTENT_TYPE = prometheus.CONTENT_TYPE_LATEST

# SPDX-License-Identifier: Apache-2.0
"""What a server counts and times, in the text form of Prometheus."""

import prometheus_client as prometheus

_SECONDS = tuple(
  base * 10.0**power for power in range(-3, 2) for base in (1, 2, 5)
) + (100.0,)


class Metrics:
  """Counters, gauges and histograms of one server; safe in any thread."""

  def __init__(self):
    self.registry = prometheus.CollectorRegistry()

    def make(kind, name, words, *labels, **options):
      return kind(
        f"attnres_{name}", words, labels, registry=self.registry, **options
      )

    def counter(name, words, *labels):
      return make(prometheus.Counter, name, words, *labels)

    def seconds(name, words):
      return make(prometheus.Histogram, name, words, buckets=_SECONDS)

    self.requests = counter(
      "requests",
      "Answered requests; status 499: the client has left.",
      "path",
      "status",
    )
    self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
    self.completion_tokens = counter(
      "completion_tokens", "Tokens that were drawn."
    )
    self.wait_seconds = seconds("wait_seconds", "Until a text gets a slot.")
    self.first_token_seconds = seconds(
      "first_token_seconds", "From a request to the first token of a text."
    )
    self.token_seconds = seconds("token_seconds", "Between tokens of a text.")
    self.slots = make(prometheus.Gauge, "slots", "Texts at the same time.")
    self.slots_in_use = make(
      prometheus.Gauge, "slots_in_use", "Texts in slots."
    )
    self.queue_length = make(
      prometheus.Gauge, "queue_length", "Texts that wait for a slot."
    )

  def text(self) -> bytes:
    return prometheus.generate_latest(self.registry)


CONTENT_TYPE = prometheus.CONTENT_TYPE_LATEST

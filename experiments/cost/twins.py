# SPDX-License-Identifier: Apache-2.0
"""The same networks in PyTorch: steps and decoding, ours beside theirs.

Needs the extra `torch`. A random network is exported and loaded again: a
residual scheme as the class in PyTorch that an export comes with, which runs
eagerly, and a Llama as transformers has it, with `generate`. Both libraries
compute the same in float32 (checked), and run in turn in one process with all
cores that it may use.
"""

from collections.abc import Callable, Iterator
import dataclasses
import importlib.metadata
import math
import os
import pathlib
import tempfile
import time
from typing import Any
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.inference import draw
from attnres_jax.inference import engine as engine_lib
from attnres_jax.interop import huggingface
from experiments import measure as measure_lib
from experiments.cost import networks

# Tokens after the first one.
STEPS = 48
# Relative; both compute in float32.
_TOLERANCE = 1e-3

# What a call computed, and its times by program.
Found = tuple[Any, dict[str, measure_lib.Seconds]]
Call = Callable[[], Found]


def step(
  network: networks.Network, arm: str, rounds: int
) -> Iterator[dict[str, Any]]:
  """Rows of a loss and its gradient, which have to be the same."""
  # Bytes without the separator, as exports of a config without one have them.
  network = network._replace(
    model=dataclasses.replace(network.model, vocab_size=256)
  )
  model = networks.build(network, arm)
  rng = np.random.default_rng(0)
  shape = network.batch, network.tokens
  tokens = rng.integers(0, network.model.vocab_size, shape, dtype=np.int32)
  calls = _our_step(model, tokens), _their_step(model, tokens)
  yield from _rows(*calls, arm, rounds)


def decode(
  network: networks.Network, arm: str, rounds: int
) -> Iterator[dict[str, Any]]:
  """Rows of the first token after a prompt, and of each token after it."""
  model = networks.build(network, arm)
  rng = np.random.default_rng(0)
  shape = network.batch, network.tokens
  prompts = rng.integers(0, network.model.vocab_size, shape)
  calls = _our_decode(model, prompts), _their_decode(model, prompts)
  yield from _rows(*calls, arm, rounds)


def _rows(
  ours: Call, theirs: Call, arm: str, rounds: int
) -> Iterator[dict[str, Any]]:
  """Both libraries in turn; a ratio is ours over theirs of a round."""
  calls, other = {arm: ours, f"{arm} in torch": theirs}, f"{arm} in torch"
  times: dict[str, dict[str, list[measure_lib.Seconds]]] = {}
  for index in range(rounds + 1):
    results = {}
    for name in list(calls)[:: 1 if index % 2 else -1]:
      results[name], found = calls[name]()
      for program, seconds in found.items() if index else ():
        own = times.setdefault(program, {})
        own.setdefault(name, []).append(seconds)
    if not np.allclose(*results.values(), rtol=_TOLERANCE):
      raise config_lib.RunError(f"{arm}: the libraries differ: {results}")
  version = importlib.metadata.version("torch")
  for program, found in times.items():
    for name, own in found.items():
      ratios = measure_lib.ratios(own, found[other], 6)
      yield (
        {"program": program, "arm": name, "baseline": other}
        | ratios
        | {"torch": version}
      )


def _our_step(model: models.Transformer, tokens: np.ndarray) -> Call:
  def loss(model):
    log_p_BTV = jax.nn.log_softmax(model(tokens)[:, :-1])
    return -jnp.mean(
      jnp.take_along_axis(log_p_BTV, tokens[:, 1:, None], axis=-1)
    )

  def gradient(model):
    value, gradient = jax.value_and_grad(loss)(model)
    squares = jax.tree.map(lambda x: jnp.sum(jnp.square(x)), gradient)
    return value, jnp.sqrt(sum(jax.tree.leaves(squares))), gradient

  # The gradients are outputs, so that they have to be made.
  compiled = jax.jit(gradient).lower(model).compile()

  def call() -> Found:
    found: list[Any] = []
    seconds = measure_lib.timed(lambda: found.append(
      jax.block_until_ready(compiled(model))
    ))  # fmt: skip
    return [float(x) for x in found[0][:2]], {"gradient": seconds}

  return call


def _their_step(model: models.Transformer, tokens: np.ndarray) -> Call:
  import torch

  twin = _loaded(model, "attnres", trust_remote_code=True)
  ids = torch.tensor(tokens).long()

  def compute() -> list[float]:
    twin.zero_grad()
    loss = twin(ids, labels=ids, use_cache=False).loss
    loss.backward()
    # The query of the first read has no gradient: it has one source.
    gradients = [p.grad for p in twin.parameters() if p.grad is not None]
    length = math.sqrt(sum(float(x.square().sum()) for x in gradients))
    return [float(loss.detach()), length]

  def call() -> Found:
    found: list[Any] = []
    seconds = measure_lib.timed(lambda: found.append(compute()))
    return found[0], {"gradient": seconds}

  return call


def _our_decode(model: models.Transformer, prompts: np.ndarray) -> Call:
  batch, length = prompts.shape
  # The first request draws while the prompts of others are computed, and in the
  # step of its own prompt.
  more = STEPS + batch + 1
  engine = engine_lib.Engine(
    model, slots=batch, length=length + more, chunk=length
  )
  greedy = draw.Settings(temperature=0.0)

  def call() -> Found:
    ids: dict[int, list[int]] = {}

    def step() -> None:
      for token in engine.step():
        ids[token.request].append(token.id)

    def prefill() -> None:
      for prompt in prompts:
        request = engine_lib.Request(prompt.tolist(), more, greedy)
        ids[engine.submit(request)] = []
      while not all(ids.values()):
        step()

    first = measure_lib.timed(prefill)
    rest = measure_lib.timed(lambda: [step() for _ in range(STEPS)] and None)
    for number in ids:
      engine.cancel(number)
    drawn = np.array([own[:STEPS] for own in ids.values()])
    return drawn, {"prefill": first, "decode": _each(rest)}

  return call


def _their_decode(model: models.Transformer, prompts: np.ndarray) -> Call:
  import torch
  import transformers

  twin = _loaded(model).eval()

  class Clock(transformers.generation.streamers.BaseStreamer):
    """When each token came; the prompt comes first."""

    def __init__(self) -> None:
      self.times: list[tuple[float, float]] = []

    def put(self, value: Any) -> None:
      del value
      self.times.append((time.perf_counter(), time.process_time()))

    def end(self) -> None:
      pass

  def call() -> Found:
    ids, clock = torch.from_numpy(prompts), Clock()
    clock.put(None)
    with torch.inference_mode():
      out = twin.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False,
        max_new_tokens=STEPS + 1, min_new_tokens=STEPS + 1, pad_token_id=0,
        streamer=clock,
      )  # fmt: skip
    start, first, last = clock.times[0], clock.times[2], clock.times[-1]
    between = lambda a, b: measure_lib.Seconds(b[0] - a[0], b[1] - a[1])
    new = out[:, prompts.shape[1] :][:, :STEPS].numpy()
    return new, {
      "prefill": between(start, first), "decode": _each(between(first, last)),
    }  # fmt: skip

  return call


def _each(total: measure_lib.Seconds) -> measure_lib.Seconds:
  """Of one step."""
  return measure_lib.Seconds(total.wall / STEPS, total.cpu / STEPS)


def _loaded(model: models.Transformer, family: str = "", **options: Any) -> Any:
  """The network in PyTorch, with as many threads as there are cores."""
  import torch
  import transformers

  torch.set_num_threads(len(os.sched_getaffinity(0)))
  named: dict[str, Any] = {"family": family} if family else {}
  with tempfile.TemporaryDirectory() as folder:
    export = pathlib.Path(folder) / "export"
    huggingface.export(model, export, dtype="F32", facts={}, card="", **named)
    os.environ["HF_MODULES_CACHE"] = f"{folder}/code"
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      return transformers.AutoModelForCausalLM.from_pretrained(
        export, dtype="float32", **options
      )

# SPDX-License-Identifier: Apache-2.0
"""Generates text for many requests at once.

  engine = Engine(model, slots=8, length=2048)
  engine.submit(Request(prompt_ids, num_tokens=100))
  while engine.busy:
    for token in engine.step():
      ...

The state has a fixed number of slots, each for one request: its cache, its last
token and its settings. A step of the engine computes one chunk of prompts that
are not complete, and one token for all others. Shapes are static: chunks are
padded to one of a few lengths (buckets), and caches are read up to one of a few
lengths; each pair is compiled once. The state is donated, so caches exist once.

What a request gets does not depend on the others. docs/inference.md follows a
request through all this.
"""

from collections.abc import Sequence
import dataclasses
import functools
import itertools
from typing import Literal, NamedTuple

import jax
from jax.sharding import Mesh
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.common import sharding
from attnres_jax.config import fields
from attnres_jax.inference import draw as draw_lib
from attnres_jax.inference import prepared
from attnres_jax.inference import programs

# The shortest chunk, and the shortest part of a cache that is read.
_LEAST_CHUNK, _LEAST_CONTEXT = 16, 128

Finish = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class Request:
  """What to generate.

  Attributes:
    prompt: ids, at least one.
    num_tokens: how many tokens to draw, unless one of `stop_ids` is drawn.
    settings: how to draw them.
    stop_ids: tokens that end the text.
    stream: number of the text, of all texts with this seed. Two
      streams share no random numbers.
  """

  prompt: Sequence[int]
  num_tokens: int
  settings: draw_lib.Settings = draw_lib.Settings()
  stop_ids: frozenset[int] = frozenset()
  stream: int = 0


class Token(NamedTuple):
  """A token that was drawn for a request, by what `Engine.submit` returned.

  Its log-probability is by the network, whatever the settings. `finish` says
  why it is the last token of the request.
  """

  request: int
  id: int
  logprob: float
  finish: Finish | None


@dataclasses.dataclass
class _Live:
  """A request in a slot."""

  number: int
  request: Request
  slot: int
  cached: int = 0  # Tokens in the cache.
  drawn: int = 0

  @property
  def in_prompt(self) -> bool:
    return not self.drawn


class Engine:
  """A network with `slots` for requests of at most `length` tokens."""

  def __init__(
    self,
    model: models.Transformer,
    *,
    slots: int = 8,
    length: int = 2048,
    chunk: int = 256,
    mesh: Mesh | None = None,
  ):
    """Places the network and an empty state on the devices.

    Args:
      model: any network.
      slots: how many requests run at once.
      length: most tokens of a request.
      chunk: most tokens of a prompt that are computed at once.
      mesh: of `sharding.make_mesh`; slots are sharded over its rows.

    Raises:
      ConfigError: a mixer cannot decode, or a number cannot be used.
    """
    for name, value in dict(slots=slots, length=length, chunk=chunk).items():
      fields.accept(name, value, fields.Size)
    # Rows of a chunk: a mesh computes one prompt per shard of rows.
    self._rows = 1 if mesh is None else sharding.num_row_shards(mesh)
    self._tensor = 1 if mesh is None else mesh.shape[sharding.TENSOR]
    if slots % self._rows:
      config_lib.fail_argument(
        "slots", slots, f"a multiple of the mesh's {self._rows} shards of rows"
      )
    self.slots, self.length = slots, length
    self.chunk = min(chunk, length)
    self._mesh = mesh
    separate = prepared.platform_of(mesh) in prepared.SEPARATE_ON
    prepare = functools.partial(prepared.prepared, separate=separate)
    # A program for hundreds of slices. It would copy what needs no cast.
    self._model = (jax.jit(prepare) if separate else prepare)(model)
    if mesh is not None:
      shardings = sharding.state_sharding(self._model, mesh)
      self._model = jax.device_put(self._model, shardings)

    def empty(model: models.Transformer) -> programs.State:
      state = programs.empty_state(model, slots, length, separate)
      return programs.keep_sharded(model, state, mesh)

    self._state = jax.jit(empty)(self._model)
    if mesh is None:
      # Programs are compiled again for arrays that may be moved.
      both = self._model, self._state
      self._model, self._state = jax.device_put(both, jax.local_devices()[0])
    if prepared.reads_products(prepared.platform_of(mesh)):
      self._model = jax.device_put(self._model, prepared.formats(self._model))
    self._numbers = itertools.count()
    self._live: dict[int, _Live] = {}  # By slot.

  @property
  def busy(self) -> bool:
    """Whether a request runs."""
    return bool(self._live)

  @property
  def num_free(self) -> int:
    """How many further requests can be submitted."""
    return self.slots - len(self._live)

  def submit(self, request: Request) -> int:
    """Gives a free slot to a request; returns its number.

    Raises:
      ConfigError: it is empty, longer than `length`, or has ids that are not
        in the vocabulary.
      ValueError: no slot is free.
    """
    self._check(request)
    if not self.num_free:
      raise ValueError("no slot is free")
    slot = next(slot for slot in range(self.slots) if slot not in self._live)
    number = next(self._numbers)
    self._live[slot] = _Live(number, request, slot)
    dtypes = dict(top_k=np.int32, seed=np.uint32)
    settings = {
      name: dtypes.get(name, np.float32)(value)
      for name, value in dataclasses.asdict(request.settings).items()
    } | {"stream": np.uint32(request.stream)}
    (self._state,) = programs.start(
      self._model,
      self._state,
      np.int32(slot),
      settings,
      mesh=self._mesh,
    )
    return number

  def _check(self, request: Request) -> None:
    fields.accept("--num_tokens", request.num_tokens, fields.Tokens)
    size, room = len(request.prompt), self.length - request.num_tokens
    if room < 1:
      config_lib.fail_argument(
        "--num_tokens",
        request.num_tokens,
        f"at most {self.length - 1}: the engine has room for {self.length}",
      )
    if not 1 <= size <= room:
      config_lib.fail_argument(
        "prompt",
        f"{size} tokens",
        f"1 to {room}, since {request.num_tokens} are to be drawn and the"
        f" engine has room for {self.length}",
      )
    vocab_size = self._model.config.vocab_size
    for i in request.prompt:
      if not 0 <= i < vocab_size:
        config_lib.fail_argument("prompt", i, f"ids below {vocab_size}")

  def cancel(self, number: int) -> None:
    """Ends a request, which gets no more tokens. Others are ignored."""
    self._live = {
      slot: live for slot, live in self._live.items() if live.number != number
    }

  def step(self) -> list[Token]:
    """Computes a chunk of prompts, and a token of all other requests.

    Returns the drawn tokens, at most one for each request and part.
    """
    return [*self._prefill(), *self._generate()]

  def _prefill(self) -> list[Token]:
    """A chunk of the prompts that are not complete."""
    some = [live for live in self._live.values() if live.in_prompt]
    some = some[: self._rows]
    if not some:
      return []
    parts = [
      live.request.prompt[live.cached : live.cached + self.chunk]
      for live in some
    ]
    least = min(_LEAST_CHUNK, self.chunk)
    size = _bucket(max(map(len, parts)), least, self.chunk, 4)
    size += -size % self._tensor  # Devices share the tokens of a chunk.
    tokens_PT = np.zeros((self._rows, size), np.int32)
    # Rows without a prompt have no slot either.
    slot_P = np.full(self._rows, self.slots, np.int32)
    length_P = np.zeros(self._rows, np.int32)
    last_P = np.zeros(self._rows, bool)
    for row, (live, part) in enumerate(zip(some, parts)):
      tokens_PT[row, : len(part)] = part
      slot_P[row], length_P[row] = live.slot, len(part)
      last_P[row] = live.cached + len(part) == len(live.request.prompt)
    self._state, drawn = programs.extend(
      self._model,
      self._state,
      tokens_PT,
      slot_P,
      length_P,
      last_P,
      context=self._context(max(live.cached for live in some), 4),
      mesh=self._mesh,
    )
    for live, part in zip(some, parts):
      live.cached += len(part)
    done = [(row, live) for row, live in enumerate(some) if last_P[row]]
    return self._report(drawn, done)

  def _generate(self) -> list[Token]:
    """One token of the requests whose prompts are complete."""
    some = [live for live in self._live.values() if not live.in_prompt]
    if not some:
      return []
    active_B = np.zeros(self.slots, bool)
    active_B[[live.slot for live in some]] = True
    self._state, drawn = programs.next_token(
      self._model,
      self._state,
      active_B,
      context=self._context(max(live.cached for live in some), 2),
      mesh=self._mesh,
    )
    for live in some:
      live.cached += 1
    return self._report(drawn, [(live.slot, live) for live in some])

  def _report(
    self, on_device: draw_lib.Drawn, rows: list[tuple[int, _Live]]
  ) -> list[Token]:
    """The drawn tokens; frees the slots of requests that are complete."""
    if not rows:
      return []
    drawn = jax.device_get(on_device)
    tokens = []
    for row, live in rows:
      live.drawn += 1
      token, finish = int(drawn.token_B[row]), None
      if token in live.request.stop_ids:
        finish = "stop"
      elif live.drawn == live.request.num_tokens:
        finish = "length"
      if finish:
        del self._live[live.slot]
      logprob = float(drawn.logprob_B[row])
      tokens.append(Token(live.number, token, logprob, finish))
    return tokens

  def _context(self, cached: int, factor: int) -> int:
    """How much of the caches is read for so many tokens."""
    if not cached:
      return 0
    return _bucket(cached, _LEAST_CONTEXT, self.length, factor)


def _bucket(size: int, least: int, most: int, factor: int) -> int:
  """`least` times the smallest power of `factor` with room for `size`."""
  bucket = least
  while bucket < size:
    bucket *= factor
  return min(bucket, most)

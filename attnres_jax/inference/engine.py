# SPDX-License-Identifier: Apache-2.0
"""Generates text for many requests at once.

  engine = Engine(model, slots=8, length=2048)
  engine.submit(Request(prompt_ids, num_tokens=100))
  while engine.busy:
    for token in engine.step():
      ...

The state has a fixed number of slots, each for one request: its cache, its last
token and its settings. A step of the engine admits waiting requests to free
slots, computes one chunk of prompts that are not complete, and one token for
all others. Shapes are static: chunks are padded to one of a few lengths
(buckets), and caches are read up to one of a few lengths; each pair is compiled
once. The state is donated, so caches exist once.

What a request gets does not depend on the others. docs/inference.md follows a
request through all this.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import itertools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax import sharding
from attnres_jax.config import fields
from attnres_jax.inference import draw as draw_lib
from attnres_jax.inference import layouts
from attnres_jax.inference import prefix
from attnres_jax.inference import scores as scores_lib
from attnres_jax.models import adapters
from attnres_jax.models import rounded
from attnres_jax.models import stack
from attnres_jax.models.mixers import cache as cache_lib

# The shortest chunk, and the shortest part of a cache that is read.
_LEAST_CHUNK, _LEAST_CONTEXT = 16, 128

Finish = Literal["stop", "length"]

# Name -> whether layers are in arrays of their own; None: on some platforms.
LAYERS = {"auto": None, "stacked": False, "separate": True}
_SEPARATE_ON = ("cpu",)

# Name -> the network with its weights in another form.
WEIGHTS: dict[str, Callable[[models.Transformer], models.Transformer]] = {
  "model": lambda model: model,
  "int8": rounded.round_weights,
}


@dataclasses.dataclass(frozen=True)
class Request:
  """What to generate.

  Attributes:
    prompt: ids, at least one.
    num_tokens: how many tokens to draw, unless one of `stop_ids` is drawn.
    settings: how to draw them.
    stop_ids: tokens that end the text.
    with_scores: whether the tokens of the prompt are scored. This computes all
      of the prompt, even if other prompts began alike.
  """

  prompt: Sequence[int]
  num_tokens: int
  settings: draw_lib.Settings = draw_lib.Settings()
  stop_ids: frozenset[int] = frozenset()
  with_scores: bool = False


class OfPrompt(NamedTuple):
  """What is known of a prompt once it is complete.

  Attributes:
    reused: how many of its tokens were known from other prompts.
    scores: of its tokens but the first, if they are wanted.
  """

  reused: int
  scores: tuple[scores_lib.Score, ...]


class Token(NamedTuple):
  """A token that was drawn.

  Attributes:
    request: what `Engine.submit` returned.
    id: of the token.
    logprob: its log-probability by the network, whatever the settings.
    top: the most likely ids and their log-probabilities.
    finish: why this is the last token of the request, or None.
    reads: of the tapped sublayers at the position before it, [taps, D].
    prompt: given with the first token of a request.
  """

  request: int
  id: int
  logprob: float
  top: scores_lib.Top
  finish: Finish | None
  reads: np.ndarray | None = None
  prompt: OfPrompt | None = None


class State(NamedTuple):
  """What is on the device.

  Attributes:
    cache: of all slots.
    token_B: the last token of each slot, which is not in the cache yet.
    rows: settings of each slot.
  """

  cache: cache_lib.Cache
  token_B: jax.Array
  rows: draw_lib.Rows


@dataclasses.dataclass
class _Live:
  """A request in a slot."""

  number: int
  request: Request
  slot: int
  cached: int = 0  # Tokens in the cache.
  reused: int = 0
  scores: list[scores_lib.Score] = dataclasses.field(default_factory=list)
  drawn: int = 0

  @property
  def in_prompt(self) -> bool:
    return not self.drawn


class Engine:
  """A network with slots for requests.

  Attributes:
    slots: how many requests run at once.
    length: most tokens of a request, with its prompt.
    chunk: most tokens of a prompt that are computed at once.
    num_top: how many of the most likely tokens every `Token` lists.
    prefixes: what prompts have in common, or None.
  """

  def __init__(
    self,
    model: models.Transformer,
    *,
    slots: int = 8,
    length: int = 2048,
    chunk: int = 256,
    num_top: int = 0,
    taps: Sequence[int] = (),
    prefix_bytes: int = 0,
    mesh: Mesh | None = None,
    weights: str = "model",
    cache: str = "model",
    layers: str = "auto",
  ):
    """Places the network and an empty state on the devices.

    Args:
      model: any network.
      slots: how many requests run at once.
      length: most tokens of a request.
      chunk: most tokens of a prompt that are computed at once.
      num_top: how many of the most likely tokens every `Token` lists.
      taps: sublayers, counted from 0, whose reads every `Token` has, before
        their norms; the number of sublayers for what the head reads. A draft
        network would read these.
      prefix_bytes: most memory for what prompts have in common; 0 to compute
        every prompt from its start.
      mesh: of `sharding.make_mesh`; slots are sharded over its rows.
      weights: `model` for those of the model, in the dtype of its products;
        `int8` for a scale per output channel (`models.rounded`).
      cache: of keys, values and latents: `model` for the dtype of the model,
        `bfloat16`, or `int8` with a scale per token and head. A chunk of a
        prompt attends to its own tokens before they are rounded, so then
        `chunk` has an effect on results.
      layers: `separate` for weights and caches of each layer in arrays of its
        own, `stacked` for one array per kind of layer; `auto` for the faster
        one on this platform. A CPU copies a layer out of a stack to read it,
        and outside of one scan over all layers, the whole stack to change it.

    Raises:
      ConfigError: a mixer cannot decode, or a number cannot be used.
    """
    for name, value, kind in (
      ("slots", slots, fields.Size),
      ("length", length, fields.Size),
      ("chunk", chunk, fields.Size),
      ("num_top", num_top, fields.Count),
      ("prefix_bytes", prefix_bytes, fields.Count),
    ):
      fields.accept(name, value, kind)
    # Rows of a chunk: a mesh computes one prompt per shard of rows.
    self._rows = 1 if mesh is None else sharding.num_row_shards(mesh)
    self._tensor = 1 if mesh is None else mesh.shape[sharding.TENSOR]
    if slots % self._rows:
      config_lib.fail_argument(
        "slots", slots, f"a multiple of the mesh's {self._rows} shards of rows"
      )
    self.slots, self.length = slots, length
    self.chunk, self.num_top = min(chunk, length), num_top
    num_sublayers = model.config.num_sublayers
    for l in taps:
      if not 0 <= l <= num_sublayers:
        config_lib.fail_argument("taps", l, f"0 to {num_sublayers}")
    self._static = dict(num_top=num_top, taps=tuple(taps), mesh=mesh)
    self._mesh = mesh
    separate = _separates(layers, _platform(mesh))
    prepare = functools.partial(prepared, weights=weights, separate=separate)
    shardings = None
    if mesh is not None:
      abstract = jax.eval_shape(prepare, model)
      shardings = sharding.state_sharding(abstract, mesh)
    self._model = jax.jit(prepare, out_shardings=shardings)(model)

    def empty(model: models.Transformer) -> State:
      state = _empty_state(model, slots, length, cache, separate)
      return _keep_sharded(model, state, mesh)

    self._state = jax.jit(empty)(self._model)
    if mesh is None:
      # Programs are compiled again for arrays that may be moved.
      both = self._model, self._state
      self._model, self._state = jax.device_put(both, jax.local_devices()[0])
    if layouts.reads_products(_platform(mesh)):
      self._model = jax.device_put(self._model, layouts.formats(self._model))
    self.prefixes = None
    if prefix_bytes:
      recurrent = cache_lib.is_recurrent(self._state.cache.states)
      self.prefixes = prefix.Trie(self.chunk, recurrent, prefix_bytes)
    self._numbers = itertools.count()
    self._waiting: collections.deque[tuple[int, Request]] = collections.deque()
    self._live: dict[int, _Live] = {}  # By slot.

  @property
  def busy(self) -> bool:
    """Whether a request waits or runs."""
    return bool(self._waiting or self._live)

  @property
  def num_free(self) -> int:
    """How many further requests would get a slot in the next step."""
    return max(self.slots - len(self._live) - len(self._waiting), 0)

  @property
  def model(self) -> models.Transformer:
    """The network, with matrices in the dtype of its products."""
    return self._model

  def submit(self, request: Request) -> int:
    """Lets a request wait for a slot; returns its number.

    Raises:
      ConfigError: see `check`.
    """
    self.check(request)
    number = next(self._numbers)
    self._waiting.append((number, request))
    return number

  def check(self, request: Request) -> None:
    """Refuses what `submit` would refuse; safe in any thread.

    Raises:
      ConfigError: it is empty, or longer than `length`.
    """
    fields.accept("--num_tokens", request.num_tokens, fields.Tokens)
    size, room = len(request.prompt), self.length - request.num_tokens
    if not 1 <= size <= room:
      config_lib.fail_argument(
        "prompt",
        f"{size} tokens",
        f"1 to {room}, since {request.num_tokens} are to be drawn and the"
        f" engine has room for {self.length}",
      )
    vocab_size = self._model.config.vocab_size
    wrong = [i for i in request.prompt if not 0 <= i < vocab_size]
    if wrong:
      config_lib.fail_argument("prompt", wrong[0], f"ids below {vocab_size}")

  def cancel(self, number: int) -> None:
    """Ends a request, which gets no more tokens. Others are ignored."""
    self._waiting = collections.deque(
      waiting for waiting in self._waiting if waiting[0] != number
    )
    self._live = {
      slot: live for slot, live in self._live.items() if live.number != number
    }

  def run(self, requests: Sequence[Request]) -> Iterator[Token]:
    """Yields the tokens of requests, as they are drawn.

    `Token.request` counts the requests from 0.
    """
    numbers = {self.submit(r): i for i, r in enumerate(requests)}
    while self.busy:
      for token in self.step():
        if token.request in numbers:
          yield token._replace(request=numbers[token.request])

  def step(self) -> list[Token]:
    """Admits requests, computes a chunk of prompts and a token of the others.

    Returns:
      The tokens that were drawn, at most one for each request and part.
    """
    self._admit()
    return [*self._prefill(), *self._generate()]

  def _admit(self) -> None:
    free = (slot for slot in range(self.slots) if slot not in self._live)
    for slot, _ in zip(free, range(len(self._waiting))):
      live = _Live(*self._waiting.popleft(), slot)
      self._live[slot] = live
      nodes = []
      if self.prefixes and not live.request.with_scores:
        nodes = self.prefixes.find(live.request.prompt)
      live.cached = live.reused = len(nodes) * self.chunk
      seen_V = np.zeros(self._model.config.vocab_size, bool)
      seen_V[np.asarray(live.request.prompt)] = True
      (self._state,) = _start(
        self._model,
        self._state,
        np.int32(slot),
        np.int32(live.cached),
        _as_arrays(live.request.settings),
        seen_V,
        mesh=self._mesh,
      )
      for i, node in enumerate(nodes):
        state = node.state if i == len(nodes) - 1 else None
        (self._state,) = _restore(
          self._model,
          self._state,
          node.tokens,
          state,
          np.int32(slot),
          np.int32(i * self.chunk),
          mesh=self._mesh,
        )

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
    size = _bucket(max(map(len, parts)), least, self.chunk)
    size += -size % self._tensor  # Devices share the tokens of a chunk.
    tokens_PT, next_PT = np.zeros((2, self._rows, size), np.int32)
    # Rows without a prompt have no slot either.
    slot_P = np.full(self._rows, self.slots, np.int32)
    length_P = np.zeros(self._rows, np.int32)
    last_P = np.zeros(self._rows, bool)
    for row, (live, part) in enumerate(zip(some, parts)):
      tokens_PT[row, : len(part)] = part
      later = live.request.prompt[live.cached + 1 :][: len(part)]
      next_PT[row, : len(later)] = later
      slot_P[row], length_P[row] = live.slot, len(part)
      last_P[row] = live.cached + len(part) == len(live.request.prompt)
    self._state, scored, *drawn = _extend(
      self._model,
      self._state,
      tokens_PT,
      next_PT,
      slot_P,
      length_P,
      last_P,
      context=self._context(max(live.cached for live in some)),
      with_scores=any(live.request.with_scores for live in some),
      **self._static,
    )
    scored = jax.device_get(scored)
    for row, (live, part) in enumerate(zip(some, parts)):
      if live.request.with_scores:
        count = len(part) - int(last_P[row])
        live.scores += scores_lib.to_list(scored, row, count)
      live.cached += len(part)
      self._remember(live)
    done = [(row, live) for row, live in enumerate(some) if last_P[row]]
    return self._report(drawn, done)

  def _generate(self) -> list[Token]:
    """One token of the requests whose prompts are complete."""
    some = [live for live in self._live.values() if not live.in_prompt]
    if not some:
      return []
    active_B = np.zeros(self.slots, bool)
    active_B[[live.slot for live in some]] = True
    self._state, *drawn = _next(
      self._model,
      self._state,
      active_B,
      context=self._context(max(live.cached for live in some)),
      **self._static,
    )
    for live in some:
      live.cached += 1
    return self._report(drawn, [(live.slot, live) for live in some])

  def _report(
    self, on_device: Sequence[Any], rows: list[tuple[int, _Live]]
  ) -> list[Token]:
    """The drawn tokens; frees the slots of requests that are complete."""
    if not rows:
      return []
    drawn, reads_BLD = jax.device_get(on_device)
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
      top = zip(drawn.top_BK[row].tolist(), drawn.top_logprob_BK[row].tolist())
      prompt = None
      if live.drawn == 1:
        prompt = OfPrompt(live.reused, tuple(live.scores))
      tokens.append(
        Token(
          live.number,
          token,
          float(drawn.logprob_B[row]),
          tuple(top),
          finish,
          None if reads_BLD is None else reads_BLD[row],
          prompt,
        )
      )
    return tokens

  def _remember(self, live: _Live) -> None:
    """Saves the chunk that ends here, if it is a whole one."""
    if self.prefixes is None or live.cached % self.chunk:
      return
    ids = live.request.prompt[: live.cached]
    if not self.prefixes.knows(ids):
      slot, start = np.int32(live.slot), np.int32(live.cached - self.chunk)
      saved = _save(self._state.cache.states, slot, start, size=self.chunk)
      self.prefixes.add(ids, *saved)

  def _context(self, cached: int) -> int:
    """How much of the caches is read for so many tokens."""
    if not cached:
      return 0
    return _bucket(cached, _LEAST_CONTEXT, self.length)


def _bucket(size: int, least: int, most: int) -> int:
  """The next power of two, within the limits."""
  return min(max(least, 1 << (size - 1).bit_length()), most)


def _as_arrays(settings: draw_lib.Settings) -> dict[str, Any]:
  dtypes = dict(top_k=np.int32, seed=np.uint32)
  return {
    name: dtypes.get(name, np.float32)(value)
    for name, value in dataclasses.asdict(settings).items()
  }


def trace_next(
  model: models.Transformer,
  mesh: Mesh,
  slots: int,
  length: int,
  *,
  weights: str = "model",
  cache: str = "model",
) -> Any:
  """The traced program of the next token of all slots, whose caches are full.

  Args:
    model: with abstract arrays.
    mesh: of any devices.
    slots: as in `Engine`.
    length: as in `Engine`.
    weights: as in `Engine`.
    cache: as in `Engine`.
  """
  model, state = _abstract(model, mesh, slots, length, weights, cache)
  active_B = jax.ShapeDtypeStruct((slots,), bool)
  return _next.trace(
    model, state, active_B, context=length, num_top=0, taps=(), mesh=mesh
  )


def trace_extend(
  model: models.Transformer, mesh: Mesh, tokens: int, cached: int, length: int
) -> Any:
  """The traced program of a chunk of a prompt, for each shard of rows.

  Args:
    model: with abstract arrays.
    mesh: of any devices.
    tokens: of the chunk.
    cached: tokens of the prompt before it.
    length: as in `Engine`.
  """
  rows = sharding.num_row_shards(mesh)
  model, state = _abstract(model, mesh, rows, length)
  int_P = jax.ShapeDtypeStruct((rows,), jnp.int32)
  bool_P = jax.ShapeDtypeStruct((rows,), bool)
  tokens_PT = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
  return _extend.trace(
    model, state, tokens_PT, tokens_PT, int_P, int_P, bool_P,
    context=cached, num_top=0, taps=(), with_scores=False, mesh=mesh,
  )  # fmt: skip


def _abstract(
  model: models.Transformer,
  mesh: Mesh,
  slots: int,
  length: int,
  weights: str = "model",
  cache: str = "model",
) -> tuple[models.Transformer, State]:
  """The shapes of an engine's network and state, with their shardings."""
  model = abstract_prepared(model, mesh, weights)
  state = jax.eval_shape(
    lambda model: _empty_state(model, slots, length, cache), model
  )
  state = sharding.with_sharding(state, _state_sharding(model, state, mesh))
  return model, state


def _platform(mesh: Mesh | None) -> str:
  devices = jax.local_devices() if mesh is None else mesh.devices.flat
  return devices[0].platform


def abstract_prepared(
  model: models.Transformer, mesh: Mesh, weights: str = "model"
) -> models.Transformer:
  """`prepared`, of abstract arrays, as a mesh shards it."""
  model = jax.eval_shape(functools.partial(prepared, weights=weights), model)
  model = sharding.with_sharding(model, sharding.state_sharding(model, mesh))
  if layouts.reads_products(_platform(mesh)):
    model = sharding.with_sharding(model, layouts.formats(model))
  return model


def prepared(
  model: models.Transformer, weights: str = "model", separate: bool = False
) -> models.Transformer:
  """The same network, as an engine keeps it.

  Weights of products are in the dtype to which these cast them anyway.

  Args:
    model: of training.
    weights: as in `Engine`.
    separate: whether each layer gets arrays of its own.

  Raises:
    ConfigError: there are no such `weights`.
  """

  def cast(parameter: sharding.Parameter) -> jax.Array:
    value = parameter.value
    if parameter.wide or not parameter.is_matrix:
      return value
    return value.astype(model.config.dtype)

  model = adapters.merged(model)
  model = config_lib.choose("weights", weights, WEIGHTS)(model)
  model = sharding.map_parameters(cast, model)
  if separate:
    model.sublayers = stack.separated(model.sublayers)
  return model


def _separates(layers: str, platform: str) -> bool:
  chosen = config_lib.choose("layers", layers, LAYERS)
  return platform in _SEPARATE_ON if chosen is None else chosen


def _empty_state(
  model: models.Transformer,
  slots: int,
  length: int,
  cache: str,
  separate: bool = False,
) -> State:
  empty = cache_lib.kept_as(model.init_cache(slots, length), cache)
  if separate:
    empty = cache_lib.separated(empty)
  return State(
    empty,
    jnp.zeros(slots, jnp.int32),
    draw_lib.Rows.empty(slots, model.config.vocab_size),
  )


def _state_sharding(model: models.Transformer, state: State, mesh: Mesh) -> Any:
  """Caches are sharded over rows and heads, the rest is replicated."""
  rest = jax.tree.map(lambda _: sharding.replicated(mesh), state)

  def like(spec: PartitionSpec, node: Any) -> Any:
    # A rounded array has two, cut alike.
    return jax.tree.map(lambda _: NamedSharding(mesh, spec), node)

  is_spec = lambda node: isinstance(node, PartitionSpec)
  specs = cache_lib.like_layers(model.cache_specs(), state.cache)
  cache = jax.tree.map(like, specs, state.cache, is_leaf=is_spec)
  return rest._replace(cache=cache)


def _on(function: Any) -> Any:
  """Compiles a step: the state is donated, and stays sharded as it is."""

  def run(model, state, *args, mesh, **static):
    ambient = (
      contextlib.nullcontext() if mesh is None else sharding.ambient(mesh)
    )
    with ambient:
      state, *rest = function(model, state, *args, **static)
    if mesh is not None:
      # Every process reads what was drawn.
      whole = sharding.replicated(mesh)
      rest = jax.lax.with_sharding_constraint(rest, whole)
    return _keep_sharded(model, state, mesh), *rest

  run.__name__ = function.__name__
  return jax.jit(
    run,
    donate_argnames="state",
    static_argnames=("context", "num_top", "taps", "mesh", "with_scores"),
  )


@_on
def _start(model, state, slot, cached, settings, seen_V):
  """A slot for another request, of which so many tokens will be restored."""
  del model
  states = cache_lib.map_both(
    lambda a: a, lambda a: a.at[:, slot].set(0), state.cache.states
  )
  cache = cache_lib.Cache(state.cache.length_B.at[slot].set(cached), states)
  seen_BV = state.rows.seen_BV.at[slot].set(seen_V)
  rows = {
    name: getattr(state.rows, name).at[slot].set(value)
    for name, value in settings.items()
  }
  return (State(cache, state.token_B, draw_lib.Rows(**rows, seen_BV=seen_BV)),)


@_on
def _extend(
  model,
  state,
  tokens_PT,
  next_PT,
  slot_P,
  length_P,
  last_P,
  *,
  context,
  num_top,
  taps,
  with_scores,
):
  """A chunk of the prompts of P slots; the first token of those that end."""
  out = model.extend(
    tokens_PT,
    cache_lib.take_rows(state.cache, slot_P, context),
    length_P,
    with_reads=bool(taps),
  )
  last_P11 = jnp.maximum(length_P - 1, 0)[:, None, None]
  h_P1D = jnp.take_along_axis(out.hidden_BTD, last_P11, axis=1)
  logits_PV = model.embedding.decode(h_P1D)[:, 0]
  rows = jax.tree.map(lambda a: a.at[slot_P].get(mode="clip"), state.rows)
  position_P = out.added.chunk.start_B + length_P
  drawn = draw_lib.draw(logits_PV, rows, position_P, num_top)
  # Prompts that do not end here have no place for a token.
  ended_P = jnp.where(last_P, slot_P, state.token_B.size)
  return (
    State(
      cache_lib.append(state.cache, out.added, slot_P),
      state.token_B.at[ended_P].set(drawn.token_B, mode="drop"),
      _seen(state.rows, ended_P, drawn.token_B),
    ),
    scores_lib.score(model, out.hidden_BTD, next_PT, num_top)
    if with_scores
    else None,
    drawn,
    _tapped(out.reads_LBTD, taps, last_P11),
  )


@_on
def _next(model, state, active_B, *, context, num_top, taps):
  """The next token of every active slot."""
  out = model.extend(
    state.token_B[:, None],
    state.cache,
    active_B.astype(jnp.int32),
    context=context,
    with_reads=bool(taps),
  )
  logits_BV = model.embedding.decode(out.hidden_BTD)[:, 0]
  position_B = out.added.chunk.start_B + 1
  drawn = draw_lib.draw(logits_BV, state.rows, position_B, num_top)
  slots = active_B.size
  slot_B = jnp.where(active_B, jnp.arange(slots), slots)
  return (
    State(
      cache_lib.append(state.cache, out.added),
      jnp.where(active_B, drawn.token_B, state.token_B),
      _seen(state.rows, slot_B, drawn.token_B),
    ),
    drawn,
    _tapped(out.reads_LBTD, taps, jnp.zeros((slots, 1, 1), jnp.int32)),
  )


@_on
def _restore(model, state, tokens, recurrent, slot, start):
  """Saved entries of tokens, and a saved state unless it is None."""
  del model

  def put(old, saved):
    return jax.lax.dynamic_update_slice(old, saved, (0, slot, 0, start, 0))

  def replace(old, saved):
    return jax.lax.dynamic_update_slice_in_dim(old, saved, slot, axis=1)

  keep = lambda old, _: old
  states = cache_lib.map_both(put, keep, state.cache.states, tokens)
  if recurrent is not None:
    states = cache_lib.map_both(keep, replace, states, recurrent)
  return (state._replace(cache=state.cache._replace(states=states)),)


@functools.partial(jax.jit, static_argnames="size")
def _save(states, slot, start, *, size):
  """Entries of some tokens of a slot, and its recurrent state."""

  def cut(a):
    sizes = a.shape[0], 1, a.shape[2], size, a.shape[4]
    return jax.lax.dynamic_slice(a, (0, slot, 0, start, 0), sizes)

  def row(a):
    return jax.lax.dynamic_slice_in_dim(a, slot, 1, axis=1)

  none = lambda _: None
  return (
    cache_lib.map_both(cut, none, states),
    cache_lib.map_both(none, row, states),
  )


def _tapped(reads_LBTD, taps, position_B11):
  """The reads of some sublayers, at one position of each row: [B, taps, D]."""
  if reads_LBTD is None:
    return None
  some_LBTD = jnp.stack([reads_LBTD[l] for l in taps])
  tapped_LB1D = jnp.take_along_axis(some_LBTD, position_B11[None], axis=2)
  return jnp.swapaxes(tapped_LB1D[:, :, 0], 0, 1)


def _seen(rows, slot_B, token_B):
  seen_BV = rows.seen_BV.at[slot_B, token_B].set(True, mode="drop")
  return rows._replace(seen_BV=seen_BV)


def _keep_sharded(model, state, mesh):
  """Constrains a state, so that it is the same from step to step."""
  if mesh is None:
    return state
  return jax.lax.with_sharding_constraint(
    state, _state_sharding(model, state, mesh)
  )

# SPDX-License-Identifier: Apache-2.0
"""The routes of the server."""

import asyncio
from collections.abc import AsyncIterator, Callable
import contextlib
import dataclasses
import functools
import hmac
import importlib.resources
import time
from typing import Any

from starlette import applications
from starlette import exceptions
from starlette import middleware
from starlette import requests
from starlette import responses
from starlette import routing
from starlette import types
from starlette.middleware import trustedhost

from attnres_jax import config as config_lib
from attnres_jax.analysis import figures
from attnres_jax.config import fields
from attnres_jax.data import text_format as text_format_lib
from attnres_jax.inference import engine as engine_lib
from attnres_jax.inference.serving import api
from attnres_jax.inference.serving import depth as depth_lib
from attnres_jax.inference.serving import post
from attnres_jax.inference.serving import replies
from attnres_jax.inference.serving import service as service_lib
from attnres_jax.train import watch

# What answers without the key.
_OPEN_PATHS = "/", "/health"


@dataclasses.dataclass(frozen=True)
class Limits(fields.Checked, root="--"):
  """The sizes of the engine, and what requests may cost.

  Attributes:
    slots: texts at the same time.
    length: most tokens of a text with its prompt; 0 for the length of training.
    chunk: tokens of a prompt that are computed at once.
    queue: texts that may wait for a slot; more get HTTP 429.
    wait_seconds: longest wait for a slot; then HTTP 503.
    request_seconds: longest time for an answer; then HTTP 504.
    body_kib: maximum request size in KiB; larger requests get HTTP 413.
    max_logprobs: maximum number of likely tokens that a request may ask for.
    connections: maximum number of open connections; more get HTTP 503.
    idle_seconds: until a connection without a complete request header is
      closed.
    grace_seconds: for running answers to end after SIGTERM or SIGINT.
  """

  slots: fields.Size = 8
  length: fields.Count = 0
  chunk: fields.Size = 256
  queue: fields.Threads = 64
  wait_seconds: fields.Positive = 60.0
  request_seconds: fields.Positive = 600.0
  body_kib: fields.Size = 1024
  max_logprobs: fields.Count = 5
  connections: fields.Size = 512
  idle_seconds: fields.Positive = 20.0
  grace_seconds: fields.Size = 10


class App:
  """One network, its engine, and what is served of it.

  Attributes:
    service: which has the engine.
    asgi: the application.
  """

  def __init__(
    self,
    engine: engine_lib.Engine,
    config: config_lib.RunConfig,
    name: str,
    *,
    text_format: text_format_lib.TextFormat | None = None,
    limits: Limits = Limits(),
    hosts: tuple[str, ...] = ("*",),
    api_key: str = "",
    on_failure: Callable[[], None] = lambda: None,
  ):
    """Prepares everything; the engine starts with the application.

    Args:
      engine: which nothing else may use.
      config: of the run.
      name: model name shown to clients.
      text_format: of the run; made from `config` if None.
      limits: what requests may cost.
      hosts: by which names clients may call this server, "*" for any.
      api_key: what clients have to send as bearer token; "" for nothing.
      on_failure: called if the engine fails.
    """
    self._config, self._name, self._limits = config, name, limits
    self._length, self._num_top = engine.length, engine.num_top
    self._format = text_format or text_format_lib.of_data(config.data)
    self._label = functools.lru_cache(2**20)(self._format.label)
    self._created = int(time.time())
    self._depth = depth_lib.DepthWeights(engine.model, engine.length)
    self.service = service_lib.Service(
      engine, self._format, limits.queue, on_failure
    )
    routes = applications.Starlette(
      routes=[
        routing.Route("/", _page),
        routing.Route("/health", self._health),
        routing.Route("/v1/models", self._models),
        routing.Route("/v1/models/{name:path}", self._model),
        self._post("/v1/completions", self._complete),
        self._post("/depth_weights", self._depth_weights),
      ],
      middleware=[
        middleware.Middleware(
          trustedhost.TrustedHostMiddleware, allowed_hosts=list(hosts)
        )
      ],
      exception_handlers={exceptions.HTTPException: _no_route},
      lifespan=self._lifespan,
    )
    self.asgi = _guarded(routes, api_key.encode())

  def _post(self, path: str, answer: Any) -> routing.Route:
    endpoint = post.Post(
      path,
      answer,
      body_bytes=self._limits.body_kib * 1024,
      seconds=self._limits.request_seconds,
    )
    return routing.Route(path, endpoint, methods=["POST"])

  @contextlib.asynccontextmanager
  async def _lifespan(self, _: applications.Starlette) -> AsyncIterator[None]:
    # A body makes many objects; a collection would visit all others, too.
    with watch.collector_frozen():
      self.service.start()
      try:
        yield
      finally:  # After a second Ctrl-C, this task is cancelled.
        self.service.stop()
        self._depth.stop()

  async def _complete(self, body: bytes, reply: post.Reply) -> None:
    asked = api.Completion.parse(body)
    self._check_model(asked.model)
    if (asked.logprobs or 0) > self._num_top:
      raise api.refuse("logprobs", asked.logprobs, f"0 to {self._num_top}")
    most = self.service.most_of_one
    if asked.n > most:
      raise api.refuse("n", asked.n, f"1 to {most}")
    prompts = await self._prompts(
      asked.prompt, most // asked.n, asked.parse_special
    )
    answer = replies.Answer(asked, prompts, self._label, self._name)
    job = self.service.submit(
      asked.requests(prompts, self._format.end_ids), asked.stops
    )
    try:
      parts = []
      async for piece in job.pieces(self._limits.wait_seconds):
        part = answer.part(piece)
        if not asked.stream:
          parts.append(part)
        elif not answer.is_silent(part):
          await reply.event(answer.chunk(part))
      if not asked.stream:
        await reply.json(answer.whole(parts))
        return
      if asked.with_usage:
        await reply.event(answer.chunk(None))
      await reply.end()
    finally:
      self.service.leave(job)

  async def _depth_weights(self, body: bytes, reply: post.Reply) -> None:
    asked = api.Depth.parse(body)
    self._check_model(asked.model)
    (ids,) = await self._prompts(asked.prompt, 1)
    await reply.json(await self._depth.of(ids))

  async def _prompts(
    self, given: Any, most: int, parse_special: bool = False
  ) -> list[list[int]]:
    """The prompts of a field, encoded in a thread: long texts take long."""
    alone = isinstance(given, str) or isinstance(given[0], int)
    several = [given] if alone else given
    if len(several) > most:
      raise api.refuse(
        "prompt",
        f"{len(several)} texts",
        f"at most {most}, by the slots and queue of this server",
      )

    def encode() -> list[list[int]]:
      return [
        one
        if isinstance(one, list)
        else self._format.prompt(one, parse_special)
        for one in several
      ]

    return await asyncio.to_thread(encode)

  def _check_model(self, name: str | None) -> None:
    if name is not None and name != self._name:
      raise self._no_model(name)

  def _no_model(self, name: str) -> api.ApiError:
    return api.ApiError(
      404,
      f"model: got {name[:100]!r}, expected {self._name!r}, which this server"
      " has",
      param="model",
      code="model_not_found",
    )

  async def _health(self, _: requests.Request) -> responses.Response:
    failed = self.service.failure is not None
    return responses.JSONResponse(
      dict(status="failed" if failed else "ok"), 503 if failed else 200
    )

  async def _models(self, _: requests.Request) -> responses.Response:
    return responses.JSONResponse(
      dict(object="list", data=[self._description()])
    )

  async def _model(self, request: requests.Request) -> responses.Response:
    name = request.path_params["name"]
    if name == self._name:
      return responses.JSONResponse(self._description())
    return responses.JSONResponse(self._no_model(name).as_json(), 404)

  def _description(self) -> dict[str, Any]:
    model = self._config.model
    return dict(
      id=self._name,
      object="model",
      created=self._created,
      owned_by="attnres-jax",
      # Beyond the API, for the page.
      max_model_len=self._length,
      max_logprobs=self._num_top,
      residual=figures.name_of(model.residual.name),
      num_layers=model.num_layers,
      width=model.width,
    )


async def _page(_: requests.Request) -> responses.Response:
  folder = importlib.resources.files("attnres_jax.inference.serving")
  page = (folder / "page.html").read_text(encoding="utf-8")
  return responses.HTMLResponse(page)


async def _no_route(
  request: requests.Request, error: Exception
) -> responses.Response:
  """404 and 405 in the form of the API."""
  assert isinstance(error, exceptions.HTTPException)
  wrong = api.ApiError(
    error.status_code,
    f"{request.method} {request.url.path}: {error.detail}",
    code="unknown_url",
  )
  return responses.JSONResponse(
    wrong.as_json(), error.status_code, headers=error.headers
  )


def _guarded(app: types.ASGIApp, key: bytes) -> types.ASGIApp:
  """The same application, which asks for a key unless that is empty."""

  def lacks_key(scope: types.Scope) -> bool:
    if not key or scope["type"] != "http" or scope["path"] in _OPEN_PATHS:
      return False
    given = dict(scope["headers"]).get(b"authorization", b"")
    kind, _, sent = given.partition(b" ")
    right = hmac.compare_digest(sent.strip(), key)
    return not (right and kind.lower() == b"bearer")

  async def guarded(
    scope: types.Scope, receive: types.Receive, send: types.Send
  ) -> None:
    if not lacks_key(scope):
      await app(scope, receive, send)
      return
    error = api.ApiError(
      401,
      "Authorization: expected 'Bearer' with the key of this server",
      code="invalid_api_key",
    )
    headers = {"www-authenticate": "Bearer"}
    response = responses.JSONResponse(error.as_json(), 401, headers)
    await response(scope, receive, send)

  return guarded

# SPDX-License-Identifier: Apache-2.0
"""The routes of the server."""

from collections.abc import AsyncIterator, Callable
import contextlib
import dataclasses
import importlib.resources
import time
from typing import Any

from starlette import applications
from starlette import exceptions
from starlette import middleware
from starlette import requests
from starlette import responses
from starlette import routing
from starlette.middleware import trustedhost

from attnres_jax import config as config_lib
from attnres_jax import data
from attnres_jax import figures
from attnres_jax.config import fields
from attnres_jax.inference import engine as engine_lib
from attnres_jax.inference.serving import asked as asked_lib
from attnres_jax.inference.serving import depth as depth_lib
from attnres_jax.inference.serving import errors
from attnres_jax.inference.serving import metrics as metrics_lib
from attnres_jax.inference.serving import post
from attnres_jax.inference.serving import replies
from attnres_jax.inference.serving import service as service_lib


@dataclasses.dataclass(frozen=True)
class Limits(fields.Checked, root="--"):
  """What requests may cost.

  Attributes:
    queue: texts that may wait for a slot; further ones get status 429.
    wait_seconds: the most that a request waits for a slot; then status 503.
    request_seconds: the most that an answer takes; then status 504.
    body_kib: the most that a body has; beyond it status 413.
  """

  queue: fields.Count = 64
  wait_seconds: fields.Positive = 60.0
  request_seconds: fields.Positive = 600.0
  body_kib: fields.Size = 1024


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
    limits: Limits = Limits(),
    hosts: tuple[str, ...] = ("*",),
    on_failure: Callable[[], None] = lambda: None,
  ):
    """Prepares everything; the engine starts with the application.

    Args:
      engine: which nothing else may use.
      config: of the run.
      name: of the network, as clients call it.
      limits: what requests may cost.
      hosts: by which names clients may call this server, "*" for any.
      on_failure: called if the engine fails.
    """
    self._config, self._name, self._limits = config, name, limits
    self._length, self._num_top = engine.length, engine.num_top
    self._tokenizer = data.make_tokenizer(config.data)
    self._reader = asked_lib.Reader(name, self._tokenizer, engine.num_top)
    self._metrics = metrics_lib.Metrics()
    self._created = int(time.time())
    self._depth = depth_lib.DepthWeights(engine.model, engine.length)
    self.service = service_lib.Service(
      engine, self._tokenizer, self._metrics, limits.queue, on_failure
    )
    self.asgi = applications.Starlette(
      routes=[
        routing.Route("/", _page),
        routing.Route("/health", self._health),
        routing.Route("/metrics", self._show_metrics),
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

  def _post(self, path: str, answer: Any) -> routing.Route:
    endpoint = post.Post(
      path,
      answer,
      self._metrics,
      body_bytes=self._limits.body_kib * 1024,
      seconds=self._limits.request_seconds,
    )
    return routing.Route(path, endpoint, methods=["POST"])

  @contextlib.asynccontextmanager
  async def _lifespan(self, _: applications.Starlette) -> AsyncIterator[None]:
    self.service.start()
    yield
    self.service.stop()
    self._depth.stop()

  async def _complete(self, body: dict[str, Any], reply: post.Reply) -> None:
    asked = self._reader.completion(body)
    answer = replies.Completion(asked, self._tokenizer, self._name)
    job = self.service.submit(asked.requests(), asked.stop)
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

  async def _depth_weights(
    self, body: dict[str, Any], reply: post.Reply
  ) -> None:
    self._reader.check_names(body, ("model", "prompt"))
    self._reader.check_model(body)
    prompts = self._reader.prompts(body)
    if len(prompts) > 1:
      raise errors.refuse("prompt", f"{len(prompts)} texts", "one of them")
    await reply.json(await self._depth.of(prompts[0].ids))

  async def _health(self, _: requests.Request) -> responses.Response:
    failed = self.service.failure is not None
    return responses.JSONResponse(
      dict(status="failed" if failed else "ok"), 503 if failed else 200
    )

  async def _show_metrics(self, _: requests.Request) -> responses.Response:
    return responses.Response(
      self._metrics.text(), media_type=metrics_lib.CONTENT_TYPE
    )

  async def _models(self, _: requests.Request) -> responses.Response:
    return responses.JSONResponse(
      dict(object="list", data=[self._description()])
    )

  async def _model(self, request: requests.Request) -> responses.Response:
    name = request.path_params["name"]
    if name == self._name:
      return responses.JSONResponse(self._description())
    error = errors.ApiError(
      404,
      f"model: got {name!r}, expected {self._name!r}, which this server has",
      param="model",
      code="model_not_found",
    )
    return responses.JSONResponse(error.as_json(), error.status)

  def _description(self) -> dict[str, Any]:
    model = self._config.model
    return dict(
      id=self._name,
      object="model",
      created=self._created,
      owned_by="attnres-jax",
      # Beyond the API, for the page.
      max_model_len=self._length,
      trained_length=self._config.data.sequence_length,
      max_logprobs=self._num_top,
      residual=figures.name_of(model.residual.name),
      num_layers=model.num_layers,
      width=model.width,
      depth_weights=self._depth.available,
    )


async def _page(_: requests.Request) -> responses.Response:
  page = (
    importlib.resources.files("attnres_jax.inference.serving") / "page.html"
  )
  return responses.HTMLResponse(page.read_text(encoding="utf-8"))


async def _no_route(
  request: requests.Request, error: Exception
) -> responses.Response:
  """404 and 405 in the form of the API."""
  assert isinstance(error, exceptions.HTTPException)
  wrong = errors.ApiError(
    error.status_code,
    f"{request.method} {request.url.path}: {error.detail}",
    code="unknown_url",
  )
  return responses.JSONResponse(
    wrong.as_json(), error.status_code, headers=error.headers
  )

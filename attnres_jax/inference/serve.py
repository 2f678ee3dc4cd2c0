# SPDX-License-Identifier: Apache-2.0
"""Serves a trained run over HTTP, by the completions API of OpenAI.

  python -m attnres_jax.inference.serve --workdir=runs/tiny

and http://127.0.0.1:8000 is a page to try it. Any client of that API works with
http://127.0.0.1:8000/v1 as its base. docs/inference.md has examples; --help
lists the limits. Needs `pip install "attnres-jax[serve]"`.
"""

import argparse
from collections.abc import Iterator, Sequence
import contextlib
import ipaddress
import os
import signal
import socket
import sys
from typing import Any

from attnres_jax import config as config_lib
from attnres_jax.common import command_line
from attnres_jax.common import exits
from attnres_jax.data import text_format as text_format_lib
from attnres_jax.inference import engine as engine_lib
from attnres_jax.inference import trained

try:
  import uvicorn

  from attnres_jax.inference.serving import app as app_lib
  from attnres_jax.inference.serving import connections
  from attnres_jax.inference.serving import service as service_lib
except ImportError as error:
  raise ImportError(
    f"{error.name} is missing; pip install 'attnres-jax[serve]'"
  ) from error

_KEY_VARIABLE = "ATTNRES_API_KEY"
# Names of this machine for itself.
_LOCAL_HOSTS = "localhost", "127.0.0.1", "[::1]", "::1"


def main(argv: Sequence[str] | None = None) -> int:
  """The command; returns its exit status."""
  return command_line.run(_serve, _parser().parse_args(argv))


class _Server(uvicorn.Server):
  """Says where it listens."""

  async def startup(self, sockets: Any = None) -> None:
    await super().startup(sockets)
    for server in self.servers:
      host, port = server.sockets[0].getsockname()[:2]
      host = f"[{host}]" if ":" in host else host
      print(f"serving at http://{host}:{port}", file=sys.stderr, flush=True)


def _serve(options: argparse.Namespace) -> int:
  limits = command_line.of_fields(app_lib.Limits, options)
  key = _api_key(options)
  if not (key or options.without_api_key or _is_local(options.host)):
    config_lib.fail_argument(
      "--host",
      options.host,
      f"--api_key or ${_KEY_VARIABLE} beside it, or --without_api_key: others"
      " can reach this address",
    )
  if not 0 <= options.port < 2**16:
    config_lib.fail_argument("--port", options.port, "0 to 65535")
  # Before anything that takes long.
  with _listen(options.host, options.port) as listener:
    return _serve_at(listener, limits, options)


def _serve_at(
  listener: socket.socket, limits: app_lib.Limits, options: argparse.Namespace
) -> int:
  config, model = trained.load(options)
  text_format = text_format_lib.of_data(config.data, options.workdir)
  vocab_size = model.config.vocab_size
  if limits.max_logprobs > vocab_size:
    config_lib.fail_argument(
      "--max_logprobs", limits.max_logprobs, f"0 to {vocab_size}"
    )
  length = limits.length or config.data.sequence_length
  if length < 2:
    config_lib.fail_argument("--length", length, "at least 2")
  engine = engine_lib.Engine(
    model,
    slots=limits.slots,
    length=length,
    chunk=limits.chunk,
    num_top=limits.max_logprobs,
  )
  del model
  print("compiling", file=sys.stderr, flush=True)
  count = engine.warm_up()
  print(f"compiled {count} programs", file=sys.stderr, flush=True)
  server, service = _make_server(engine, config, text_format, limits, options)
  with _ignored_signals():
    server.run([listener])
  failure = service.failure
  if failure is not None:
    # Such as a device without memory: another start may help.
    words = str(failure).splitlines() or [type(failure).__name__]
    print(f"error: the engine has failed: {words[0]}", file=sys.stderr)
    return exits.Exit.AGAIN
  return 0 if server.started else 1


def _listen(host: str, port: int) -> socket.socket:
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  try:
    return socket.create_server((host, port), family=family)
  except OSError as error:
    reason = error.strerror or error
    config_lib.fail_argument(
      "--host, --port", (host, port), f"an address that is free ({reason})"
    )


def _make_server(
  engine: engine_lib.Engine,
  config: config_lib.RunConfig,
  text_format: text_format_lib.TextFormat,
  limits: app_lib.Limits,
  options: argparse.Namespace,
) -> tuple[_Server, service_lib.Service]:
  def stop():
    server.should_exit = True

  # Otherwise a page of any web site could reach it by a name that it chose.
  local = _is_local(options.host)
  hosts = (*_LOCAL_HOSTS, options.host) if local else ("*",)
  name = options.name or os.path.basename(os.path.abspath(options.workdir))
  app = app_lib.App(
    engine,
    config,
    name,
    text_format=text_format,
    limits=limits,
    hosts=hosts,
    api_key=_api_key(options),
    on_failure=stop,
  )
  server = _Server(
    uvicorn.Config(
      app.asgi,
      http=connections.protocol(limits.connections, limits.idle_seconds),
      # Its own settings would close the handlers of other libraries.
      log_config=None,
      log_level="warning",
      timeout_graceful_shutdown=limits.grace_seconds,
      ws="none",
    )
  )
  return server, app.service


@contextlib.contextmanager
def _ignored_signals() -> Iterator[None]:
  """For uvicorn, which raises a signal again once it has stopped for it."""
  kinds = signal.SIGTERM, signal.SIGINT
  before = [signal.signal(kind, lambda *_: None) for kind in kinds]
  try:
    yield
  finally:
    for kind, handler in zip(kinds, before):
      signal.signal(kind, handler)


def _api_key(options: argparse.Namespace) -> str:
  """The key of --api_key, or of the environment."""
  key = options.api_key or os.environ.get(_KEY_VARIABLE, "")
  if not (key.isascii() and key.isprintable() and " " not in key):
    config_lib.fail_argument(
      "--api_key", "a key", "ASCII letters, digits and signs without spaces"
    )
  return key


def _is_local(host: str) -> bool:
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == "localhost"


def _parser() -> command_line.Parser:
  parser = command_line.Parser("python -m attnres_jax.inference.serve", __doc__)
  add = parser.add_argument
  trained.add_flags(parser)
  add("--host", default="127.0.0.1", help="address to listen at")
  add("--port", type=int, default=8000, help="port to listen at; 0 for any")
  add("--name", help="model name shown to clients (default: the folder's name)")
  add(
    "--api_key", default="",
    help="key that clients send as bearer token (default: the environment"
    f" variable {_KEY_VARIABLE}); required for a --host that is not local",
  )  # fmt: skip
  add(
    "--without_api_key", action="store_true",
    help="serve a --host that is not local without a key",
  )  # fmt: skip
  parser.add_fields(app_lib.Limits)
  return parser


if __name__ == "__main__":
  sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Compiles a training step up to its schedule, without machine code.

Most of the time that libtpu takes goes into machine code and what precedes it.
Memory, bytes, FLOPs and collectives are settled before: XLA dumps the scheduled
program, then its memory, and here the compiler is stopped once both are
complete. It is a separate process, because it can only be stopped as one, and
because XLA reads its flags once.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import multiprocessing
import os
import pathlib
import re
import tempfile
import threading
import time
from typing import Any

from attnres_jax import config as config_lib

_PROGRAM = "*train_step*.after_optimizations.txt"
_MEMORY = "*train_step*memory-usage-report.txt"
_REFUSED = "refused"


@dataclasses.dataclass(frozen=True)
class Schedule:
  """A compiled program before machine code.

  Attributes:
    text: HLO, scheduled; empty if the compiler refuses the program before it
      has said how much memory it needs.
    peak_bytes: of a device's memory, with arguments and results; may be more
      than there is.
    reason: the compiler's message if it refuses.
    seconds: until it was scheduled, including tracing.
  """

  text: str
  peak_bytes: int
  reason: str
  seconds: float


def up_to_schedule(lower: Callable[..., Any], *args: Any) -> Schedule:
  """The schedule of a program.

  `lower` is a function of a module, which a process of its own calls with these
  arguments. It returns what is to be compiled, of a function named train_step.

  Raises:
    RunError: the compiler ended for another reason than memory; its message is
      on stderr.
  """
  start = time.perf_counter()
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=_compile, args=(lower, args, name))
    dump = f"--xla_dump_to={name} --xla_dump_hlo_as_text=true"
    with environment(
      XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {dump}",
      JAX_ENABLE_COMPILATION_CACHE="false",
    ):
      process.start()
    try:
      while not (text := _program(folder)):
        process.join(0.2)
        if process.exitcode is not None and not _program(folder):
          return Schedule("", 0, _refusal(folder, process), _since(start))
    finally:
      process.kill()
      process.join()
    peak_bytes = _total(folder)
    assert peak_bytes is not None  # Else there would be no text.
    return Schedule(_sugared(text), peak_bytes, "", _since(start))


def lower_step(config: config_lib.RunConfig, *slices: Any) -> Any:
  """The lowered training step of a config without open choices.

  `slices` are arguments of `topology.devices`.
  """
  from attnres_jax.common import sharding
  from attnres_jax.common import topology
  from attnres_jax.train import train_state

  mesh = sharding.make_mesh(config.mesh, topology.devices(*slices))
  program = train_state.make_program(config, mesh)
  step = program.train_step
  return step.trace(program.abstract_state, program.batch_shapes).lower()


def _compile(
  lower: Callable[..., Any], args: tuple[Any, ...], name: str
) -> None:
  """The work of the process that is stopped."""
  threading.Thread(target=_end_with_parent, daemon=True).start()
  import jax

  jax.config.update("jax_platforms", "cpu")
  try:
    lower(*args).compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    (pathlib.Path(name) / _REFUSED).write_text(str(error))


def _end_with_parent() -> None:
  """If that is killed, a compiler would go on for minutes."""
  parent = multiprocessing.parent_process()
  assert parent is not None
  parent.join()
  os._exit(1)


def _program(folder: pathlib.Path) -> str:
  """The program once it and the report of its memory are complete.

  The last line of the program closes it, and the report comes after it.
  """
  if _total(folder) is None:
    return ""
  for path in folder.glob(_PROGRAM):
    text = path.read_text()
    if "\nENTRY " in text and text.endswith("}\n\n"):
      return text
  return ""


def _sugared(text: str) -> str:
  """Asynchronous operations as `hlo` reads them, by their own names.

  A dump has async-start(x), calls=%c, where a compiled program has
  slice-start(x) with the attributes of the slice inside c.
  """
  called = set(re.findall(r" async-start\(.*calls=%([^\s,]+)", text))
  inside = {}
  for computation in text.split("\n\n"):
    name = re.match(r"%(\S+) ", computation)
    if name and name[1] in called:
      root = re.search(
        r"ROOT \S+ = .*? ([\w-]+)\((?:%[^()]*)?\)(.*)", computation
      )
      if root:
        inside[name[1]] = root.groups()

  def start(match: re.Match[str]) -> str:
    if match[2] not in inside:
      return match[0]
    op, attributes = inside[match[2]]
    return f" {op}-start({match[1]}){attributes}"

  return re.sub(r" async-start\(([^)]*)\).*?calls=%([^\s,]+).*", start, text)


def _total(folder: pathlib.Path) -> int | None:
  """Bytes of a device's memory, if its report is there: its first total."""
  for path in folder.glob(_MEMORY):
    match = re.search(
      r"default \(color=0\)\nTotal bytes: (\d+)\D", path.read_text()
    )
    if match:
      return int(match[1])
  return None


def _refusal(folder: pathlib.Path, process: Any) -> str:
  path = folder / _REFUSED
  if not path.exists():
    raise config_lib.RunError(
      f"the compiler ended with exit status {process.exitcode}"
    )
  return path.read_text()


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
  """A context in which variables of the environment are set."""
  old = {name: os.environ.get(name) for name in variables}
  os.environ.update(variables)
  try:
    yield
  finally:
    for name, value in old.items():
      os.environ.pop(name)
      if value is not None:
        os.environ[name] = value


def _since(start: float) -> float:
  return time.perf_counter() - start

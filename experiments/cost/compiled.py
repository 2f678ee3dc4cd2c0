# SPDX-License-Identifier: Apache-2.0
"""The programs of whole networks, compiled for TPUs that are not there.

`step` is the gradient of a transformer's loss, `identity` both passes of a
stack whose sublayers cost nothing, so that only the residual scheme and the
norms do; `decode` and `prefill` are the engine's programs; `experts` is a
sublayer of a planned run.

GB is what the instructions of the compiled program read from and write to
memory. An update in place counts its new part only, weights of a layer that are
cut out of a stack count that layer only, and the body of a loop counts as often
as it runs. The estimate is the compiler's cycles for its own instructions. It
has none for Pallas kernels, which count their bytes over the bandwidth. In
`decode` and `prefill`, the start of a kernel is most of its time. So a kernel
also counts the time of the compiler's smallest fusions, 1.21 us, and the bytes
of all its operands, even of operands on the core.
"""

import collections
import contextlib
import functools
import re
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.common import chips
from attnres_jax.common import compiler
from attnres_jax.common import scopes
from attnres_jax.common import sharding
from attnres_jax.common import topology
from attnres_jax.flops import traffic
from attnres_jax.inference import programs
from attnres_jax.models import loss as loss_lib
from attnres_jax.models import residuals
from attnres_jax.models.residuals import base
from attnres_jax.plan import attribution
from attnres_jax.plan import collectives
from attnres_jax.plan import hlo
from attnres_jax.plan import schedule
import attnres_kernels
from experiments.cost import experts
from experiments.cost import networks

TOPOLOGY = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
# What the compiler estimates for the smallest fusions on all three chips, which
# is 1817 cycles on v5e and 2116 on the others.
START_SECONDS = 1.21e-6
# Smaller collectives belong to the head and to drawing a token.
_LEAST_SENT = 2**20


class Case(NamedTuple):
  """A program to compile.

  Attributes:
    program: "step", "identity", "decode", "prefill" or "experts".
    place: a chip, or a slice whose devices share a prompt or train.
    network: of `networks.load`.
    arm: of the network.
    batch: rows.
    tokens: of each row; for `decode`, of a full cache.
    cached: of a prompt, before these tokens.
    length: of its cache; 0 for `cached` and `tokens` together.
  """

  program: str
  place: str
  network: str
  arm: str
  batch: int
  tokens: int
  cached: int = 0
  length: int = 0


def measure(case: Case) -> dict[str, Any]:
  """The columns of a row; nearly none if it does not fit."""
  staged, devices = trace(case)
  chip = topology.chip(devices[0])
  least = _least(case)
  try:
    compiled = staged.lower().compile()
  except jax.errors.JaxRuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    return least | {"peak_GiB": "does not fit"}
  peak = compiler.peak_bytes(compiled)
  temporary = compiled.memory_analysis().temp_size_in_bytes
  program = hlo.Program(compiled.as_text())
  serves = case.program in ("decode", "prefill")
  total, depth = costs(program, chip, START_SECONDS if serves else None)
  row = least | {
    "GB": f"{total.nbytes / 1e9:.5g}",
    "ms": f"{total.seconds * 1e3:.5g}",
    "depth_ms": f"{depth.seconds * 1e3:.4g}",
    "peak_GiB": f"{peak / 2**30:.2f}",
    "temporary_GB": f"{temporary / 1e9:.3f}",
  }
  if len(devices) > 1:
    row |= {"collectives": _collectives(program), "sent_GB": _sent(program)}
  return row


def count(case: Case) -> dict[str, Any]:
  """Bytes of the program before machine code is generated.

  There is no peak yet: `allocated_GiB` adds up what the schedule allocates.
  """
  scheduled = schedule.up_to_schedule(_lower, case)
  if scheduled.reason:
    return {"peak_GiB": "does not fit"}
  program = hlo.Program(scheduled.text)
  return _least(case) | {
    "GB": f"{program.hbm_bytes() / 1e9:.5g}",
    "sent_GB": _sent(program),
    "allocated_GiB": f"{scheduled.peak_bytes / 2**30:.2f}",
  }


def _lower(case: Case) -> Any:
  staged, _ = trace(case)
  return staged.lower()


def trace(case: Case) -> tuple[Any, list[Any]]:
  """The traced program, and the devices that it is for."""
  network = networks.load(case.network)
  slice_name = TOPOLOGY.get(case.place, case.place)
  devices = list(topology.devices(slice_name))
  if case.place in TOPOLOGY:
    devices = devices[:1]
  if case.program == "experts":
    config = experts.planned(network, devices)
    return experts.trace(config, devices), devices
  if case.program in ("decode", "prefill"):
    sizes = config_lib.MeshConfig(data=1, tensor=len(devices))
    mesh = sharding.make_mesh(sizes, devices)
    model = networks.abstract(network, case.arm)
    if case.program == "decode":
      return programs.trace_next(model, mesh, case.batch, case.tokens), devices
    length = case.length or case.cached + case.tokens
    sizes = case.tokens, case.cached, length
    return programs.trace_extend(model, mesh, *sizes), devices
  network = network._replace(batch=case.batch, tokens=case.tokens)
  make = step if case.program == "step" else identity
  function, arguments = make(network, case.arm)
  place = jax.sharding.SingleDeviceSharding(devices[0])
  arguments = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments
  )

  def train_step(*arguments):  # The name that `schedule` looks for.
    return function(*arguments)

  ambient = contextlib.nullcontext()
  if devices[0].platform == "gpu":  # Whose kernels are chosen by the mesh.
    mesh = sharding.make_mesh(config_lib.MeshConfig(data=1), devices)
    ambient = jax.set_mesh(mesh)
  with ambient:
    return jax.jit(train_step).trace(*arguments), devices


def step(network: networks.Network, arm: str) -> tuple[Any, tuple]:
  """The gradient of a transformer's loss; and its arguments, as shapes."""
  model = networks.abstract(network, arm)
  tokens_BT = jax.ShapeDtypeStruct((network.batch, network.tokens), jnp.int32)

  def loss(model, tokens_BT, target_BT):
    sums = loss_lib.cross_entropy(
      model.hidden(tokens_BT),
      model.embedding.head_DV(),
      target_BT,
      jnp.ones(tokens_BT.shape, jnp.float32),
    )
    return sums.total / tokens_BT.size

  return jax.value_and_grad(loss), (model, tokens_BT, tokens_BT)


def identity(network: networks.Network, arm: str) -> tuple[Any, tuple]:
  """A stack whose sublayers cost nothing, both passes; and its arguments.

  The arm "block_attnres plain" has the plain form of the operators.
  """
  model = network.model
  sublayers, width = model.num_sublayers, model.width
  block = model.residual.sublayers_per_block(sublayers)

  def both(x, query, gain, cotangent):
    stack = functools.partial(_stack, arm, sublayers, block)
    out, vjp = jax.vjp(stack, x, query, gain)
    return out, vjp(cotangent)

  shape = network.batch, network.tokens, width
  wide = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  row = jax.ShapeDtypeStruct((sublayers + 1, width), jnp.float32)
  return both, (wide, row, row, wide)


def _stack(arm, sublayers, block, x, query, gain):
  # An identity that the compiler can neither see through nor fuse across, like
  # the matrix products of a real sublayer.
  def sublayer(h):
    return jax.lax.optimization_barrier(h)

  if arm == "prenorm":
    for l in range(sublayers):
      x = x + sublayer(_rms_norm(x, gain[l]))
    return _rms_norm(x, gain[sublayers])

  implementation = "xla" if arm.endswith(" plain") else "pallas_tpu"
  attend = functools.partial(
    attnres_kernels.depth_attention, implementation=implementation
  )
  merge = functools.partial(
    attnres_kernels.depth_merge_norm, implementation=implementation
  )
  sources = [x]
  for start in range(0, sublayers, block):
    stop = min(start + block, sublayers)
    out, lse = attend(query[start:stop], sources)
    out, lse = (
      [y[0] for y in jax.lax.split(z, [1] * (stop - start))] for z in (out, lse)
    )
    partial = sublayer(_rms_norm(out[0], gain[start]))
    for i in range(1, stop - start):
      l = start + i
      h = merge(out[i], lse[i], query[l], partial, gain[l])
      partial += sublayer(h)
    sources.append(partial)
  out, _ = attend(query[sublayers:], sources)
  return _rms_norm(out[0], gain[sublayers])


def _rms_norm(x, gain):
  wide = x.astype(jnp.float32)
  square = jnp.mean(wide * wide, axis=-1, keepdims=True)
  return (wide * jax.lax.rsqrt(square + 1e-6) * gain).astype(x.dtype)


class Cost(NamedTuple):
  """Bytes, seconds and kernels of a step, or of a part of it."""

  nbytes: float
  seconds: float
  kernels: float


def costs(
  program: hlo.Program, chip: chips.Chip, start_seconds: float | None
) -> tuple[Cost, Cost]:
  """The cost of all instructions, and of the instructions of depth attention.

  A kernel takes `start_seconds`, and then counts all operands; None is for the
  bytes of kernels alone.
  """
  sums = {True: np.zeros(3), False: np.zeros(3)}
  owners = attribution.owners(program)
  for count, instruction, nbytes in program.instructions():
    seconds, kernels = 0.0, 0
    cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    if cycles:
      seconds = int(cycles[1]) / chip.clock_hz
    elif "tpu_custom_call" in instruction.attributes:
      kernels, moved = 1, nbytes
      if start_seconds is not None:
        moved = _operand_bytes(program, instruction)
      seconds = (start_seconds or 0.0) + moved / chip.hbm_bytes_per_second
    is_depth = owners[instruction.place] == scopes.RESIDUAL
    sums[is_depth] += count * np.array((nbytes, seconds, kernels))
  return Cost(*(sums[True] + sums[False])), Cost(*sums[True])


def _operand_bytes(program: hlo.Program, instruction: hlo.Instruction) -> float:
  """Bytes of all operands and results, wherever they are."""
  operands = program.computations[instruction.place[0]]
  arrays = list(instruction.arrays)
  for name in instruction.operands:
    arrays += operands[name].arrays if name in operands else ()
  return sum(array.nbytes for array in arrays)


def _least(case: Case) -> dict[str, Any]:
  """What is known by arithmetic.

  Of serving: weights once with the cache, or the blocks of a prompt.
  """
  if case.program == "experts":
    network, devices = networks.load(case.network), topology.devices(case.place)
    return dict(experts.columns(experts.planned(network, devices)))
  if case.program not in ("decode", "prefill"):
    return {}
  network = networks.load(case.network)
  if case.length:
    is_chip = case.place in TOPOLOGY
    devices = 1 if is_chip else len(topology.devices(case.place))
    config = networks.with_arm(network, case.arm)
    nbytes = _block_bytes(config, -(-case.tokens // devices))
    return {"blocks_GB": f"{nbytes / 1e9:.3f}"}
  model = networks.abstract(network, case.arm)
  config = model.config
  weights = sum(
    leaf.size * (2 if leaf.ndim > 1 else 4)
    for leaf in jax.tree.leaves((model.sublayers, model.embedding.head))
  )
  cache = case.batch * sum(
    kind.token_bytes * case.tokens + kind.sequence_bytes
    for kind in traffic.of_caches(config).values()
  )
  return {"least_GB": f"{(weights + cache) / 1e9:.4f}"}


def _block_bytes(config: config_lib.ModelConfig, tokens: int) -> int:
  """Bytes of all completed blocks of so many tokens, but the embedding."""

  def blocks() -> Any:
    residual = residuals.build_residual(config, rngs=nnx.Rngs(params=0))
    x_BTD = jnp.zeros((1, tokens, config.width), config.dtype)
    run = base.run_through(residual, x_BTD, lambda l, carry, slot: x_BTD)
    return residual.take_apart(run)[0]

  _, *completed = jax.eval_shape(blocks) or (None,)
  return sum(block.size * block.dtype.itemsize for block in completed)


def _sent(program: hlo.Program) -> str:
  """GB of all collectives."""
  sent = sum(op.count * op.sent_bytes for op in collectives.of_program(program))
  return f"{sent / 1e9:.4g}"


def _collectives(program: hlo.Program) -> str:
  """Their number by kind, of activations."""
  counts: collections.Counter[str] = collections.Counter()
  for op in collectives.of_program(program):
    if max((array.nbytes for array in op.arrays), default=0) > _LEAST_SENT:
      counts[op.kind] += round(op.count)
  return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))

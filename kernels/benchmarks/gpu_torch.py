# SPDX-License-Identifier: Apache-2.0
"""The PyTorch arms of the GPU benchmark: plain code, compiled, and peers.

Inputs are the JAX arrays themselves, passed without a copy; every source is a
separate leaf. A peer that cannot be imported, or does not support a shape,
raises `NotHere` with the reason, which is then shown in the table.
"""

from collections.abc import Callable
import functools
import importlib
import os
from typing import Any

from benchmarks import gpu_problems as problems
from benchmarks import gpu_protocol as protocol
import jax

EPS = problems.EPS


def version() -> str:
  try:
    return importlib.import_module("torch").__version__
  except ImportError:
    return ""


def arms(problem) -> dict[str, Callable[[], Callable[..., Any]]]:
  """Maps names to builders of the arm's function, which may raise `NotHere`."""
  if isinstance(problem, problems.Step):
    return {}
  if isinstance(problem, problems.Stack):
    return {
      "torch.compile naive": lambda: _compiled(_naive_stack(problem)),
      "torch.compile two-phase": lambda: _compiled(_two_phase_stack(problem)),
      "fla fused_attnres": lambda: _stack_of_reads(problem, _fla()),
      "flash-attn-res two-phase": lambda: _flash_stack(problem),
      "liger": lambda: _stack_of_reads(problem, _liger()),
    }
  return {
    "torch.compile naive": lambda: _compiled(_naive_read),
    "torch.compile two-phase": lambda: _compiled(_two_phase_read(problem)),
    "fla fused_attnres": lambda: _each_query(_fla()),
    "flash-attn-res phase 1": lambda: _flash_read(problem),
    "liger": lambda: _each_query(_liger()),
  }


def prepare(problem, build, sets, kept) -> protocol.Prepared:
  """Passes the inputs as leaves and wraps the arm's function."""
  torch = _import("torch")
  function = build()
  leaves = [jax.tree.map(_leaf(torch), inputs) for inputs in sets]
  backward = problem.mode != "forward"

  def run(i):
    inputs, dout = leaves[i % len(leaves)][:-1], leaves[i % len(leaves)][-1]
    if not backward:
      with torch.no_grad():
        return function(*inputs)
    out = function(*inputs)
    flat, tree = jax.tree.flatten(inputs)
    gradients = torch.autograd.grad(out, flat, dout)
    return (out, *jax.tree.unflatten(tree, gradients))

  def wait(outputs):
    if torch.cuda.is_available():
      torch.cuda.synchronize()
    return outputs

  return protocol.Prepared(
    run=run, wait=wait, results=lambda outputs: problem.results(outputs, kept)
  )


def _import(name):
  try:
    return importlib.import_module(name)
  except Exception as error:  # Peers fail to import in many ways.
    raise protocol.NotHere(f"{type(error).__name__}: {error}") from error


def _leaf(torch):
  def convert(x):
    # A view of JAX's memory cannot require gradients, but a detached tensor
    # can.
    return torch.from_dlpack(x).detach().requires_grad_()

  return convert


def _compiled(function):
  torch = _import("torch")
  if not torch.cuda.is_available():
    # The same code on a CPU, so that the definitions can be checked without a
    # GPU.
    return function
  # One program per number of sources.
  torch._dynamo.config.recompile_limit = 256
  return torch.compile(function, fullgraph=True, dynamic=False)


def _naive_read(query, sources):
  """One softmax over stacked sources, the obvious first version."""
  torch = _import("torch")
  stacked = torch.stack(sources)
  wide = stacked.float()
  keys = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
  scores = (query[:, None, None] * keys[None]).sum(-1)
  weights = scores.softmax(1)
  mixed = (weights[..., None] * wide[None]).sum(1)
  return mixed.to(stacked.dtype)


def _phase_1(query, sources):
  """The same without a stack, and with the log-normaliser."""
  torch = _import("torch")
  scores = torch.stack([_score(query, source) for source in sources], 1)
  lse = scores.logsumexp(1)
  weights = (scores - lse[:, None]).exp()
  mixed: Any = 0.0
  for i, source in enumerate(sources):
    mixed = mixed + weights[:, i, :, None] * source.float()[None]
  return mixed.to(sources[0].dtype), lse


def _merge(out, lse, query, partial):
  keep = (lse - _score(query[None], partial)[0]).sigmoid()[:, None]
  mixed = keep * out.float() + (1 - keep) * partial.float()
  return mixed.to(out.dtype)


def _score(query, source):
  torch = _import("torch")
  wide = source.float()
  inverse = torch.rsqrt(wide.square().mean(-1) + EPS)
  return (query[:, None] * wide[None]).sum(-1) * inverse[None]


def _two_phase_read(problem):
  """Phase 1 over all sources except the last, which is merged per query."""
  torch = _import("torch")
  if problem.sources < 2:
    raise protocol.NotHere("two phases need two sources")

  def run(query, sources):
    out, lse = _phase_1(query, sources[:-1])
    merged = [
      _merge(out[q], lse[q], query[q], sources[-1]) for q in range(len(query))
    ]
    return torch.stack(merged)

  return run


def _naive_stack(problem):
  """A separate read per sublayer, stacking the sources each time."""
  return _stack_of_reads(
    problem, lambda query, sources: _naive_read(query[None], sources)[0]
  )


def _stack_of_reads(problem, read):
  gates = _gates(problem)

  def run(query, x):
    sources, partial = [x], None
    for i in range(problem.sublayers):
      if i and i % problem.block == 0:
        sources, partial = [*sources, partial], None
      open_source = [] if partial is None else [partial]
      h = read(query[i], sources + open_source) * gates[i]
      partial = h if partial is None else partial + h
    return read(query[problem.sublayers], [*sources, partial])

  return run


def _two_phase_stack(problem):
  gates = _gates(problem)

  def run(query, x):
    sources, number = [x], problem.sublayers
    for start in range(0, number, problem.block):
      stop = min(start + problem.block, number)
      out, lse = _phase_1(query[start:stop], sources)
      partial = out[0] * gates[start]
      for i in range(1, stop - start):
        h = _merge(out[i], lse[i], query[start + i], partial)
        partial = partial + h * gates[start + i]
      sources.append(partial)
    return _phase_1(query[number:], sources)[0][0]

  return run


def _each_query(read):
  """Peers that take only one query: one read per query."""
  torch = _import("torch")
  return lambda query, sources: torch.stack([read(u, sources) for u in query])


def _fla():
  # Its faster kernels are opt-in.
  os.environ.setdefault("FLA_ATTNRES_GLUON", "1")
  fused = _import("fla.ops.attnres").fused_attnres
  gain = _ones()

  def read(query, sources):
    sources = [source[None] for source in sources]
    gained = gain(query.shape[0], sources[0].dtype)
    return fused(query, sources, gained, rms_eps=EPS)[0]

  return read


def _liger():
  torch = _import("torch")
  read = _import("liger_kernel.transformers.functional").liger_attn_res
  gain = _ones()

  def run(query, sources):
    if len(sources) > 32:
      raise protocol.NotHere("drops sources beyond 32 without notice")
    stacked = torch.stack(sources)[:, None]
    query = query.to(stacked.dtype)
    return read(stacked, query, gain(len(query), stacked.dtype), EPS)[0]

  return run


def _flash_read(problem):
  _power_of_two(problem.width)
  torch = _import("torch")
  phase_1 = _import("flash_attn_res.ops.phase_1")

  def run(query, sources):
    stacked = torch.stack(sources)[:, None]
    operator = phase_1.phase_1_batched_attention_triton_op
    return operator(stacked, query, EPS)[0][:, 0]

  return run


def _flash_stack(problem):
  _power_of_two(problem.width)
  torch = _import("torch")
  two_phase = _import("flash_attn_res.experimental.autograd")

  class Gate(torch.nn.Module):
    def __init__(self, gate):
      super().__init__()
      self.gate = gate

    def forward(self, h):
      return h * self.gate

  layers = [Gate(gate) for gate in _gates(problem)]

  def run(query, x):
    return two_phase.BlockAttentionResiduals.apply(
      x[None], query, layers, problem.block, EPS
    )[0]

  return run


def _gates(problem):
  return _import("torch").from_dlpack(problem.gates())


def _power_of_two(width):
  if width & (width - 1):
    raise protocol.NotHere(f"takes widths that are powers of two, not {width}")


@functools.cache
def _ones():
  torch = _import("torch")
  device = "cuda" if torch.cuda.is_available() else "cpu"
  return functools.cache(
    lambda width, dtype: torch.ones(width, dtype=dtype, device=device)
  )

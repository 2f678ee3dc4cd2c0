# SPDX-License-Identifier: Apache-2.0
"""Depth attention by others, where their packages are installed.

Peers answer one query per read, so several queries are several reads.
"""

from collections.abc import Callable, Sequence
import importlib
import os
from typing import Any

import jax

EPS = 1e-6


def program(
  read: Callable[..., Any], arrays: Sequence[jax.Array], dout: jax.Array | None
) -> tuple[Callable[[int], Any], Callable[[], tuple[Any, ...]]]:
  """How to run a read of (query, *sources), with gradients if there is `dout`.

  Returns:
    A function that runs it so many times and waits, and one that returns the
    results of one run: the mixtures, and gradients of the query and sources.
  """
  import torch

  tensor = lambda x: torch.from_dlpack(x).detach().requires_grad_()
  leaves = [tensor(x) for x in arrays]
  cotangent = None if dout is None else tensor(dout)

  def once() -> tuple[Any, ...]:
    with torch.set_grad_enabled(cotangent is not None):
      out = read(leaves[0], leaves[1:])
    if cotangent is None:
      return (out,)
    return out, *torch.autograd.grad(out, leaves, cotangent)

  def run(count: int) -> None:
    for _ in range(count):
      once()
    if torch.cuda.is_available():
      torch.cuda.synchronize()

  numbers = lambda x: x.detach().double().cpu().numpy()
  return run, lambda: tuple(map(numbers, once()))


def _torch(width: int) -> Callable[..., Any]:
  """One softmax over stacked sources, compiled on a GPU."""
  import torch

  def read(query: Any, sources: Any) -> Any:
    stacked = torch.stack(tuple(sources))
    wide = stacked.float()
    keys = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    scores = (query[:, None, None] * keys[None]).sum(-1)
    mixed = (scores.softmax(1)[..., None] * wide[None]).sum(1)
    return mixed.to(stacked.dtype)

  if not torch.cuda.is_available():
    return read
  return torch.compile(read, fullgraph=True, dynamic=False)


def _fla(width: int) -> Callable[..., Any]:
  os.environ.setdefault("FLA_ATTNRES_GLUON", "1")  # Its faster kernels.
  import torch

  fused = importlib.import_module("fla.ops.attnres").fused_attnres
  gain = torch.ones(width, dtype=torch.bfloat16, device="cuda")

  def read(query: Any, sources: Any) -> Any:
    banked = [source[None] for source in sources]
    each = [fused(q, banked, gain, rms_eps=EPS)[0] for q in query]
    return torch.stack(each)

  return read


# Each makes a read (query [Q, D], M sources [T, D]) -> [Q, T, D] of tensors.
PEERS = {"torch.compile": _torch, "fla": _fla}

# SPDX-License-Identifier: Apache-2.0
"""One read in PyTorch: plain code, compiled, and what other projects offer.

Each builder returns a function of a query [Q, D] and M sources [T, D], and of
torch tensors; it raises `NotHere` with the reason if the peer cannot run.
"""

from collections.abc import Callable
import functools
import importlib
import os
from typing import Any

EPS = 1e-6
Read = Callable[[Any, Any], Any]


class NotHere(Exception):
  """Why a peer cannot run here, in one line."""


def version() -> str:
  """PyTorch's version; empty without PyTorch."""
  try:
    return importlib.import_module("torch").__version__
  except ImportError:
    return ""


def builders() -> dict[str, Callable[[int], Read]]:
  """Name -> builder of a read of rows of a width."""
  return {
    "torch.compile": _plain,
    "fla fused_attnres": lambda width: _each_query(_fla(width)),
    "flash-attn-res phase 1": _flash,
    "liger": lambda width: _each_query(_liger(width)),
  }


def tensor(x: Any) -> Any:
  """The memory of a JAX array as a tensor that may require gradients."""
  return import_("torch").from_dlpack(x).detach().requires_grad_()


def import_(name: str) -> Any:
  """A module, or `NotHere`."""
  try:
    return importlib.import_module(name)
  except Exception as error:  # Peers fail to import in many ways.
    raise NotHere(f"{type(error).__name__}: {error}") from error


def _plain(width: int) -> Read:
  """One softmax over stacked sources."""
  torch = import_("torch")

  def read(query: Any, sources: Any) -> Any:
    stacked = torch.stack(sources)
    wide = stacked.float()
    keys = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    scores = (query[:, None, None] * keys[None]).sum(-1)
    mixed = (scores.softmax(1)[..., None] * wide[None]).sum(1)
    return mixed.to(stacked.dtype)

  if not torch.cuda.is_available():
    # The same code, so that the definition is tested without a GPU.
    return read
  return torch.compile(read, fullgraph=True, dynamic=False)


def _each_query(read: Read) -> Read:
  """Of a peer that takes one query: one read per query."""
  torch = import_("torch")
  return lambda query, sources: torch.stack([read(u, sources) for u in query])


def _fla(width: int) -> Read:
  # Its faster kernels are opt-in.
  os.environ.setdefault("FLA_ATTNRES_GLUON", "1")
  fused = import_("fla.ops.attnres").fused_attnres

  def read(query: Any, sources: Any) -> Any:
    sources = [source[None] for source in sources]
    return fused(query, sources, _ones(width, sources[0].dtype), rms_eps=EPS)[0]

  return read


def _liger(width: int) -> Read:
  torch = import_("torch")
  fused = import_("liger_kernel.transformers.functional").liger_attn_res

  def read(query: Any, sources: Any) -> Any:
    if len(sources) > 32:
      raise NotHere("drops sources beyond 32 without notice")
    stacked = torch.stack(sources)[:, None]
    gain = _ones(width, stacked.dtype)
    return fused(stacked, query.to(stacked.dtype), gain, EPS)[0]

  return read


def _flash(width: int) -> Read:
  if width & (width - 1):
    raise NotHere(f"takes widths that are powers of two, not {width}")
  torch = import_("torch")
  phase_1 = import_("flash_attn_res.ops.phase_1")

  def read(query: Any, sources: Any) -> Any:
    operator = phase_1.phase_1_batched_attention_triton_op
    return operator(torch.stack(sources)[:, None], query, EPS)[0][:, 0]

  return read


@functools.cache
def _ones(width: int, dtype: Any) -> Any:
  torch = import_("torch")
  device = "cuda" if torch.cuda.is_available() else "cpu"
  return torch.ones(width, dtype=dtype, device=device)

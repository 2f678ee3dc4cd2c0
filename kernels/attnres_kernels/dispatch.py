# SPDX-License-Identifier: Apache-2.0
"""Which backend runs: by name, or by the platform the program is lowered for.

A backend is a module with `forward` and `backward` functions of one signature.
A named backend that cannot run says why; the automatic choice asks each
backend first (`why_not`) and otherwise takes the plain-JAX one.
"""

import importlib
from typing import Any, Literal

import jax

Implementation = Literal["reference", "xla", "pallas_tpu", "pallas_gpu"]
IMPLEMENTATIONS: tuple[str, ...] = (
  "reference",
  "xla",
  "pallas_tpu",
  "pallas_gpu",
)


def check_implementation(implementation: str | None) -> None:
  """Raises ValueError unless the name is None or a known backend."""
  if implementation is not None and implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f"implementation={implementation!r} is not one of {IMPLEMENTATIONS}"
    )


def call(op: str, function: str, implementation: str | None, *args, **kwargs):
  """Calls `function` of the backend of `op`.

  Args:
    op: the op's package name, such as "depth_attention".
    function: the name of a function of the backend module.
    implementation: a backend by name, or None for the best that fits.
    *args: arrays (or None), passed on.
    **kwargs: static options, passed on.

  Raises:
    NotImplementedError: the named backend cannot run these arguments here.
  """
  if implementation is None:
    return _call_best(op, function, args, kwargs)
  backend = _backend(op, implementation)
  reason = _why_not(backend, function, args, kwargs)
  if reason is not None:
    raise NotImplementedError(f"{op}, {implementation}: {reason}")
  return getattr(backend, function)(*args, **kwargs)


# The Pallas backend of each platform that the automatic choice may take.
_AUTOMATIC: dict[str, str] = {}


def _call_best(op: str, function: str, args: tuple, kwargs: dict) -> Any:
  branches = {}
  for platform, name in _AUTOMATIC.items():
    backend = _backend(op, name)
    if _why_not(backend, function, args, kwargs) is None:
      branches[platform] = getattr(backend, function)
  default = getattr(_backend(op, "xla"), function)
  if not branches:
    return default(*args, **kwargs)

  # None cannot be an operand of a platform switch; a pytree holds it.
  def close(f):
    return lambda operands: f(*operands, **kwargs)

  return jax.lax.platform_dependent(
    args,
    default=close(default),
    **{platform: close(f) for platform, f in branches.items()},
  )


def _backend(op: str, name: str):
  return importlib.import_module(f"attnres_kernels.{op}.{name}")


def _why_not(backend, function: str, args: tuple, kwargs: dict) -> str | None:
  check = getattr(backend, "why_not", None)
  return None if check is None else check(function, *args, **kwargs)

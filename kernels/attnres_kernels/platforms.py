# SPDX-License-Identifier: Apache-2.0
"""What a program is traced for: its platform, its chip, the dtype of its sums.

The platform is the one of the ambient mesh, or else known only when a program
is lowered: a TPU program may be built on a host without a TPU.
"""

from collections.abc import Iterator
import contextlib
import contextvars
from typing import Any, Literal, get_args

import jax
import jax.extend
from jax.interpreters import ad
from jax.interpreters import batching
from jax.interpreters import mlir
import jax.numpy as jnp

Implementation = Literal["reference", "xla", "pallas_tpu", "pallas_gpu"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)
# The platform that each Pallas backend is lowered for.
KERNELS = {"pallas_tpu": "tpu", "pallas_gpu": "cuda"}
# What a TPU kernel may use: of 64 MiB on v5p and tpu7x, of 128 on v5e and v6e.
# Older chips have 16 MiB, all of which it may use.
_VMEM_BYTES = 56 * 2**20
_SMALL_VMEM_BYTES: dict[str | None, int] = {
  kind: 16 * 2**20 for kind in ("TPU v2", "TPU v3", "TPU v4")
}
# Of this, for values that do not fit in registers.
_VALUE_BYTES = 16 * 2**20
# GPUs on which kernels may be chosen: they were checked and timed on an H100.
_GPUS = ("H100", "H200")


def check_implementation(implementation: str | None) -> None:
  """Raises ValueError unless the name is None or a backend's."""
  if implementation is not None and implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f"implementation={implementation!r} is not one of {IMPLEMENTATIONS}"
    )


def tpu_vmem_bytes() -> int:
  """What a kernel may use on the TPU for which it is traced.

  That of the ambient mesh, or else of this process. A program for another one,
  traced without a mesh, gets what all newer TPUs than v4 have.
  """
  return _SMALL_VMEM_BYTES.get(tpu_kind(), _VMEM_BYTES)


def tpu_vmem_limit(tile_bytes: int) -> int:
  """What a kernel reserves of `tpu_vmem_bytes`, which is no more than it needs.

  While it runs, the compiler puts nothing else there. But that is where the
  weights of the next matrix product should be copied meanwhile: a product that
  reads them from memory takes up to twice as long (v6e). The blocks of a grid
  step have two buffers each.
  """
  return min(2 * tile_bytes + _VALUE_BYTES, tpu_vmem_bytes())


def tpu_kind() -> str | None:
  """The kind of TPU for which it is traced; None if that is unknown."""
  return _device_kind("tpu")


def is_for_gpu() -> bool:
  """Whether a program that is traced here is known to be for a GPU."""
  device = _ambient_device()
  platform = jax.default_backend() if device is None else device.platform
  return platform == "gpu"


def is_known_gpu() -> bool:
  """Whether it is known to be for a GPU on which kernels may be chosen."""
  kind = _device_kind("gpu") or ""
  return any(name in kind for name in _GPUS)


def ambient_platform() -> str | None:
  """The platform of the ambient mesh, as JAX calls it when it lowers.

  None if it is not known, or not yet: of GPUs, CUDA or ROCm.
  """
  device = _ambient_device()
  is_known = device is not None and device.platform in ("cpu", "tpu")
  return device.platform if is_known else None


def _device_kind(platform: str) -> str | None:
  device = _ambient_device()
  if device is not None:
    return device.device_kind
  if jax.default_backend() == platform:
    return jax.devices()[0].device_kind
  return None


def _ambient_device() -> Any:
  """The kind of device of the ambient mesh, if it is known."""
  return getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)


def accumulator(*arrays: jax.Array | None) -> jnp.dtype:
  """The dtype of scores, sums and states: float32, or float64 if any input is.

  Not left to promotion, which may be strict.
  """
  wide = any(x is not None and x.dtype == jnp.float64 for x in arrays)
  return jnp.dtype(jnp.float64 if wide else jnp.float32)


def check_eps(eps: float, name: str = "eps") -> None:
  """Raises ValueError unless it can be added to a mean square."""
  if not 0 <= eps < float("inf"):
    raise ValueError(f"{name}={eps!r} must be a finite number of at least 0")


def exact(operand: jax.Array) -> jax.lax.Precision | None:
  """The precision of a product that rounds no operand, not even on a TPU."""
  wide = operand.dtype in (jnp.float32, jnp.float64)
  return jax.lax.Precision.HIGHEST if wide else None


@contextlib.contextmanager
def interpreted(params: Any = True) -> Iterator[None]:
  """A context in which Pallas backends run in interpret mode on any platform.

  For tests. The choice is made during tracing, so the context must surround the
  first call of a jitted function. `params` is the `interpret` argument of
  `pallas_call`, such as `pltpu.InterpretParams(detect_races=True)`.
  """
  token = _INTERPRET.set(params)
  try:
    yield
  finally:
    _INTERPRET.reset(token)


def interpret_params() -> Any:
  """What `interpreted` was given; None outside of it."""
  return _INTERPRET.get()


_INTERPRET: contextvars.ContextVar[Any] = contextvars.ContextVar(
  "attnres_kernels_interpret", default=None
)


def by_platform(args: tuple, default: Any, **branches: Any) -> Any:
  """Calls the function for the platform that the program is lowered for.

  Under a mesh of known devices, such as one that training makes, no other
  function is traced.

  Branches are functions of `args` by platform, as JAX calls it when it lowers
  ("tpu", "cuda"); `default` is for all others.
  """
  platform = ambient_platform()
  if platform is not None:
    return branches.get(platform, default)(*args)

  def close(function):
    # None cannot be an operand of a platform switch; a pytree holds it.
    return lambda operands: function(*operands)

  closed = {platform: close(f) for platform, f in branches.items()}
  return jax.lax.platform_dependent(args, default=close(default), **closed)


# The identity, defined on one platform only.
_platform_p = jax.extend.core.Primitive("attnres_require_platform")
_platform_p.def_impl(
  lambda x, **params: jax.jit(lambda y: _platform_p.bind(y, **params))(x)
)
_platform_p.def_abstract_eval(lambda x, **params: x)
ad.deflinear2(_platform_p, lambda dy, x, **params: [dy])
batching.primitive_batchers[_platform_p] = lambda args, axes, **params: (
  _platform_p.bind(*args, **params),
  axes[0],
)


def _lower_platform(
  context: Any, x: Any, *, what: str, platform: str
) -> list[Any]:
  platforms = context.module_context.platforms
  if any(p != platform for p in platforms):
    raise NotImplementedError(
      f"{what}: runs on {platform}, and this program is lowered for"
      f" {', '.join(platforms)}"
    )
  return [x]


mlir.register_lowering(_platform_p, _lower_platform)


def require_platform(args: tuple, what: str, platform: str) -> tuple:
  """The same arrays; lowering a program with them for another platform fails.

  The message says what runs on that platform ("tpu", "cuda", "cpu") only.
  """
  (first, *rest), structure = jax.tree.flatten(args)
  first = _platform_p.bind(first, what=what, platform=platform)
  return jax.tree.unflatten(structure, [first, *rest])

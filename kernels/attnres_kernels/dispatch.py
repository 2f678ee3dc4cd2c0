# SPDX-License-Identifier: Apache-2.0
"""Which backend runs: by name, or by the platform the program is lowered for.

A backend is a module whose `forward` and `backward` functions have the same
signature as those of the other backends; autodiff differentiates a `forward`
without a `backward`. A named backend that cannot run says why. The automatic
choice asks each backend first (`why_not`, and `why_slow` for shapes that plain
JAX runs faster) and falls back to plain JAX.
"""

from collections.abc import Callable, Iterator
import contextlib
import contextvars
import functools
import importlib
import importlib.util
import inspect
from typing import Any, Literal, get_args

import jax
import jax.extend
from jax.interpreters import ad
from jax.interpreters import batching
from jax.interpreters import mlir
import jax.numpy as jnp

Implementation = Literal["reference", "xla", "pallas_tpu", "pallas_gpu"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)
# What a TPU kernel may use: of 64 MiB on v5p and tpu7x, of 128 on v5e and v6e.
# Older chips have 16 MiB, all of which it may use.
_VMEM_BYTES = 56 * 2**20
_SMALL_VMEM_BYTES: dict[str | None, int] = {
  kind: 16 * 2**20 for kind in ("TPU v2", "TPU v3", "TPU v4")
}
# Of this, for values that do not fit in registers.
_VALUE_BYTES = 16 * 2**20


def check_implementation(implementation: str | None) -> None:
  """Raises ValueError unless the name is None or a known backend."""
  if implementation is not None and implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f"implementation={implementation!r} is not one of {IMPLEMENTATIONS}"
    )


def check_eps(eps: float, name: str = "eps") -> None:
  """Raises ValueError unless it can be added to a mean square."""
  if not 0 <= eps < float("inf"):
    raise ValueError(f"{name}={eps!r} must be a finite number of at least 0")


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


def _is_known_gpu() -> bool:
  kind = _device_kind("gpu") or ""
  return any(name in kind for name in _GPUS)


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


# Static options of a backend, as pairs, which are hashable.
Options = tuple[tuple[str, Any], ...]
# (op, implementation, options, saved) of `differentiable`.
_Rule = tuple[str, str | None, Options, tuple[int, ...]]


def differentiable(
  op: str, implementation: str | None, options: Options,
  saved: tuple[int, ...], *arrays: Any,
) -> Any:  # fmt: skip
  """`forward` of the backend of `op`, whose gradient is its `backward`.

  `backward` gets the arrays, the saved results and the cotangents of all
  results, and returns the gradients of the first arrays; others have none.

  `saved` says which of the results it needs. Arrays may also be None, or tuples
  of arrays; options are static.
  """
  return _differentiable((op, implementation, options, saved), *arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(rule: _Rule, *arrays: Any) -> Any:
  op, implementation, options, _ = rule
  return call(op, "forward", implementation, *arrays, **dict(options))


def _differentiable_forward(rule: _Rule, *arrays: Any) -> tuple[Any, Any]:
  results = _differentiable(rule, *arrays)
  return results, (arrays, [results[i] for i in rule[3]])


def _differentiable_backward(
  rule: _Rule, residuals: Any, cotangents: Any
) -> tuple[Any, ...]:
  op, implementation, options, _ = rule
  arrays, results = residuals
  if not isinstance(cotangents, tuple):
    cotangents = (cotangents,)
  gradients = call(
    op, "backward", implementation, *arrays, *results, *cotangents,
    **dict(options),
  )  # fmt: skip
  return (*gradients, *[None] * (len(arrays) - len(gradients)))


_differentiable.defvjp(_differentiable_forward, _differentiable_backward)


def call(
  op: str, function: str, implementation: str | None, *args: Any, **kwargs: Any
) -> Any:
  """Calls `function` of the backend of `op`.

  `op` is the op's package name, such as "depth_attention", and `implementation`
  a backend by name, or None for the best that fits. Arrays (or None) and static
  options are passed on.

  Raises:
    NotImplementedError: the named backend cannot run these arguments, or
      (when the program is lowered) not on that platform.
  """
  if implementation is None:
    return _call_best(op, function, args, kwargs)
  backend = _backend(op, implementation)
  reason = _why_not(backend, function, args, kwargs)
  if reason is not None:
    raise NotImplementedError(f"{op}, {implementation}: {reason}")
  if implementation in _PLATFORMS:
    interpret = interpret_params()
    if interpret is not None:
      run = _function(op, implementation, function)
      return run(*args, **kwargs, interpret=interpret)
    args = require_platform(
      args, f"{op}, {implementation}", _PLATFORMS[implementation]
    )
    return _jitted(op, implementation, function, tuple(kwargs.items()))(*args)
  return _function(op, implementation, function)(*args, **kwargs)


@functools.cache
def _jitted(
  op: str, implementation: str, function: str, options: Options
) -> Callable[..., Any]:
  """One jitted function per backend: equal calls are traced once."""
  run = _function(op, implementation, function)
  return jax.jit(functools.partial(run, **dict(options)))


def _function(op: str, implementation: str, name: str) -> Callable[..., Any]:
  backend = _backend(op, implementation)
  if name == "backward" and not hasattr(backend, name):
    return functools.partial(_autodiff, backend.forward)
  return getattr(backend, name)


def _autodiff(
  forward: Callable[..., Any], *args: Any, **options: Any
) -> tuple[Any, ...]:
  """`backward` of a `forward`: autodiff of one more forward pass."""
  kinds = [p.kind for p in inspect.signature(forward).parameters.values()]
  arrays = args[: kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)]
  results, pull = jax.vjp(functools.partial(forward, **options), *arrays)
  is_tuple = isinstance(results, tuple)
  gradients = pull(args[-len(results) :] if is_tuple else args[-1])
  is_integer = lambda g: getattr(g, "dtype", None) == jax.dtypes.float0
  return tuple(None if is_integer(g) else g for g in gradients)


# The platform that each Pallas backend is lowered for.
_PLATFORMS = {"pallas_tpu": "tpu", "pallas_gpu": "cuda"}
# The Pallas backend of each platform that the automatic choice may take.
_AUTOMATIC = {"tpu": "pallas_tpu", "cuda": "pallas_gpu"}
# GPUs on which it may: the kernels were checked and timed on an H100.
_GPUS = ("H100", "H200")


def _call_best(op: str, function: str, args: tuple, kwargs: dict) -> Any:
  names = kernels(op, function, args, kwargs)
  return _best(op, names, function, tuple(kwargs.items()))(*args)


def kernels(
  op: str, function: str, args: tuple, kwargs: dict
) -> tuple[tuple[str, str], ...]:
  """(platform, backend) of the kernels that the automatic choice may take.

  A kernel for GPUs is among them only if this program is known to be for one.
  """
  names = []
  for platform, name in _AUTOMATIC.items():
    if not _exists(op, name) or (platform == "cuda" and not _is_known_gpu()):
      continue
    backend = _backend(op, name)
    reasons = (
      _why_not(backend, function, args, kwargs, check)
      for check in ("why_not", "why_slow")
    )
    if all(reason is None for reason in reasons):
      names.append((platform, name))
  return tuple(names)


@functools.cache
def _best(
  op: str, names: tuple, function: str, options: Options
) -> Callable[..., Any]:
  """One jitted choice by platform: equal calls trace their kernels once."""
  branches = {
    platform: _jitted(op, name, function, options) for platform, name in names
  }
  default = _jitted(op, "xla", function, options)
  if not branches:
    return default
  return jax.jit(lambda *args: by_platform(args, default, **branches))


def _module(op: str, name: str) -> str:
  return f"attnres_kernels.{op}.{'plain' if name == 'xla' else name}"


def _exists(op: str, name: str) -> bool:
  return importlib.util.find_spec(_module(op, name)) is not None


def _backend(op: str, name: str) -> Any:
  if not _exists(op, name):
    raise NotImplementedError(f"{op} has no {name} backend")
  return importlib.import_module(_module(op, name))


def _why_not(
  backend: Any, function: str, args: tuple, kwargs: dict, check: str = "why_not"
) -> str | None:
  reason = getattr(backend, check, None)
  return None if reason is None else reason(function, *args, **kwargs)


def by_platform(args: tuple, default: Any, **branches: Any) -> Any:
  """Calls the function for the platform that the program is lowered for.

  Under a mesh of known devices, such as one that training makes, no other
  function is traced.

  Branches are functions of `args` by platform, as JAX calls it when it lowers
  ("tpu", "cuda"); `default` is for all others.
  """
  device = _ambient_device()
  if device is not None and device.platform in ("cpu", "tpu"):
    return branches.get(device.platform, default)(*args)

  def close(function):
    # None cannot be an operand of a platform switch; a pytree holds it.
    return lambda operands: function(*operands)

  closed = {platform: close(f) for platform, f in branches.items()}
  return jax.lax.platform_dependent(args, default=close(default), **closed)


# The identity, defined on one platform only. The platform is known when a
# program is lowered, not when it is traced: a TPU program may be built on a
# host without a TPU.
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

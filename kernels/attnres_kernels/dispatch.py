# SPDX-License-Identifier: Apache-2.0
"""Which backend runs: by name, or by the platform the program is lowered for.

A backend is a module whose `forward` and `backward` have the signature of the
others'; autodiff differentiates a `forward` without a `backward`. A named
backend that cannot run says why. The automatic choice asks each first
(`why_not`, `why_slow` for shapes that plain JAX runs faster).
"""

from collections.abc import Callable
import functools
import importlib.util
import inspect
from typing import Any, NamedTuple

import jax

from attnres_kernels import platforms


class Rule(NamedTuple):
  """How an operator is called; everything is static."""

  op: str  # The name of its package, such as "depth_attention".
  implementation: str | None  # A backend, or None for the best that fits.
  options: tuple[tuple[str, Any], ...]  # Of the backend; pairs are hashable.
  saved: tuple[int, ...] = ()  # The results that `backward` needs.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable(rule: Rule, *arrays: Any) -> Any:
  """`forward` of an operator's backend; `backward` is its gradient.

  `backward` gets the arrays (or None, or tuples), the saved results and the
  cotangents of all, and returns gradients of the first arrays only.
  """
  return choose(rule, "forward", arrays)(*arrays)


def _forward(rule: Rule, *arrays: Any) -> tuple[Any, Any]:
  results = choose(rule, "forward", arrays)(*arrays)
  return results, (arrays, [results[i] for i in rule.saved])


def _backward(rule: Rule, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
  arrays, results = residuals
  cotangents = cotangents if isinstance(cotangents, tuple) else (cotangents,)
  given = *arrays, *results, *cotangents
  gradients = choose(rule, "backward", given)(*given)
  return (*gradients, *[None] * (len(arrays) - len(gradients)))


differentiable.defvjp(_forward, _backward)


def choose(rule: Rule, function: str, arrays: tuple) -> Callable[..., Any]:
  """`function` of the backend that runs these arrays (or None).

  Raises NotImplementedError if a named backend cannot, or does not run on the
  platform that the program is lowered for.
  """
  name, platform = rule.implementation, platforms.ambient_platform()
  if name is None:
    names = kernels(rule, function, arrays)
    if platform is None:
      return _jitted(rule, "xla", function, tuple(names.items()))
    return _jitted(rule, names.get(platform, "xla"), function)
  reason = _reason(rule, name, function, arrays, "why_not")
  if reason is not None:
    raise NotImplementedError(f"{rule.op}, {name}: {reason}")
  interpret = platforms.interpret_params()
  if name not in platforms.KERNELS:
    return _function(rule, name, function)
  if interpret is not None:
    return _function(rule, name, function, interpret=interpret)
  run, place = _jitted(rule, name, function), platforms.KERNELS[name]
  what, require = f"{rule.op}, {name}", platforms.require_platform
  return lambda *args: run(*require(args, what, place))


def kernels(rule: Rule, function: str, arrays: tuple) -> dict[str, str]:
  """The backends that the automatic choice may take, by platform.

  A kernel for GPUs is among them only if this program is known to be for one.
  """
  return {
    platform: name
    for name, platform in platforms.KERNELS.items()
    if (platform != "cuda" or platforms.is_known_gpu())
    and not _reason(rule, name, function, arrays, "why_not")
    and not _reason(rule, name, function, arrays, "why_slow")
  }


def _reason(
  rule: Rule, name: str, function: str, arrays: tuple, check: str
) -> str | None:
  """What a backend says to `why_not` or `why_slow`; None if nothing."""
  backend = _backend(rule.op, name)
  if backend is None:
    return f"no {name} backend"
  ask = getattr(backend, check, lambda *args, **options: None)
  return ask(function, *arrays, **dict(rule.options))


@functools.cache
def _jitted(
  rule: Rule, name: str, function: str, others: tuple = ()
) -> Callable[..., Any]:
  """One jitted function, so that equal calls are traced once.

  With `others`, (platform, backend) each, the lowering chooses.
  """
  run = jax.jit(_function(rule, name, function))
  if not others:
    return run
  branches = {
    place: _jitted(rule, kernel, function) for place, kernel in others
  }
  return jax.jit(lambda *args: platforms.by_platform(args, run, **branches))


def _function(
  rule: Rule, name: str, function: str, **more: Any
) -> Callable[..., Any]:
  backend, options = _backend(rule.op, name), dict(rule.options) | more
  run = getattr(backend, function, None)
  if run is None:
    run = functools.partial(_autodiff, backend.forward)
  return functools.partial(run, **options)


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


@functools.cache
def _backend(op: str, name: str) -> Any:
  """The module of a backend; None if the operator has no such one."""
  module = f"attnres_kernels.{op}.{'plain' if name == 'xla' else name}"
  return importlib.util.find_spec(module) and importlib.import_module(module)

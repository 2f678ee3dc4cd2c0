# SPDX-License-Identifier: Apache-2.0
"""When tokamax is asked, and what happens to what it cannot do."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax.models import grouped
from attnres_jax.models import optional_kernels
from attnres_jax.models.mixers import softmax


def _install(monkeypatch, platform="tpu", **functions):
  """A module of that name, on a host whose accelerator is `platform`."""
  fake = types.ModuleType("tokamax")
  fake.__spec__ = types.SimpleNamespace()
  for name, function in functions.items():
    setattr(fake, name, function)
  monkeypatch.setitem(sys.modules, "tokamax", fake)
  monkeypatch.setattr(jax, "default_backend", lambda: platform)


def _grouped():
  x, weight = jnp.ones((6, 2)), jnp.arange(12.0).reshape(3, 2, 2)
  sizes = jnp.array([1, 2, 3], jnp.int32)
  y, pull = jax.vjp(lambda *a: grouped.grouped_linear(*a, sizes), x, weight)
  return y, *pull(jnp.cos(y))


def _attention():
  arrays = jax.random.normal(jax.random.key(0), (3, 1, 5, 2, 4))
  return [softmax.causal_attention(*arrays)]


def test_grouped_products_go_to_tokamax(monkeypatch):
  expected, calls = _grouped(), []

  def product(*args, **kwargs):
    calls.append(args)
    return jax.lax.ragged_dot_general(*args, **kwargs)

  _install(monkeypatch, ragged_dot_general=product)
  found = _grouped()
  assert len(calls) == 3
  for a, b in zip(found, expected):
    np.testing.assert_allclose(a, b, rtol=1e-6)


def test_attention_goes_to_tokamax(monkeypatch):
  expected, calls = _attention(), []

  def attend(*arrays, implementation, **kwargs):
    calls.append(implementation)
    return jax.nn.dot_product_attention(*arrays, **kwargs)

  _install(monkeypatch, dot_product_attention=attend)
  np.testing.assert_allclose(_attention()[0], expected[0], rtol=0, atol=1e-6)
  # The one that holds all pairs of tokens is not among them.
  assert calls == [("mosaic", "triton")]


@pytest.mark.parametrize(
  "error",
  [
    NotImplementedError("no"),
    ExceptionGroup("all failed", [NotImplementedError("no")]),
  ],
)
def test_what_it_cannot_do_is_done_here(monkeypatch, error):
  def attend(*arrays, **kwargs):
    raise error

  expected = _attention()
  _install(monkeypatch, dot_product_attention=attend)
  np.testing.assert_array_equal(_attention()[0], expected[0])


@pytest.mark.parametrize(
  "error",
  [
    ValueError("a mistake"),
    ExceptionGroup("mixed", [NotImplementedError("no"), ValueError("bad")]),
  ],
)
def test_other_errors_are_raised(monkeypatch, error):
  def attend(*arrays, **kwargs):
    raise error

  _install(monkeypatch, dot_product_attention=attend)
  with pytest.raises(type(error)):
    _attention()


def test_the_real_one_agrees(monkeypatch):
  """Its own plain form, since there is no kernel for a CPU."""
  tokamax = pytest.importorskip("tokamax")
  monkeypatch.setattr(sys, "argv", ["test"])  # It reads flags from there.
  expected, expected_attention = _grouped(), _attention()
  monkeypatch.setattr(
    optional_kernels, "tokamax", lambda name: getattr(tokamax, name)
  )
  for a, b in zip(_grouped(), expected):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
  # Refused there, and computed here.
  np.testing.assert_array_equal(_attention()[0], expected_attention[0])


def test_not_on_cpu(monkeypatch):
  _install(monkeypatch, platform="cpu", ragged_dot_general=None)
  assert optional_kernels.tokamax("ragged_dot_general") is None


def test_not_installed(monkeypatch):
  _install(monkeypatch)
  assert optional_kernels.tokamax("__name__") == "tokamax"
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  assert optional_kernels.tokamax("ragged_dot_general") is None

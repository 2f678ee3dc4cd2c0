# SPDX-License-Identifier: Apache-2.0
"""From a write to the next read: every backend against the definition."""

import functools

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_kernels import dispatch
from attnres_kernels import stream_mix
from tests import tiers

NAMES = "streams", "y", "write", "mix", "weight", "bias", "scale"


def make(tokens, width, columns, count=4, stream_dtype="float32", seed=0):
  """Arguments in float32, except the streams."""
  rng = np.random.default_rng(seed)
  draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
  streams = tuple(
    draw(*tokens, width).astype(stream_dtype) for _ in range(count)
  )
  mix = jnp.eye(count, dtype="float32").reshape(
    count, count, *(1,) * len(tokens)
  )
  return (
    streams,
    draw(*tokens, width),
    1 + 0.5 * draw(count, *tokens),
    mix + 0.3 * draw(count, count, *tokens),
    draw(count, width, columns) / width**0.5,
    draw(count),
    jnp.float32(0.7),
  )


def both(implementation, arguments, **options):
  """The results, and the gradients of all arguments."""
  f = functools.partial(stream_mix, implementation=implementation, **options)
  results, vjp = jax.vjp(f, *arguments)
  rng = np.random.default_rng(1)
  given = jax.tree.map(
    lambda a: jnp.asarray(rng.standard_normal(a.shape), a.dtype), results
  )
  return results, dict(zip(NAMES, vjp(given), strict=True))


def interpreted(*args, **kwargs):
  with dispatch.interpreted(pltpu.InterpretParams(detect_races=True)):
    return both("pallas_tpu", *args, **kwargs)


def compiled(implementation, *args, **kwargs):
  run = functools.partial(both, implementation, **kwargs)
  return jax.jit(run)(*args)


def check(found, wanted, tolerance):
  flat, _ = jax.tree_util.tree_flatten_with_path(wanted)
  for (path, b), a in zip(flat, jax.tree.leaves(found), strict=True):
    assert a.shape == b.shape and a.dtype == b.dtype
    a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
    np.testing.assert_allclose(
      a, b, rtol=0, atol=tolerance * (1e-6 + np.abs(b).max()),
      err_msg=jax.tree_util.keystr(path),
    )  # fmt: skip
    assert np.abs(a).max() > 0


class TestStreamMix:
  @pytest.mark.usefixtures("float64")
  def test_plain_jax_in_float64(self):
    arguments = jax.tree.map(
      lambda a: a.astype("float64"), make((2, 3), 8, 11, count=3)
    )
    wanted = compiled("reference", arguments, eps=1e-3)
    check(compiled("xla", arguments, eps=1e-3), wanted, 1e-12)
    found = compiled(None, arguments, eps=1e-3)
    check(found, wanted, 1e-12)

  # The last tile is a part of one, and the width no multiple of 128.
  @tiers.parametrize(
    "tokens,width,columns,count",
    [
      ((2, 100), 192, 24, 4),
      ((128,), 128, 1, 1),
      pytest.param((128,), 128, 5, 2, marks=pytest.mark.slow),
      pytest.param((130,), 640, 17, 3, marks=pytest.mark.slow),
    ],
    first=[(128,)],
  )
  def test_kernel(self, tokens, width, columns, count):
    arguments = make(tokens, width, columns, count)
    wanted = compiled("reference", arguments, eps=1e-3)
    check(interpreted(arguments, eps=1e-3), wanted, 2e-5)


class TestChecks:
  @pytest.mark.parametrize("name", NAMES[1:])
  def test_shapes(self, name, any_arguments):
    arguments = dict(zip(NAMES, make((3,), 8, 5, count=2)))
    arguments[name] = arguments[name][None]
    with pytest.raises(ValueError, match="must be"):
      stream_mix(*arguments.values())

  def test_columns(self):
    arguments = make((3,), 8, 1, count=2)
    with pytest.raises(ValueError, match="C >= 2"):
      stream_mix(*arguments)

  def test_what_does_not_fit(self):
    many = make((128,), 8, 9, 9, stream_dtype="bfloat16")
    many = (many[0], many[1].astype("bfloat16"), *many[2:])
    mixed = make((128,), 8, 5, 2, stream_dtype="bfloat16")
    shape = jax.ShapeDtypeStruct((128, 2**15), "float32")
    wide = (shape, shape), shape, *make((128,), 8, 5, 2)[2:]
    wide = (
      *wide[:4],
      jax.ShapeDtypeStruct((2, 2**15, 5), "float32"),
      *wide[5:],
    )
    for arguments, reason in (
      (make((3,), 8, 5, 2), "at least 128 tokens"),
      (many, "at most 8 streams, got 9"),
      (mixed, "need y and h in bfloat16"),
      (wide, "MiB of VMEM"),
    ):
      run = functools.partial(stream_mix, implementation="pallas_tpu")
      with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(run, *arguments)

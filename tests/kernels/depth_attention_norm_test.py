# SPDX-License-Identifier: Apache-2.0
"""depth_attention with a normalised first mixture, in float64 and compiled."""

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_kernels import depth_attention
from attnres_kernels import dispatch
from attnres_kernels import rms_norm
from tests.kernels import depth_attention_test
from tests.kernels import rms_norm_test
from tests.kernels import tpu_aot_test

EPS = depth_attention_test.EPS
NORM_EPS = rms_norm_test.EPS
BACKENDS = ("reference", "xla", "pallas_tpu", None)


def make(queries, sources, tokens, width, dtype="float32"):
  arrays = depth_attention_test.make(
    0, queries, sources, tokens, width, dtype, scale=0.1
  )
  gain = np.random.default_rng(1).normal(size=width)
  gain[0] = 0  # Nothing may be divided by it.
  return *arrays, jnp.asarray(gain, jnp.float32)


def oracle(query, sources, dout, dlse, gain):
  """Values and gradients in float64: the mixtures, then the norm of one."""
  out, lse = depth_attention_test.oracle(query, sources)
  first, dfirst, dgain = rms_norm_test.oracle(out[0], gain, dout[0])
  out = np.concatenate([first[None], out[1:]])
  dout = np.concatenate([dfirst[None], np.asarray(dout, np.float64)[1:]])
  gradients = depth_attention_test.oracle_gradients(query, sources, dout, dlse)
  return out, lse, *gradients, dgain


def run(implementation, query, sources, dout, dlse, gain, **options):
  options = dict(eps=EPS, norm_eps=NORM_EPS) | options

  @jax.jit
  def f(query, sources, dout, dlse, gain):
    def attend(query, sources, gain):
      return depth_attention(
        query, tuple(sources), norm_gain=gain, implementation=implementation,
        **options,
      )  # fmt: skip

    found, pull = jax.vjp(attend, query, sources, gain)
    return *found, *pull((dout, dlse))

  with dispatch.interpreted(pltpu.InterpretParams(detect_races=True)):
    return f(query, sources, dout, dlse, gain)


def check(found, expected, tolerance):
  for name, a, b in zip(NAMES, found, expected, strict=True):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    bound = tolerance * np.abs(b).max() + 1e-12
    np.testing.assert_allclose(a, b, rtol=0, atol=bound, err_msg=name)


NAMES = ("out", "lse", "dquery", "dsources", "dgain")


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("apart", (False, True))
@pytest.mark.parametrize(
  "shape",
  [(3, 4, (2, 10), 130), (1, 3, (16,), 128), (2, 1, (17,), 40)],
  ids=str,
)
def test_values_and_gradients(implementation, apart, shape):
  """Several queries, one, and one source, which is the mixture itself."""
  arrays = make(*shape)
  check(run(implementation, *arrays, apart=apart), oracle(*arrays), 5e-6)


@pytest.mark.parametrize("implementation", ("xla", "pallas_tpu"))
@pytest.mark.parametrize(
  "sources", (1, pytest.param(9, marks=pytest.mark.slow), 18)
)
def test_bfloat16(implementation, sources):
  """As exact as results in bfloat16 are, on either side of 16 sources."""
  _check_bfloat16(implementation, sources)


@pytest.mark.parametrize("implementation", ("xla", "pallas_tpu"))
@pytest.mark.parametrize("sources", (1, 3))
def test_no_eps(implementation, sources):
  """Rows of padding, whose rms is zero, add nothing to any gradient."""
  arrays = make(2, sources, (17,), 128)
  found, expected = (
    run(name, *arrays, eps=0.0, norm_eps=0.0)
    for name in (implementation, "reference")
  )
  check(found, expected, 5e-6)


def test_the_mixture_is_not_rounded_before_its_norm():
  arrays = make(3, 4, (20,), 136, "bfloat16")
  *_, found = run("xla", *arrays)
  *_, expected = oracle(*arrays)
  assert depth_attention_test.error(found, expected) < 4e-4


def test_too_many_queries_and_sources_for_a_norm():
  with pytest.raises(NotImplementedError, match="queries and sources"):
    run("pallas_tpu", *make(40, 100, (16,), 128))


@pytest.mark.parametrize("sources", (1, 3))
def test_groups_of_16_tokens(sources, monkeypatch):
  monkeypatch.setattr(dispatch, "tpu_kind", lambda: "TPU7x")
  _check_bfloat16("pallas_tpu", sources)


def _check_bfloat16(implementation, sources):
  arrays = make(3, sources, (20,), 136, "bfloat16")
  found = run(implementation, *arrays)
  dtypes = [str(a.dtype) for a in found]
  assert dtypes == ["bfloat16", "float32", "float32", "bfloat16", "float32"]
  for name, a, b in zip(NAMES, found, oracle(*arrays), strict=True):
    if name != "dquery" or sources > 1:  # The gradient of one logit is zero.
      assert depth_attention_test.error(a, b) < 4e-3, name


@pytest.mark.parametrize("implementation", ("reference", "xla", "pallas_tpu"))
def test_low_rank_keys_in_several_pieces(implementation):
  """Wider than one step of a product; the same as a norm behind it."""
  query, sources, dout, dlse, gain = make(2, 3, (16,), 1408)
  arrays = query[:, -150:], sources, dout, dlse, gain
  found = run(implementation, *arrays, rank=150)

  def plain(query, sources, gain):
    out, lse = depth_attention(
      query, tuple(sources), eps=EPS, rank=150, implementation="reference"
    )
    norm = dict(eps=NORM_EPS, implementation="xla")
    return jnp.stack([rms_norm(out[0], gain, **norm), out[1]]), lse

  with jax.enable_x64(True):
    wide = [jnp.asarray(np.asarray(a), jnp.float64) for a in arrays]
    query, sources, dout, dlse, gain = wide
    expected, pull = jax.vjp(plain, query, sources, gain)
    expected = *expected, *pull((dout, dlse))
  check(found, expected, 5e-6)


def test_float64():
  with jax.enable_x64(True):
    arrays = make(2, 3, (5,), 12)
    arrays = [jnp.asarray(np.asarray(a), jnp.float64) for a in arrays]
    check(run(None, *arrays), oracle(*arrays), 1e-13)


@pytest.mark.usefixtures("any_arguments")
def test_bad_arguments():
  query, sources, _, _, gain = make(2, 3, (5,), 8)
  with pytest.raises(ValueError, match=r"norm_gain must be \(8,\), got \(7,\)"):
    depth_attention(query, tuple(sources), norm_gain=gain[:7])
  with pytest.raises(ValueError, match="norm_eps=-1 must be"):
    depth_attention(query, tuple(sources), norm_gain=gain, norm_eps=-1)
  with pytest.raises(ValueError, match="separate sources and one head"):
    depth_attention(query, sources, norm_gain=gain)
  with pytest.raises(ValueError, match="separate sources and one head"):
    depth_attention(query, tuple(sources), norm_gain=gain, heads=2)
  with pytest.raises(NotImplementedError, match="no norm_gain; use rms_norm"):
    depth_attention(
      query, tuple(sources), norm_gain=gain, implementation="pallas_gpu"
    )


@pytest.mark.slow
@pytest.mark.needs("libtpu")
@pytest.mark.parametrize("chip", tuple(tpu_aot_test.CHIPS))
@pytest.mark.parametrize("shape", [(3, 9, 1024), (8, 1, 2048), (6, 17, 2304)])
def test_compiles(chip, shape):
  queries, sources, width = shape

  def f(query, gain, dout, dlse, *sources):
    def attend(query, gain, *sources):
      return depth_attention(query, sources, norm_gain=gain, apart=True)

    found, pull = jax.vjp(attend, query, gain, *sources)
    return *found, *pull((dout, dlse))

  tokens = 520
  arguments = [
    ((queries, width), jnp.float32),
    ((width,), jnp.float32),
    ((queries, tokens, width), None),
    ((queries, tokens), jnp.float32),
    *[((tokens, width), None)] * sources,
  ]
  text = tpu_aot_test.compile_for(chip, f, arguments, "bfloat16")
  assert text and "depth_attention_forward" in text
  assert "depth_attention_backward" in text and "rms_norm" not in text

# SPDX-License-Identifier: Apache-2.0
"""KDA: every backend against the recurrence, written again in NumPy."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_kernels import kda
from attnres_kernels import kda_step
from attnres_kernels import platforms
from tests import compare
from tests import jaxprs
from tests import tiers

PLAIN = ("reference", "xla")
NAMES = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dinitial")


def oracle(q, k, v, g, beta, state, segment_ids=None):
  """Kimi Linear, Eq. 1: one matrix per token and head, float64."""
  q, k, v, g, beta, state = map(np.float64, (q, k, v, g, beta, state))
  segment_ids = None if segment_ids is None else np.asarray(segment_ids)
  o, state = np.zeros_like(v), state.copy()
  for b, t, h in np.ndindex(q.shape[:3]):
    S, key, width = state[b, h], k[b, t, h], q.shape[-1]
    if segment_ids is not None and t:
      S = S * (segment_ids[b, t] == segment_ids[b, t - 1])
    forget = np.eye(width) - beta[b, t, h] * np.outer(key, key)
    S = forget @ np.diag(np.exp(g[b, t, h])) @ S
    S = S + beta[b, t, h] * np.outer(key, v[b, t, h])
    o[b, t, h] = S.T @ q[b, t, h] / np.sqrt(width)
    state[b, h] = S
  return o, state


def make(seed, batch, length, heads, key, value, dtype="float32"):
  """Arguments with log-decays from -0.02 to -7, and the two cotangents."""
  rng = np.random.default_rng(seed)

  def normal(*shape):
    return rng.normal(size=shape)

  token = (batch, length, heads)
  state = (batch, heads, key, value)
  k = normal(*token, key)
  k /= np.linalg.norm(k, axis=-1, keepdims=True)
  g = -np.exp(rng.uniform(-4, 2, size=(*token, key)))
  wide = "float64" if dtype == "float64" else "float32"
  arguments = (
    jnp.asarray(normal(*token, key), dtype),
    jnp.asarray(k, dtype),
    jnp.asarray(normal(*token, value), dtype),
    jnp.asarray(g, wide),
    jnp.asarray(rng.uniform(size=token), wide),
    jnp.asarray(normal(*state), wide),
  )
  cotangents = (
    jnp.asarray(normal(*token, value), dtype),
    jnp.asarray(normal(*state), wide),
  )
  return arguments, cotangents


def segments(seed, batch, length, number):
  """Ids that change at random places, and may come back."""
  rng = np.random.default_rng(seed)
  ids = np.sort(rng.integers(0, number, size=(batch, length)), axis=-1)
  return jnp.asarray(ids % 2, jnp.int32)


@functools.partial(
  jax.jit, static_argnums=0, static_argnames=("chunk_size", "scale", "save")
)
def call(implementation, *arguments, **options):
  *tokens, state = arguments
  return kda(
    *tokens, initial_state=state, implementation=implementation, **options
  )


@functools.partial(
  jax.jit, static_argnums=0, static_argnames=("chunk_size", "save")
)
def run(implementation, arguments, cotangents, **options):
  """Values and all gradients through the public function."""
  f = functools.partial(call, implementation, **options)
  return value_and_gradients(f, arguments, cotangents)


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(f, arguments, cotangents):
  values, vjp = jax.vjp(f, *arguments)
  return (*values, *vjp(cotangents))


def assert_all_close(actual, expected, tolerance):
  for name, a, b in zip(NAMES, actual, expected):
    scale = np.abs(b).max() + 1e-30
    np.testing.assert_allclose(
      a / scale, b / scale, atol=tolerance, rtol=0, err_msg=name
    )


class TestValues:
  @tiers.parametrize(
    "length,chunk_size,packed",
    [
      (1, 1, False),
      (9, 4, False),
      (25, 6, True),
      (70, 64, True),
      (7, 1, True),
      (7, 8, True),
    ],
    first=[9, 25],
  )
  def test_gradients_are_those_of_the_recurrence(
    self, length, chunk_size, packed
  ):
    with jax.enable_x64(True):
      arguments, cotangents = make(4, 2, length, 2, 3, 5, "float64")
      ids = segments(5, 2, length, 5) if packed else None
      f = functools.partial(run, arguments=arguments, cotangents=cotangents)
      expected = f("reference", segment_ids=ids)
      # The recurrence is differentiated by autodiff, so check its values.
      o_, state_ = oracle(*arguments, ids)
      np.testing.assert_allclose(expected[0], o_, atol=1e-12)
      np.testing.assert_allclose(expected[1], state_, atol=1e-12)
      actual = f("xla", segment_ids=ids, chunk_size=chunk_size)
      assert_all_close(actual, expected, 1e-10)

  @tiers.parametrize("dtype", ["float32", "bfloat16"], first=0)
  def test_gradients_in_low_precision(self, dtype):
    # Two chunks and a bit, one reset at the start of one, one inside.
    # Two heads share a grid step, of one sequence or of two.
    batch, heads = (1, 2) if dtype == "float32" else (2, 1)
    arguments, cotangents = make(9, batch, 36, heads, 128, 128, dtype)
    ids = np.repeat([0, 1, 0], [16, 9, 11])
    ids = jnp.asarray([ids, np.zeros_like(ids)][:batch])
    given = arguments, cotangents
    wide = jax.tree.map(lambda x: x.astype("float32"), given)
    exact = run("reference", *wide, segment_ids=ids)
    plain = run("xla", *given, segment_ids=ids, chunk_size=16)
    with platforms.interpreted():
      kernel = run("pallas_tpu", *given, segment_ids=ids, chunk_size=16)
    limit = 2e-6 if dtype == "float32" else 1e-2
    assert (plain[0].dtype, plain[1].dtype) == (dtype, jnp.float32)
    for name, a, b, c in zip(NAMES, kernel, plain, exact):
      assert a.dtype == b.dtype, name
      assert compare.error(b, c) < limit, name
      assert compare.error(a, c) < limit, name
      if dtype == "bfloat16":
        # No worse than plain JAX with the same operands.
        assert compare.error(a, c) < 1.3 * compare.error(b, c), name

  @pytest.mark.slow
  @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
  @pytest.mark.parametrize(
    "heads,chunk_size", [(4, 32), (2, 64), (6, 64), (1, 128)]
  )
  def test_heads_side_by_side(self, dtype, heads, chunk_size):
    # Equal keys, the hardest systems, in the last head; a reset in a chunk.
    length = chunk_size + 9
    given = make(15, 1, length, heads, 128, 128, dtype)
    (q, k, v, g, beta, state), cotangents = given
    k = k.at[:, :, -1].set(k[:, :1, -1])
    beta = beta.at[:, :, -1].set(1)
    g = g.at[:, :, -1].multiply(0.01).at[:, 5].set(-1e4)
    given = (q, k, v, g, beta, state), cotangents
    with platforms.interpreted():
      kernel = run("pallas_tpu", *given, chunk_size=chunk_size)
    plain = run("xla", *given, chunk_size=chunk_size)
    wide = jax.tree.map(np.float64, given)
    with jax.enable_x64(True):
      expected = run("xla", *wide, chunk_size=chunk_size)
    limit = 2e-6 if dtype == "float32" else 0
    for name, a, b, c in zip(NAMES, kernel, plain, expected):
      # Or no worse than plain JAX with the same operands.
      assert compare.error(a, c) < max(limit, 1.3 * compare.error(b, c)), name

  @pytest.mark.more
  def test_what_is_saved_changes_nothing(self):
    given = make(14, 1, 20, 1, 128, 128, "bfloat16")
    with platforms.interpreted():
      a, b = (
        run("pallas_tpu", *given, chunk_size=16, save=save)
        for save in ("chunks", "arguments")
      )
      checkpointed = value_and_gradients(
        jax.checkpoint(functools.partial(call, "pallas_tpu", chunk_size=16)),
        *given,
      )
    jax.tree.map(np.testing.assert_array_equal, a, b)
    jax.tree.map(np.testing.assert_array_equal, a, checkpointed)

  def test_pallas_tpu_says_why_not(self):
    for pattern, shape, dtype, chunk_size in (
      ("lowered for cpu", (1, 16, 1, 128, 128), "float32", 16),
      ("128 wide: q \\(1, 16, 1, 64\\)", (1, 16, 1, 64, 128), "float32", 16),
      ("got float16", (1, 16, 1, 128, 128), "float16", 16),
      ("chunk_size must be.*48", (1, 16, 1, 128, 128), "float32", 48),
    ):
      arguments, _ = make(9, *shape, dtype)
      with pytest.raises(NotImplementedError, match=pattern):
        call("pallas_tpu", *arguments, chunk_size=chunk_size)

  def test_steps_are_the_sequence(self):
    arguments, _ = make(8, 2, 5, 2, 4, 3)
    *tokens, state = arguments
    o, last = call(None, *tokens, state, chunk_size=4)
    for t in range(5):
      o_t, state = jax.jit(kda_step)(*(x[:, t] for x in tokens), state)
      np.testing.assert_allclose(o_t, o[:, t], atol=1e-5)
    np.testing.assert_allclose(state, last, atol=1e-5)


class TestMemory:
  """The purpose of the delta rule: a key-value memory that can forget."""

  @pytest.mark.parametrize("implementation", PLAIN)
  @pytest.mark.parametrize("strength", (-1e4, -np.inf))
  @pytest.mark.parametrize("at", (0, 3, 4, 6))
  def test_strong_decay_is_an_exact_reset(self, implementation, strength, at):
    (q, k, v, g, beta, state), cotangents = make(11, 1, 9, 2, 4, 3)
    g = g.at[:, at].set(strength)
    arguments = q, k, v, g, beta, state
    o, last, *gradients = run(
      implementation, arguments, cotangents, chunk_size=4
    )
    o_, last_ = oracle(*(x[:, at:] for x in arguments[:-1]), 0 * state)
    np.testing.assert_allclose(o[:, at:], o_, atol=2e-6)
    np.testing.assert_allclose(last, last_, atol=2e-6)
    for gradient in gradients:
      assert np.isfinite(gradient).all()
    # Nothing of the first state remains, and more decay changes nothing.
    np.testing.assert_array_equal(gradients[3][:, at], 0)
    if at == 0:
      np.testing.assert_array_equal(gradients[5], 0)

  @tiers.parametrize("dtype", ["float32", "bfloat16"])
  def test_long_sequence_with_strong_decay(self, dtype):
    length = 1 << 15
    (q, k, v, g, beta, state), _ = make(12, 1, length, 1, 16, 8, dtype)
    strength = np.repeat([-1e-5, -0.1, -3, -20], 4)
    g = jnp.asarray(strength * np.exp(g), "float32")  # With some variation.
    o, last = call(None, q, k, v, g, beta, state)
    o_, last_ = call("reference", q, k, v, g, beta, state)
    for x in (o, last):
      assert np.isfinite(np.float32(x)).all()
    tolerance = 2e-5 if dtype == "float32" else 2e-2
    assert compare.error(o, o_) < tolerance
    assert compare.error(o[:, -64:], o_[:, -64:]) < tolerance
    assert compare.error(last, last_) < tolerance

  def test_equal_keys_do_not_spoil_the_inverse(self):
    # The powers of this A reach 1e18 in a chunk of 64; its inverse is 0, +-1.
    _, _, v, _, _, _ = make(13, 1, 64, 1, 4, 4)[0]
    k = jnp.zeros((1, 64, 1, 4)).at[..., 0].set(1)
    beta, g = jnp.ones((1, 64, 1)), jnp.zeros((1, 64, 1, 4))
    o, _ = call("xla", k, k, v, g, beta, jnp.zeros((1, 1, 4, 4)), scale=1.0)
    np.testing.assert_allclose(o, v, atol=1e-5)


class TestTransform:
  @pytest.mark.more
  def test_sharded_batch_needs_no_collective(self):
    mesh = jax.make_mesh(
      (4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    batch = jax.sharding.PartitionSpec("data")
    arguments, cotangents = make(32, 4, 6, 2, 4, 3)
    f = functools.partial(run, None, chunk_size=4)
    expected = f(arguments, cotangents)
    sharding = jax.sharding.NamedSharding(mesh, batch)
    f = jax.jit(f, in_shardings=sharding, out_shardings=sharding)
    text = f.lower(arguments, cotangents).compile().as_text()
    for name in ("all-reduce", "all-gather", "all-to-all", "permute"):
      assert name not in text
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5),
      f(arguments, cotangents),
      expected,
    )

  @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
  def test_nothing_is_saved_but_the_arguments(self, dtype):
    arguments, _ = make(33, 1, 64, 1, 8, 8, dtype)
    saved = jaxprs.saved(functools.partial(call, "xla"), *arguments)
    assert saved == []
    # The recurrence does keep a state per token, so the count can see one.
    saved = jaxprs.saved(functools.partial(call, "reference"), *arguments)
    assert max(x.size for x in saved) >= 64 * 8 * 8

  def test_kernels_save_what_they_are_told(self):
    arguments, _ = make(38, 1, 64, 2, 128, 128, "bfloat16")

    def saved_by(save):
      f = functools.partial(call, "pallas_tpu", chunk_size=32, save=save)
      with platforms.interpreted():
        return sorted(x.shape for x in jaxprs.saved(f, *arguments))

    assert saved_by("arguments") == []
    squares = [(1, 1, 2, 32, 64)] * 3
    assert saved_by("chunks") == [*squares, (1, 2, 2, 128, 128), (1, 64, 256)]

  def test_the_first_pass_of_a_checkpoint_saves_nothing(self):
    arguments, _ = make(39, 1, 32, 1, 128, 128, "bfloat16")
    layer = functools.partial(call, "pallas_tpu", chunk_size=32)

    @jax.jit
    def gradients(*arguments):
      loss = lambda *args: jnp.sum(jnp.sin(jax.checkpoint(layer)(*args)[0]))
      return jax.grad(loss, range(6))(*arguments)

    text = gradients.trace(*arguments).lower(lowering_platforms=("tpu",))
    kernels = re.findall(r'kernel_name = "(kda_\w+)"', text.as_text())
    assert kernels == ["kda_forward", "kda_forward_saving", "kda_backward"]

  def test_no_program_holds_a_state_per_token(self):
    length, width = 64, 8
    arguments, cotangents = make(34, 1, length, 1, width, width)
    f = functools.partial(run, "xla", chunk_size=16)
    jaxpr = jax.make_jaxpr(f)(arguments, cotangents)
    largest = max(x.size for x in jaxprs.arrays(jaxpr))
    # Of the order of the arguments: rows of width 8, and 16 scores per row.
    assert largest <= 2 * length * 16
    assert largest < length * width * width


@pytest.mark.usefixtures("any_arguments")
class TestBadInput:
  def bad(self, pattern, error=ValueError, **changes):
    q, k, v, g, beta, state = make(40, 2, 6, 2, 4, 3)[0]
    options = dict(q=q, k=k, v=v, g=g, beta=beta, initial_state=state)
    with pytest.raises(error, match=pattern):
      kda(**(options | changes))

  @pytest.mark.parametrize(
    "name,shape,pattern",
    [
      ("k", (2, 6, 2, 5), r"k must.*K=4.*q \(2, 6, 2, 4\), k \(2, 6, 2, 5\)"),
      ("v", (2, 7, 2, 3), r"v must.*T=6.*\(2, 6, 2, 4\).*\(2, 7, 2, 3\)"),
      ("beta", (2, 6, 2, 1), r"B, T, H\].*\(2, 6, 2, 1\).*q \(2, 6, 2, 4\)"),
      ("initial_state", (2, 2, 3, 4), r"\(2, 2, 4, 3\), got \(2, 2, 3, 4\)"),
      ("segment_ids", (6,), r"\(2, 6\), got \(6,\).*\(2, 6, 2, 4\)"),
    ],
  )
  def test_shapes(self, name, shape, pattern):
    self.bad(pattern, **{name: jnp.ones(shape)})

  def test_values(self):
    self.bad("chunk_size=0", chunk_size=0)
    self.bad("save='all' is not one of .'chunks', 'arguments'", save="all")
    self.bad("floating point, got int32", v=jnp.ones((2, 6, 2, 3), int))
    self.bad("integers, got float32", segment_ids=jnp.ones((2, 6)))
    self.bad("pallas_tpu", implementation="cuda")
    none = jnp.ones((2, 6, 2, 0))
    self.bad("K >= 1", q=none, k=none, g=none, initial_state=None)
    self.bad("no pallas_gpu", NotImplementedError, implementation="pallas_gpu")

  def test_step(self):
    q, k, v, g, beta, state = make(41, 2, 1, 2, 4, 3)[0]
    first = [x[:, 0] for x in (q, k, v, g, beta)]
    with pytest.raises(ValueError, match=r"state must.*K=4.*\(2, 2, 3, 4\)"):
      kda_step(*first, jnp.ones((2, 2, 3, 4)))

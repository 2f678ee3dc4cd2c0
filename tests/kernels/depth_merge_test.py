# SPDX-License-Identifier: Apache-2.0
"""Phase 2: two phases equal one softmax, on every backend, with gradients."""

import functools

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_kernels import Row
from attnres_kernels import Sinks
from attnres_kernels import combine_mixtures
from attnres_kernels import depth_attention
from attnres_kernels import depth_merge
from attnres_kernels import depth_merge_norm
from attnres_kernels import dispatch

ALL = ("reference", "xla", "pallas_tpu")


def make(tokens, width, sources=3, seed=0):
  rng = np.random.default_rng(seed)
  query = jnp.asarray(rng.normal(size=(width,)) * 0.5, jnp.float32)
  shape = (sources, *tokens, width)
  return query, jnp.asarray(rng.normal(size=shape), jnp.float32)


@jax.jit
def one_softmax(query, sources):
  out, lse = depth_attention(query[None], sources, implementation="reference")
  return out[0], lse[0]


def rms_norm(x, eps):
  return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps)


class TestDepthMerge:
  @pytest.mark.parametrize("implementation", ALL)
  @pytest.mark.parametrize("tokens,width", (((3,), 40), ((2, 5), 16)))
  def test_two_phases_are_one_softmax(self, implementation, tokens, width):
    query, source = make(tokens, width)
    cotangent = jnp.cos(jnp.arange(source[0].size)).reshape(source[0].shape)

    def whole(query, *sources):
      return jnp.vdot(one_softmax(query, sources)[0], cotangent)

    def phases(query, *sources):
      out, lse = one_softmax(query, sources[:-1])
      h = depth_merge(
        out, lse, query, sources[-1], implementation=implementation
      )
      return jnp.vdot(h, cotangent)

    gradient = functools.partial(jax.value_and_grad, argnums=tuple(range(4)))
    wanted = jax.jit(gradient(whole))(query, *source)
    with dispatch.interpreted(pltpu.InterpretParams(detect_races=True)):
      got = jax.jit(gradient(phases))(query, *source)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, wanted
    )

  @pytest.mark.parametrize("implementation", ALL)
  @pytest.mark.parametrize("update", (False, True))
  def test_fused_form(self, implementation, update):
    tokens, width = (20,), 24
    query, source = make(tokens, width, 6)
    gain = 1 + query
    out, lse = one_softmax(query, tuple(source[:2]))
    arrays = [out, lse, query, source[2], source[3] if update else None, gain]
    argnums = tuple(i for i, x in enumerate(arrays) if x is not None)

    def score(total, normed):
      return jnp.vdot(total, source[4]) + jnp.vdot(normed, source[5])

    def plain(out, lse, query, partial, update, gain):
      total = partial if update is None else partial + update
      merged = depth_merge(
        out, lse, query, total, eps=1e-5, implementation="reference"
      )
      return score(total, rms_norm(merged, 1e-3) * gain[None])

    def fused(*arrays):
      return score(
        *depth_merge_norm(
          *arrays, eps=1e-5, norm_eps=1e-3, implementation=implementation
        )
      )

    gradient = functools.partial(jax.value_and_grad, argnums=argnums)
    wanted = jax.jit(gradient(plain))(*arrays)
    with dispatch.interpreted(pltpu.InterpretParams(detect_races=True)):
      got = jax.jit(gradient(fused))(*arrays)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), got, wanted
    )

  @pytest.mark.parametrize("implementation", ALL)
  @pytest.mark.parametrize("update", (False, True))
  def test_rows_of_arrays(self, implementation, update):
    """The same as without, of which row it may not be known in advance."""
    query, source = make((20,), 24, 10)
    stack, (partial, more), cotangents = source[:3], source[3:5], source[5:]
    # What other rows contain does not matter.
    stack = stack.at[::2].set(jnp.nan)
    sums = jnp.stack([jnp.full_like(partial, jnp.nan), partial])
    more = more if update else None

    def score(stack, query, sums, more, i, rows):
      of_rows = dict(out_row=Row(stack, i), partial_row=Row(sums, i))
      total, normed = depth_merge_norm(
        stack[i], cotangents[0, :, 0], query, sums[i], more, 1 + query,
        implementation=implementation, **(of_rows if rows else {}),
      )  # fmt: skip
      merged = depth_merge(
        stack[i], cotangents[0, :, 0], query, sums[i],
        implementation=implementation, **(of_rows if rows else {}),
      )  # fmt: skip
      terms = zip((total, normed, merged), cotangents[1:])
      return sum(jnp.vdot(*term) for term in terms)

    argnums = (0, 1, 2, 3) if update else (0, 1, 2)
    gradient = jax.value_and_grad(score, argnums)
    found = []
    with dispatch.interpreted():
      for rows in (True, False):
        run = jax.jit(functools.partial(gradient, rows=rows))
        found.append(run(stack, query, sums, more, jnp.int32(1)))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert np.abs(found[0][1][0][1]).max() > 0.1

  def test_the_kernel_reads_the_rows(self):
    query, source = make((4, 16), 24, 4)
    lse = source[0, ..., 0]
    merge = functools.partial(depth_merge, implementation="pallas_tpu")
    rows = dict(out_row=Row(source, 2), partial_row=Row(source, 3))
    other = jnp.full_like(source[0], jnp.nan)
    with dispatch.interpreted():
      found = merge(other, lse, query, other, **rows)
      expected = merge(source[2], lse, query, source[3])
    np.testing.assert_array_equal(found, expected)

  @pytest.mark.parametrize("implementation", ALL[1:])
  @pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
  @pytest.mark.parametrize("tokens,rows", ((20, False), (256, True)))
  def test_sinks(self, implementation, dtype, tokens, rows):
    """Gradients become a row, and are added to a sum in two parts."""
    query, source = make((tokens,), 24, 8)
    source = source.astype(dtype)
    out, partial, dnormed, *before = source[:6]
    lse, gain, i = source[6, :, 0].astype(jnp.float32), 1 + query, jnp.int32(1)
    before[1:] = before[1], before[2] / 256

    def wanted(out, partial, lse, query, gain):
      merged = depth_merge(out, lse, query, partial, implementation="reference")
      return rms_norm(merged, 1e-6) * gain[None]

    exact = [x.astype(jnp.float32) for x in (out, partial)]
    pulled = jax.jit(lambda x, dy: jax.vjp(wanted, *x)[1](dy))
    exact = *exact, lse, query, gain
    dout, dpartial, *expected = pulled(exact, dnormed.astype(jnp.float32))
    where = {}
    if rows:
      where = dict(
        out_row=Row(source, 0), partial_row=Row(source, jnp.int32(1))
      )

    def run(sinks, out, partial, lse, query, gain):
      sinks, normed = depth_merge_norm(
        out, lse, query, partial, None, gain,
        sinks=Sinks(Row(sinks[0], i), *sinks[1:]), **where,
        implementation=implementation,
      )  # fmt: skip
      return (sinks.out.stack, sinks.high, sinks.low), normed

    # What is in the sinks themselves does not matter.
    nothing = (jnp.full((3, *out.shape), jnp.nan, dtype),) + tuple(
      jnp.full_like(out, jnp.nan) for _ in range(2)
    )
    collected = jnp.stack([before[0], out * jnp.nan, out]), *before[1:]
    with dispatch.interpreted(pltpu.InterpretParams(detect_races=True)):
      pulled = jax.jit(lambda x, dy: jax.vjp(run, *x)[1](dy))
      (stack, high, low), no_dout, no_dpartial, *found = pulled(
        (nothing, out, partial, lse, query, gain), (collected, dnormed)
      )
    np.testing.assert_array_equal(stack[::2], collected[0][::2])
    digits = 3e-5 if dtype == "float32" else 2**-8
    np.testing.assert_allclose(
      stack[1].astype(jnp.float32), dout, atol=digits, rtol=digits
    )
    high, low, *old = (
      x.astype(jnp.float32) for x in (high, low, *collected[1:])
    )
    # Rounded once, to 16 bits; in another pass, also the new term, to 8.
    total = sum(old) + dpartial
    another = implementation == "xla" or tokens == 20
    rounded = another and dtype == "bfloat16"
    limit = 3e-5 + rounded * 2**-8 * np.abs(dpartial)
    assert (np.abs(high + low - total) <= limit + 2**-16 * np.abs(total)).all()
    # Half of the last of 8 bits.
    assert (np.abs(low) <= 2**-8 * np.abs(high)).all()
    assert not no_dout.any() and not no_dpartial.any()
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
      found,
      expected,
    )

  @pytest.mark.parametrize("implementation", ALL)
  @pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
  def test_carrying_on(self, implementation, dtype):
    """The sum stays as wide as it was, and its gradients come as one."""
    query, source = make((20,), 24, 6)
    out, lse, gain = source[0].astype(dtype), source[1, :, 0], 1 + query
    partial, dtotal, dnormed = source[2], source[3], source[4].astype(dtype)

    def apart(out, lse, query, partial, gain):
      merged = depth_merge(out, lse, query, partial, implementation="reference")
      return partial, rms_norm(merged, 1e-6) * gain[None]

    def together(out, lse, query, partial, gain):
      return depth_merge_norm(
        out, lse, query, partial, None, gain,
        carry_on=True, implementation=implementation,
      )  # fmt: skip

    def pulled(function, dtotal, dnormed, *arrays):
      return jax.vjp(function, *arrays)[1]((dtotal, dnormed))

    arrays = lse, query, partial, gain
    exact = out.astype(jnp.float32), *arrays
    wide = dtotal, dnormed.astype(jnp.float32)
    wanted = jax.jit(functools.partial(pulled, apart))(*wide, *exact)
    with dispatch.interpreted(pltpu.InterpretParams(detect_races=True)):
      total, normed = jax.jit(together)(out, *arrays)
      found = jax.jit(functools.partial(pulled, together))(
        dtotal, dnormed, out, *arrays
      )
    np.testing.assert_array_equal(total, partial)
    assert total.dtype == jnp.float32 and normed.dtype == dtype
    dpartial = found[3]
    assert dpartial.dtype == jnp.float32
    if implementation != "reference":
      # Rounded: a product reads it in this dtype in any case.
      np.testing.assert_array_equal(dpartial, dpartial.astype(dtype))
    digits = 3e-5 if dtype == "float32" else 2**-6
    for a, b in zip(found, wanted, strict=True):
      scale = np.abs(b).max()
      np.testing.assert_allclose(
        a.astype(jnp.float32), b, rtol=0, atol=digits * scale
      )

  # Autodiff of the reference subtracts what cancels.
  @pytest.mark.parametrize("implementation", ALL[1:])
  @pytest.mark.parametrize("size", (0.0, 1e-3))
  def test_small_partial_sum_keeps_the_digits(self, implementation, size):
    query, source = make((4, 2), 24, 5)
    out, partial, gain, *cotangents = (*source[:2], 1 + query, *source[3:])
    arrays = (out, source[2, ..., 0], query, size * partial, None, gain)

    def gradients(implementation, arrays, cotangents):
      f = functools.partial(depth_merge_norm, implementation=implementation)
      pull = lambda arrays, cotangents: jax.vjp(f, *arrays)[1](cotangents)
      found = jax.jit(pull)(arrays, cotangents)
      return jax.tree.map(np.asarray, found)

    given = arrays, tuple(cotangents)
    with dispatch.interpreted():
      got = gradients(implementation, *given)
    with jax.enable_x64(True):
      given = jax.tree.map(lambda x: x.astype("float64"), given)
      wanted = gradients("reference", *given)
    for actual, exact in zip(jax.tree.leaves(got), jax.tree.leaves(wanted)):
      scale = np.abs(exact).max()
      np.testing.assert_allclose(actual, exact, rtol=0, atol=3e-5 * scale)

  @pytest.mark.parametrize("implementation", ALL[1:])
  @pytest.mark.parametrize("how", ("vmap", "remat"))
  def test_transformed(self, implementation, how):
    query, source = make((2, 5), 16, 3)
    f = functools.partial(depth_merge_norm, implementation=implementation)

    def loss(out, lse, partial, update):
      total, normed = one(out, lse, query, partial, update, 1 + query)
      return jnp.sum(jnp.sin(total)) + jnp.sum(jnp.cos(normed))

    arrays = (source[0], source[0, ..., 0], *source[1:])
    argnums = tuple(range(4))
    with dispatch.interpreted():
      one = f
      plain = jax.jit(jax.grad(loss, argnums))(*arrays)
      if how == "vmap":
        one = jax.vmap(f, in_axes=(0, 0, None, 0, 0, None))
      again = jax.checkpoint(loss) if how == "remat" else loss
      again = jax.jit(jax.grad(again, argnums))(*arrays)
    for a, b in zip(again, plain):
      np.testing.assert_allclose(a, b, atol=1e-6)

  @pytest.mark.parametrize("implementation", ALL)
  @pytest.mark.parametrize("lse", (np.inf, -np.inf))
  def test_infinite_log_normaliser(self, implementation, lse):
    query, source = make((4,), 16)
    out, partial, cotangent = source

    def f(out, lse, query, partial):
      h = depth_merge(out, lse, query, partial, implementation=implementation)
      return jnp.vdot(h, cotangent), h

    lse_T = jnp.full((4,), lse, jnp.float32)
    with dispatch.interpreted():
      gradient = jax.jit(jax.grad(f, (0, 1, 2, 3), has_aux=True))
      grads, h = gradient(out, lse_T, query, partial)
    # +inf: the partial does not count; -inf: only the partial counts.
    kept, dropped = (0, 3) if lse > 0 else (3, 0)
    np.testing.assert_array_equal(h, (out, None, None, partial)[kept])
    np.testing.assert_array_equal(grads[kept], cotangent)
    np.testing.assert_array_equal(grads[dropped], 0)
    np.testing.assert_array_equal(grads[1], 0)
    np.testing.assert_array_equal(grads[2], 0)

  @pytest.mark.parametrize("implementation", ALL)
  def test_wide_partial_beside_narrow_mixture(self, implementation):
    query, source = make((16,), 24)
    out, partial, update = source
    with dispatch.interpreted():
      total, normed = depth_merge_norm(
        out.astype(jnp.bfloat16),
        jnp.zeros((16,)),
        query,
        partial,
        update.astype(jnp.bfloat16),
        jnp.ones((24,)),
        implementation=implementation,
      )
    assert total.dtype == jnp.float32
    assert normed.dtype == jnp.bfloat16
    exact = partial + update.astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_allclose(total, exact, rtol=1e-6)

  @pytest.mark.parametrize("implementation", ["reference", "xla"])
  def test_gradients_in_float64(self, implementation):
    with jax.enable_x64(True):
      query, source = make((2,), 8, 4)
      query, source = query.astype("float64"), source.astype("float64")
      lse = source[3, ..., 0]
      f = functools.partial(depth_merge_norm, implementation=implementation)

      @jax.jit
      def loss(out, lse, query, partial, update, gain):
        total, normed = f(out, lse, query, partial, update, gain)
        return jnp.sum(total**2) + jnp.sum(jnp.sin(normed))

      arrays = [source[0], lse, query, source[1], source[2], query + 1]
      gradients = jax.jit(jax.grad(loss, range(6)))(*arrays)
      step = 1e-6
      for i, gradient in enumerate(gradients):
        direction = jnp.cos(jnp.arange(arrays[i].size)).reshape(arrays[i].shape)
        ends = []
        for sign in (1, -1):
          moved = list(arrays)
          moved[i] = moved[i] + sign * step * direction
          ends.append(loss(*moved))
        slope = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(
          jnp.vdot(gradient, direction), slope, rtol=1e-7
        )

  def test_combining_is_associative_and_exact(self):
    query, source = make((5,), 16, 6)
    parts = [one_softmax(query, tuple(source[i : i + 2])) for i in (0, 2, 4)]
    combine = jax.jit(combine_mixtures)
    left = combine(*combine(*parts[0], *parts[1]), *parts[2])
    right = combine(*parts[0], *combine(*parts[1], *parts[2]))
    whole = one_softmax(query, tuple(source))
    for a, b, c in zip(left, right, whole):
      np.testing.assert_allclose(a, c, atol=1e-6)
      np.testing.assert_allclose(b, c, atol=1e-6)

  def test_combining_empty_sets(self):
    empty = jnp.zeros((2, 4)), jnp.full((2,), -jnp.inf)
    out, lse = combine_mixtures(*empty, *empty)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)
    gradient = jax.grad(
      lambda x: jnp.sum(combine_mixtures(x, *empty[1:], *empty)[0])
    )
    np.testing.assert_array_equal(gradient(empty[0]), 0)


@pytest.mark.usefixtures("any_arguments")
class TestBadInput:
  @pytest.mark.parametrize(
    "out,lse,query,partial,message",
    [
      ((3, 9), (3,), (8,), (3, 8), r"\(3, 9\).*\(8,\)"),
      ((3, 8), (4,), (8,), (3, 8), r"\(4,\).*\(3, 8\)"),
      ((3, 8), (3,), (2, 8), (3, 8), r"\[D\].*\(2, 8\)"),
      ((3, 8), (3,), (8,), (4, 8), r"\(4, 8\).*\(3, 8\)"),
      ((3, 0), (3,), (0,), (3, 0), "D >= 1"),
    ],
  )
  def test_shapes(self, out, lse, query, partial, message):
    with pytest.raises(ValueError, match=message):
      depth_merge(*map(jnp.ones, (out, lse, query, partial)))

  @pytest.mark.parametrize(
    "stack,index,message",
    [
      (jnp.ones((2, 4, 8)), 0, r"out \(3, 8\) float32 is no row .*\(2, 4, 8\)"),
      (jnp.ones((2, 3, 8), jnp.bfloat16), 0, "no row of .*bfloat16"),
      (jnp.ones((2, 3, 8)), 2, r"cannot be row 2 of an array \(2, 3, 8\)"),
      (
        jnp.ones((2, 3, 8)),
        jnp.ones(1, jnp.int32),
        r"scalar, got int32 \(1,\)",
      ),
      (jnp.ones((2, 3, 8)), jnp.float32(1), "scalar, got float32"),
    ],
  )
  def test_rows(self, stack, index, message):
    x = jnp.ones((3, 8))
    with pytest.raises(ValueError, match=message):
      depth_merge(x, x[:, 0], x[0], x, out_row=Row(stack, index))

  @pytest.mark.parametrize(
    "change,message",
    [
      (dict(high=jnp.ones((2, 8))), r"sink high \(2, 8\) .* \(3, 8\)"),
      (dict(low=jnp.ones((3, 8), jnp.bfloat16)), "sink low .* bfloat16"),
      (dict(out=Row(jnp.ones((2, 4, 8)), 0)), "no row of"),
    ],
  )
  def test_sinks(self, change, message):
    x = jnp.ones((3, 8))
    sinks = Sinks(Row(x[None], 0), x, x)
    with pytest.raises(ValueError, match=message):
      sinks = sinks._replace(**change)
      depth_merge_norm(x, x[:, 0], x[0], x, None, x[0], sinks=sinks)

  @pytest.mark.parametrize(
    "implementation,update", [(None, 1), ("reference", 0)]
  )
  def test_no_place_for_sinks(self, implementation, update):
    x = jnp.ones((3, 8))
    with pytest.raises(ValueError, match="not with an update, nor"):
      depth_merge_norm(
        x, x[:, 0], x[0], x, x if update else None, x[0],
        sinks=Sinks(Row(x[None], 0), x, x), implementation=implementation,
      )  # fmt: skip

  @pytest.mark.parametrize("name", ("update", "sinks", "partial_row"))
  def test_nothing_else_to_carry_on(self, name):
    x = jnp.ones((3, 8))
    update, more = None, {}
    if name == "update":
      update = x
    elif name == "sinks":
      more["sinks"] = Sinks(Row(x[None], 0), x, x)
    else:
      more["partial_row"] = Row(x[None], 0)
    with pytest.raises(ValueError, match=f"carry_on=True .* with {name}"):
      depth_merge_norm(x, x[:, 0], x[0], x, update, x[0], carry_on=True, **more)

  def test_update_and_gain(self):
    x, lse, query = jnp.ones((3, 8)), jnp.ones(3), jnp.ones(8)
    with pytest.raises(ValueError, match=r"update \(2, 8\).*\(3, 8\)"):
      depth_merge_norm(x, lse, query, x, x[:2], query)
    for name in ("eps", "norm_eps"):
      with pytest.raises(ValueError, match=f"{name}=-1 must be a finite"):
        depth_merge_norm(x, lse, query, x, x, query, **{name: -1})
    with pytest.raises(ValueError, match=r"gain \(9,\).*\(8,\)"):
      depth_merge_norm(x, lse, query, x, x, jnp.ones(9))

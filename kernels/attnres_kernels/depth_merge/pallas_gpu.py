# SPDX-License-Identifier: Apache-2.0
"""Phase 2 on Nvidia GPUs (from Hopper on), in Pallas Mosaic GPU.

One warpgroup per token computes the sums that determine the weights, then the
sum of squares of the mixture, then the result tile by tile. A token's row is a
few kilobytes, so all passes except the first read it from the nearest cache,
and every array is read from memory once. The backward pass loops over tokens
and keeps the gradients of query and gain in shared memory, one part per thread
block; the parts are added up in a fixed order afterwards.

Never executed on a GPU: values are checked in interpret mode, and the kernels
are lowered for H100 and H200 on a CPU.
"""

import jax
import jax.numpy as jnp

from attnres_kernels import warpgroup
from attnres_kernels.depth_merge import xla


def why_not(function, *args, eps, norm_eps, heads=1, rank=None):
  """The reason why these arguments cannot run, or None."""
  if heads > 1 or rank is not None:
    return f"one head with keys of the full width, got {heads=}, {rank=}"
  del eps, norm_eps
  width = args[0].shape[-1]
  arrays = [x for x in args if x is not None and not isinstance(x, tuple)]
  reason = warpgroup.why_not(width, arrays)
  if reason is not None or function == "forward":
    return reason
  tiles = warpgroup.Tiles(width)
  if 2 * tiles.number * tiles.size * 4 > warpgroup.SHARED_BYTES // 2:
    return f"the query and gain gradients of width {width} exceed shared memory"
  return None


def forward(
  out_TD,
  lse_T,
  query_D,
  partial_TD,
  update_TD,
  gain_D,
  rows=None,
  *,
  eps,
  norm_eps,
  interpret=None,
):
  """Returns (new partial or None, merged or merged and normed)."""
  del rows
  tiles = warpgroup.Tiles(query_D.shape[0])
  wide = {"out": out_TD, "partial": partial_TD, "update": update_TD}
  wide = {name: warpgroup.flatten(x) for name, x in _given(wide).items()}
  inputs = _given({"query": query_D, "gain": gain_D})
  inputs |= {"lse": jnp.ravel(lse_T)} | wide
  outputs = {} if update_TD is None else {"total": wide["partial"]}
  outputs |= {"mixed": wide["out"]}

  def kernel(*refs):
    ref = dict(zip((*inputs, *outputs), refs, strict=True))
    token = jax.lax.axis_index("program")

    def total(columns):
      x = tiles.load(ref["partial"].at[token, columns])
      if "update" in ref:
        x += tiles.load(ref["update"].at[token, columns])
      return x

    def mixed(columns):
      x = keep * tiles.load(ref["out"].at[token, columns])
      return x + take * total(columns)

    score, _ = _score(tiles, ref["query"], total, eps)
    keep, take = _two_weights(ref["lse"][token], score)
    inverse = jnp.float32(1.0)
    if "gain" in ref:
      (squares,) = tiles.sums(lambda at: (mixed(at) * mixed(at),), 1)
      inverse = jax.lax.rsqrt(squares * (1.0 / tiles.width) + norm_eps)

    def write(tile, columns, fresh, carry):
      del tile, fresh
      result = mixed(columns)
      if "gain" in ref:
        result *= inverse * tiles.load(ref["gain"].at[columns])
      warpgroup.store(ref["mixed"].at[token, columns], result)
      if "total" in ref:
        warpgroup.store(ref["total"].at[token, columns], total(columns))
      return carry

    tiles.loop(write, None)

  results = warpgroup.call(
    kernel,
    "depth_merge_forward",
    out_type=[_like(x) for x in outputs.values()],
    grid=wide["out"].shape[0],
    interpret=interpret,
  )(*inputs.values())
  results = [x.reshape(out_TD.shape) for x in results]
  return (None if update_TD is None else results[0]), results[-1]


@xla.collecting
def backward(
  out_TD,
  lse_T,
  query_D,
  total_TD,
  gain_D,
  dtotal_TD,
  dmixed_TD,
  rows=None,
  *,
  eps,
  norm_eps,
  interpret=None,
):
  """Returns the gradients of out, lse, query, total and gain."""
  del rows
  tiles = warpgroup.Tiles(query_D.shape[0])
  wide = {"out": out_TD, "total": total_TD, "dmixed": dmixed_TD}
  wide |= _given({"dtotal_in": dtotal_TD})
  vectors = _given({"query": query_D, "gain": gain_D})
  inputs = vectors | {"lse": jnp.ravel(lse_T)}
  inputs |= {name: warpgroup.flatten(x) for name, x in wide.items()}
  num_tokens = inputs["lse"].shape[0]
  num_programs = warpgroup.programs(num_tokens)
  sums = (len(vectors), tiles.number, tiles.size)
  outputs = {
    "dout": _like(inputs["out"]),
    "dtotal": _like(inputs["total"]),
    "dlse": _like(inputs["lse"]),
    "parts": jax.ShapeDtypeStruct((num_programs, *sums), jnp.float32),
  }

  def kernel(*refs):
    ref = dict(zip((*inputs, *outputs, "sums"), refs, strict=True))

    def clear(tile, columns, fresh, carry):
      del columns, fresh
      for i in range(len(vectors)):
        warpgroup.store(ref["sums"].at[i, tile], tiles.zeros())
      return carry

    def finish(tile, columns, fresh, carry):
      del columns, fresh
      program = jax.lax.axis_index("program")
      for i in range(len(vectors)):
        warpgroup.store(
          ref["parts"].at[program, i, tile], tiles.load(ref["sums"].at[i, tile])
        )
      return carry

    tiles.loop(clear, None)
    warpgroup.walk(num_tokens, lambda token: one_token(ref, token))
    tiles.loop(finish, None)

  def one_token(ref, token):
    def load(name, columns):
      return tiles.load(ref[name].at[token, columns])

    def add(i, tile, term, fresh):
      sums = ref["sums"].at[i, tile]
      warpgroup.store(sums, tiles.load(sums) + warpgroup.keep(term, fresh))

    score, inverse = _score(
      tiles, ref["query"], lambda columns: load("total", columns), eps
    )
    keep, take = _two_weights(ref["lse"][token], score)
    norm, along = jnp.float32(1.0), jnp.float32(0.0)
    other, slope, shift = jnp.float32(1.0), keep * take, jnp.float32(0.0)

    def mixed(columns):
      return keep * load("out", columns) + take * load("total", columns)

    def pulled(columns):
      gain = tiles.load(ref["gain"].at[columns])
      return gain * load("dmixed", columns)

    if "gain" in ref:

      def terms(columns):
        x = mixed(columns)
        return x * x, x * pulled(columns)

      squares, product = tiles.sums(terms, 2)
      norm = jax.lax.rsqrt(squares * (1.0 / tiles.width) + norm_eps)
      cubed = norm * norm * norm
      along = product * cubed * (1.0 / tiles.width)
      alone = xla.partial_alone(keep, take, norm, inverse)
      other = jnp.where(alone, 0.0, 1.0)
      slope = jnp.where(alone, take, slope)
      shift = jnp.where(alone, norm_eps * cubed * product, 0.0)

    def through_norm(columns):
      if "gain" not in ref:
        return load("dmixed", columns)
      return norm * pulled(columns) - along * mixed(columns)

    def difference(columns):
      apart = load("total", columns) - other * load("out", columns)
      return (through_norm(columns) * apart,)

    dscore = slope * (tiles.sums(difference, 1)[0] - shift)
    pull = dscore * inverse
    bend = pull * score * inverse * (1.0 / tiles.width)
    ref["dlse"][token] = -dscore

    def write(tile, columns, fresh, carry):
      dmixed, total = through_norm(columns), load("total", columns)
      dtotal = take * dmixed - bend * total
      dtotal += pull * tiles.load(ref["query"].at[columns])
      if "dtotal_in" in ref:
        dtotal += load("dtotal_in", columns)
      add(0, tile, pull * total, fresh)
      if "gain" in ref:
        add(1, tile, load("dmixed", columns) * (norm * mixed(columns)), fresh)
      warpgroup.store(ref["dout"].at[token, columns], keep * dmixed)
      warpgroup.store(ref["dtotal"].at[token, columns], dtotal)
      return carry

    tiles.loop(write, None)

  dout, dtotal, dlse, parts = warpgroup.call(
    kernel,
    "depth_merge_backward",
    out_type=list(outputs.values()),
    grid=num_programs,
    scratch_types=[warpgroup.shared(sums)],
    interpret=interpret,
  )(*inputs.values())
  dvectors = tiles.join(parts.sum(axis=0))
  return (
    dout.reshape(out_TD.shape),
    dlse.reshape(lse_T.shape),
    dvectors[0],
    dtotal.reshape(total_TD.shape),
    None if gain_D is None else dvectors[1],
  )


def _score(tiles, query_ref, total, eps):
  def terms(columns):
    x = total(columns)
    return x * x, x * tiles.load(query_ref.at[columns])

  squares, product = tiles.sums(terms, 2)
  inverse = jax.lax.rsqrt(squares * (1.0 / tiles.width) + eps)
  return product * inverse, inverse


def _two_weights(lse, score):
  # Each is computed directly, so that the smaller one keeps its precision.
  return 1 / (1 + jnp.exp(score - lse)), 1 / (1 + jnp.exp(lse - score))


def _given(arrays):
  return {name: x for name, x in arrays.items() if x is not None}


def _like(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype)

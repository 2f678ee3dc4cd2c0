# SPDX-License-Identifier: Apache-2.0
"""The problems of the GPU benchmark: inputs, exact results, and JAX arms.

Every source is a separate bfloat16 array; queries are float32. Exact results
are computed in float64 on the same inputs, a few tokens at a time: per token
for the first tokens, summed over all tokens for the queries.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from benchmarks import gpu_protocol as protocol
import jax
import jax.numpy as jnp
import numpy as np

import attnres_kernels
from attnres_kernels import dispatch

EPS = 1e-6
LEARNING_RATE = 1e-4


@dataclasses.dataclass(frozen=True)
class Read:
  """Q queries over M sources, forward only or forward and backward."""

  suite: str
  queries: int
  sources: int
  tokens: int
  width: int
  mode: str
  margin: float = protocol.MARGIN
  baseline: str = "xla"

  @property
  def shape(self) -> str:
    return f"Q{self.queries} M{self.sources} T{self.tokens} D{self.width}"

  @property
  def moved_bytes(self) -> int:
    return protocol.read_bytes(
      self.queries, self.sources, self.tokens, self.width, 2, self.mode
    )

  @property
  def input_bytes(self) -> int:
    return self.sources * self.tokens * self.width * 2

  def draw(self, seed: int):
    """(query, sources, output gradient)."""
    keys = jax.random.split(jax.random.key(seed), self.sources + 2)
    shape = (self.tokens, self.width)
    query = _normal(keys[0], (self.queries, self.width), jnp.float32) * 0.05
    sources = tuple(_normal(key, shape) for key in keys[2:])
    return query, sources, _normal(keys[1], (self.queries, *shape))

  def exact(self, inputs, kept):
    query, sources, dout = inputs
    backward = self.mode == "forward+backward"
    run = _with_gradients(_read_definition) if backward else _read_definition
    arguments = (query, sources, dout) if backward else (query, sources)

    def piece(at):
      cut = lambda x: x[:, at] if x.ndim == 3 else x[at]
      return (arguments[0], *jax.tree.map(cut, arguments[1:]))

    pieces = _in_float64(run, piece, self.tokens, kept)
    first = next(pieces)
    if not backward:
      return {"out": first}
    out, (dquery, dsources) = first
    dquery = sum((piece[1][0] for piece in pieces), dquery)
    return {"out": out, "dquery": dquery, "dsources": np.stack(dsources)}

  def wanted(self, exact, arm):
    """The exact results that arms are compared with."""
    del arm
    return exact

  def results(self, outputs, kept):
    """Names the outputs of an arm: out, or (out, dquery, dsources)."""
    if self.mode == "forward":
      return {"out": _numpy(outputs[:, :kept])}
    out, dquery, dsources = outputs
    return {
      "out": _numpy(out[:, :kept]),
      "dquery": _numpy(dquery),
      "dsources": np.stack([_numpy(x[:kept]) for x in dsources]),
    }

  def arm(self, implementation):
    attend = functools.partial(
      attnres_kernels.depth_attention, eps=EPS, implementation=implementation
    )
    if self.mode == "forward":
      return lambda query, sources, dout: attend(query, sources)[0]

    def run(query, sources, dout):
      out, vjp = jax.vjp(lambda *a: attend(*a)[0], query, sources)
      return (out, *vjp(dout))

    return run


@dataclasses.dataclass(frozen=True)
class Stack:
  """Block AttnRes over sublayers that cost almost nothing, both passes.

  A sublayer multiplies by a fixed vector. If it were the identity, all sources
  would be multiples of each other, and the query gradients zero.
  """

  sublayers: int
  block: int
  tokens: int
  width: int
  suite: str = "stack"
  mode: str = "forward+backward"
  # Every sublayer rounds its output, and every gradient is rounded as well.
  margin: float = 8.0
  baseline: str = "xla"

  @property
  def shape(self) -> str:
    return f"L{self.sublayers} S{self.block} T{self.tokens} D{self.width}"

  @property
  def moved_bytes(self) -> int:
    return protocol.stack_bytes(
      self.sublayers, self.block, self.tokens, self.width, 2, self.mode
    )

  @property
  def input_bytes(self) -> int:
    return 2 * self.tokens * self.width * 2

  def draw(self, seed: int):
    """(queries of all sublayers and the output, input, output gradient)."""
    keys = jax.random.split(jax.random.key(seed), 3)
    shape = (self.tokens, self.width)
    query = _normal(keys[0], (self.sublayers + 1, self.width), jnp.float32)
    return query * 0.05, _normal(keys[1], shape), _normal(keys[2], shape)

  def gates(self):
    """The factors of each sublayer, [L, D]."""
    shape = (self.sublayers, self.width)
    return (1 + _normal(jax.random.key(0), shape) / 2).astype(jnp.bfloat16)

  def exact(self, inputs, kept):
    query, x, dout = inputs
    gates = np.float64(self.gates())
    run = _with_gradients(
      lambda query, x: stack_definition(query, x, self.block, gates)
    )
    pieces = _in_float64(
      run, lambda at: (query, x[at], dout[at]), self.tokens, kept
    )
    out, (dquery, dx) = next(pieces)
    dquery = sum((piece[1][0] for piece in pieces), dquery)
    return {"out": out, "dquery": dquery, "dx": dx}

  def wanted(self, exact, arm):
    del arm
    return exact

  def results(self, outputs, kept):
    out, dquery, dx = outputs
    first = {"out": _numpy(out[:kept]), "dx": _numpy(dx[:kept])}
    return first | {"dquery": _numpy(dquery)}

  def arm(self, implementation):
    gates = self.gates()

    def stack(query, x):
      sublayer = lambda i, h: h * gates[i][None]
      return two_phases(query, x, self.block, implementation, sublayer)

    def run(query, x, dout):
      out, vjp = jax.vjp(stack, query, x)
      return (out, *vjp(dout))

    return run


@dataclasses.dataclass(frozen=True)
class Step:
  """A training step of a small language model: PreNorm and Block AttnRes."""

  layers: int
  block: int
  batch: int
  length: int
  width: int
  heads: int
  vocabulary: int
  suite: str = "step"
  mode: str = "forward+backward+update"
  margin: float = protocol.MARGIN
  baseline: str = "prenorm"
  moved_bytes: None = None
  input_bytes: int = 1

  @property
  def shape(self) -> str:
    return (
      f"L{2 * self.layers} S{self.block} B{self.batch} T{self.length}"
      f" D{self.width}"
    )

  def draw(self, seed: int):
    """(parameters, tokens)."""
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    d, layers = self.width, self.layers

    def matrix(*shape):
      return _normal(next(keys), shape, jnp.float32) * shape[-2] ** -0.5

    params = {
      "embedding": matrix(self.vocabulary, d) * self.vocabulary**0.5,
      "head": matrix(d, self.vocabulary),
      "qkv": matrix(layers, d, 3 * d),
      "out": matrix(layers, d, d),
      "up": matrix(layers, d, 4 * d),
      "down": matrix(layers, 4 * d, d),
      "query": matrix(2 * layers + 1, d),
    }
    tokens = jax.random.randint(
      next(keys), (self.batch, self.length + 1), 0, self.vocabulary
    )
    return params, tokens

  def exact(self, inputs, kept):
    """Both losses before the step; an arm has one of the two."""
    del kept
    with jax.enable_x64(True):
      params, tokens = jax.tree.map(_float64, inputs)
      loss = jax.jit(lambda p, t, arm: self._loss(p, t, arm), static_argnums=2)
      return {
        name: np.asarray(loss(params, tokens, arm))[None]
        for name, arm in (("prenorm", "prenorm"), ("block", "reference"))
      }

  def wanted(self, exact, arm):
    return {"loss": exact["prenorm" if arm == "prenorm" else "block"]}

  def results(self, outputs, kept):
    del kept
    return {"loss": _numpy(outputs[0])[None]}

  def arm(self, implementation):
    def run(params, tokens):
      loss, gradients = jax.value_and_grad(self._loss)(
        params, tokens, implementation
      )
      update = lambda p, g: p - LEARNING_RATE * g
      return loss, jax.tree.map(update, params, gradients)

    return run

  def _loss(self, params, tokens, implementation):
    exact = params["head"].dtype == jnp.float64
    dtype = jnp.float64 if exact else jnp.bfloat16
    weights = jax.tree.map(lambda p: p.astype(dtype), params)
    x = weights["embedding"][tokens[:, :-1]]

    def sublayer(i, h):
      name = "attention" if i % 2 == 0 else "mlp"
      f = functools.partial(getattr(self, f"_{name}"), weights, i // 2)
      return f(_rms_norm(h))

    number = 2 * self.layers
    if implementation == "prenorm":
      for i in range(number):
        x = x + sublayer(i, x)
    else:
      x = two_phases(params["query"], x, self.block, implementation, sublayer)
    logits = (_rms_norm(x) @ weights["head"]).astype(params["head"].dtype)
    log_total = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)
    return jnp.mean(log_total - picked[..., 0])

  def _attention(self, weights, layer, h):
    shape = (*h.shape[:2], 3, self.heads, -1)
    q, k, v = jnp.moveaxis((h @ weights["qkv"][layer]).reshape(shape), 2, 0)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return mixed.reshape(h.shape) @ weights["out"][layer]

  def _mlp(self, weights, layer, h):
    return jax.nn.gelu(h @ weights["up"][layer]) @ weights["down"][layer]


Problem = Read | Stack | Step


def two_phases(query, x, block, implementation, sublayer):
  """Algorithm 1: phase 1 once per block, a merge per further sublayer."""
  attend = functools.partial(
    attnres_kernels.depth_attention, eps=EPS, implementation=implementation
  )
  merge = functools.partial(
    attnres_kernels.depth_merge, eps=EPS, implementation=implementation
  )
  sources, number = [x], len(query) - 1
  for start in range(0, number, block):
    stop = min(start + block, number)
    out, lse = attend(query[start:stop], sources)
    partial = sublayer(start, out[0])
    for i in range(start + 1, stop):
      at = i - start
      h = merge(out[at], lse[at], query[i], partial)
      partial = partial + sublayer(i, h)
    sources.append(partial)
  return attend(query[number:], sources)[0][0]


def stack_definition(query, x, block, gates):
  """Eq. 6 with one softmax per read."""
  sources, partial, number = [x], None, len(query) - 1
  # Do not keep the float64 residuals of 32 reads.
  read = jax.checkpoint(_read_definition)
  for i in range(number):
    if i and i % block == 0:
      sources.append(partial)
      partial = None
    extra = () if partial is None else (partial,)
    h = read(query[i : i + 1], (*sources, *extra))[0]
    update = h * gates[i][None]
    partial = update if partial is None else partial + update
  return read(query[number:], (*sources, partial))[0]


def arms(problem: Problem, implementations) -> dict[str, Callable[..., Any]]:
  """The JAX arms of a problem: name to a function of its inputs, jitted."""
  names = list(implementations)
  if isinstance(problem, Step):
    names.insert(0, "prenorm")
  return {name: jax.jit(problem.arm(name)) for name in names}


def prepare(problem, function, sets, kept) -> protocol.Prepared:
  return protocol.Prepared(
    run=lambda i: function(*sets[i % len(sets)]),
    wait=jax.block_until_ready,
    results=lambda outputs: problem.results(outputs, kept),
  )


def _read_definition(query, sources):
  """Eq. 2-4."""
  stacked = jnp.stack(sources)
  rms = jnp.sqrt(jnp.mean(stacked**2, axis=-1, keepdims=True) + EPS)
  weights = jax.nn.softmax(
    jnp.einsum("mtd,qd->qmt", stacked / rms, query), axis=1
  )
  return jnp.einsum("qmt,mtd->qtd", weights, stacked)


def _with_gradients(function):
  def run(query, x, dout):
    out, vjp = jax.vjp(function, query, x)
    return out, vjp(dout)

  return run


def _in_float64(function, piece, tokens, size):
  """Results of `function` on successive pieces of `size` tokens."""
  function = jax.jit(function)
  for start in range(0, tokens, size):
    with jax.enable_x64(True):
      inputs = jax.tree.map(_float64, piece(slice(start, start + size)))
      yield jax.tree.map(np.asarray, function(*inputs))


def _float64(x):
  return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _normal(key, shape, dtype=jnp.bfloat16):
  return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def _rms_norm(x):
  wide = x.astype(dispatch.accumulator(x))
  square = jnp.mean(wide * wide, axis=-1, keepdims=True)
  return (wide * jax.lax.rsqrt(square + EPS)).astype(x.dtype)


def _numpy(x):
  if isinstance(x, jax.Array):
    return np.asarray(x)
  # A torch tensor: NumPy has no bfloat16.
  return x.detach().float().cpu().numpy()

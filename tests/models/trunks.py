# SPDX-License-Identifier: Apache-2.0
"""Toy trunks in float64, and the paper's equations to compare them with.

One side runs `Trunk.run` with a scheme of the library. The other runs the same
sublayers by the definitions below, which are written from the paper
(arXiv:2603.15031, Eq. 1-6) in NumPy, which compiles nothing, and share no code
with it. Every function here must run under `jax.enable_x64(True)`.
"""

import dataclasses
import functools
import operator
import types

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax.models import norm as norm_lib
from attnres_jax.models import residuals
from attnres_jax.models import trunk
from attnres_jax.models.residuals import base as residuals_base

WIDTH = 6
EPS = 1e-6


KINDS = ("mixer", "mlp")


def fused_norm(gain, eps=EPS):
  """The library's norm with a float64 gain, which schemes fuse."""
  norm = norm_lib.RMSNorm(WIDTH, eps)
  norm.gain.set_value(gain)
  return norm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ToySublayer:
  """A causal running mean then tanh (a mixer), or tanh alone (an MLP)."""

  gain: jax.Array | None  # [L / 2, D]; None without a pre-norm
  matrix: jax.Array  # [L / 2, D, D]
  kind: str = dataclasses.field(metadata=dict(static=True))
  eps: float = dataclasses.field(metadata=dict(static=True))
  # Whether the norm is any function, which no scheme can fuse.
  foreign: bool = dataclasses.field(default=False, metadata=dict(static=True))

  @property
  def norm(self):
    if self.gain is None:
      return (lambda h: h) if self.foreign else norm_lib.Identity()
    if self.foreign:
      return lambda h: rms_norm(h, self.eps) * self.gain[None, None]
    return fused_norm(self.gain, self.eps)

  def core(self, x, segment_ids):
    del segment_ids
    if isinstance(x, residuals_base.QKV):
      x = 0.5 * x.query + 0.3 * x.key + 0.2 * x.value
    if self.kind == "mixer":
      x = jnp.cumsum(x, axis=1)
    return jnp.tanh(x @ self.matrix)

  core.reads_qkv = True


def functions(layers, count):
  """f_1, ..., f_count as functions of h in NumPy, with their pre-norms."""

  def function(l):
    toy = layers[KINDS[l % 2]]
    matrix = np.asarray(toy.matrix)[l // 2]

    def apply(h):
      x = h
      if toy.gain is not None:
        x = rms_norm(h, toy.eps) * np.asarray(toy.gain)[l // 2]
      if toy.kind == "mixer":
        x = np.cumsum(x, axis=1)
      return np.tanh(x @ matrix)

    return apply

  return [function(l) for l in range(count)]


def toy(num_sublayers, seed=0, eps=EPS, pre_norm=True):
  """(layers, embedding [2, 3, D]) of random float64 numbers."""
  rng = np.random.default_rng(seed)
  layers = {}
  for i, kind in enumerate(KINDS[:num_sublayers]):
    count = (num_sublayers + 1 - i) // 2
    gain = jnp.asarray(1 + 0.3 * rng.standard_normal((count, WIDTH)))
    layers[kind] = ToySublayer(
      gain=gain if pre_norm else None,
      matrix=jnp.asarray(rng.standard_normal((count, WIDTH, WIDTH))),
      kind=kind,
      eps=eps,
    )
  return layers, jnp.asarray(rng.standard_normal((2, 3, WIDTH)))


def scheme(name, num_sublayers, *, seed=1, scale=1.0, eps=EPS, **fields):
  """A scheme of the library in float64, with random parameters.

  `scale` multiplies the queries of depth attention, and how far the parameters
  of other schemes are from their start.
  """
  config = types.SimpleNamespace(
    num_sublayers=num_sublayers,  # may be odd, unlike a ModelConfig's
    width=WIDTH,
    norm_eps=eps,
    scan_layers=True,
    depth_loop="unrolled",
    init_std=0.3,
    dtype="float64",
    residual=config_lib.residual_config(name=name, **fields),
  )
  module = residuals.build_residual(config, rngs=nnx.Rngs(params=seed))
  rng = np.random.default_rng(seed)

  def moved(start):
    start = np.asarray(start, np.float64)
    return jnp.asarray(start + 0.3 * scale * rng.standard_normal(start.shape))

  module = jax.tree.map(moved, module)
  if hasattr(module, "queries"):
    rng = np.random.default_rng(seed)
    for name, start, spread in (
      ("query", 0, scale),
      ("gain", 1, 0.5),
      ("value_query", 0, scale),
      ("null", 0, 1),
    ):
      old = getattr(module.queries, name)
      if old is not None:
        new = start + spread * rng.standard_normal(old.shape)
        setattr(module.queries, name, nnx.Param(jnp.asarray(new)))
  return module


@functools.partial(jax.jit, static_argnames=("scan", "remat"))
def run(layers, module, embedding, *, scan=True, remat="none"):
  kinds = tuple(KINDS[l % 2] for l in range(module.num_sublayers))
  return trunk.Trunk(kinds, module, scan, remat).run(layers, embedding)


def parameters(module):
  """The parameters of a scheme by name, in NumPy, and of modules in it."""
  named = types.SimpleNamespace()
  for name, value in vars(module).items():
    if isinstance(value, nnx.Variable):
      setattr(named, name, np.asarray(value[...]))
    elif isinstance(value, nnx.Module):
      setattr(named, name, parameters(value))
  return named


def check(name, definition, num_sublayers=5, **fields):
  """A network with a scheme against a definition in NumPy.

  Args:
    name: of the scheme, which gets random parameters.
    definition: maps f_1..f_L, `parameters` and the embedding to h_out.
    num_sublayers: L.
    **fields: of `scheme`.
  """
  module = scheme(name, num_sublayers, **fields)
  layers, embedding = toy(num_sublayers, pre_norm=module.pre_norm)
  actual = np.asarray(run(layers, module, embedding, scan=False))
  sublayers, start = functions(layers, num_sublayers), np.asarray(embedding)
  expected = definition(sublayers, parameters(module), start)
  assert actual.dtype == expected.dtype == np.float64
  size = 1 + np.abs(expected).max()
  np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-11 * size)
  plain = prenorm(sublayers, start)
  assert np.abs(actual - plain).max() > 1e-3, "is PreNorm"


def check_gradients(name, definition, num_sublayers, *, rtol=1e-9, **fields):
  """A scalar of a network, and its slope, against a definition in NumPy.

  Args:
    name: of the scheme, which gets random parameters.
    definition: as of `check`; all numbers are complex along a slope.
    num_sublayers: L.
    rtol: of the slope along a random change of all parameters and of the
      embedding.
    **fields: of `scheme`.
  """
  layers, embedding = toy(num_sublayers)
  module = scheme(name, num_sublayers, **fields)
  value, gradients = value_and_grad(layers, module, embedding, scan=False)

  def expected(layers, module, embedding):
    sublayers = functions(layers, num_sublayers)
    start = np.asarray(embedding)
    return score(definition(sublayers, parameters(module), start))

  arguments = [layers, module, embedding]
  exact = expected(*arguments)
  np.testing.assert_allclose(value, exact.real, rtol=1e-3 * rtol)
  rng = np.random.default_rng(3)
  ways = jax.tree.map(lambda a: rng.standard_normal(a.shape), arguments)
  along = jax.tree.map(lambda g, way: np.sum(g * way), [*gradients], ways)
  expected_slope = slope(expected, arguments, ways)
  np.testing.assert_allclose(
    sum(jax.tree.leaves(along)), expected_slope, rtol=rtol
  )


@functools.partial(jax.jit, static_argnames=("scan", "remat"))
def value_and_grad(layers, module, embedding, *, scan=True, remat="none"):
  """A scalar of h_out, and its gradients by layers, scheme and embedding."""

  def value(layers, module, embedding):
    return score(run(layers, module, embedding, scan=scan, remat=remat))

  return jax.value_and_grad(value, argnums=(0, 1, 2))(layers, module, embedding)


def score(h):
  """A scalar that weighs every entry of h differently."""
  position = np.arange(h.size, dtype=np.float64).reshape(h.shape)
  return (np.sin(1.0 + position) * h + 0.1 * h * h).sum()


def outputs(num_sublayers, seed=2):
  """Random v_0, ..., v_L [2, 3, D]."""
  rng = np.random.default_rng(seed)
  return list(rng.standard_normal((num_sublayers + 1, 2, 3, WIDTH)))


@jax.jit
def reads(module, values):
  """h_1, ..., h_L, h_out of a network whose outputs were recorded."""
  state, out = module.init(values[0]), []
  for start, stop in module.segments():
    carry, slots = module.open(state, start, stop)
    for l in range(start, stop):
      slot = jax.tree.map(operator.itemgetter(l - start), slots)
      out.append(residuals_base.before_norm(module, carry, slot))
      carry = module.write(carry, slot, values[l + 1])
    state = module.close(state, carry, stop)
  return [*out, module.readout(state)]


def rms_norm(x, eps):
  return x / ((x * x).mean(axis=-1, keepdims=True) + eps) ** 0.5


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def attend(u, sources, eps=EPS):
  """Eq. 2-4 for one query: softmax over depth, values not normalised."""
  source = np.stack(sources)
  score = np.sum(rms_norm(source, eps) * u, axis=-1)
  weight = np.exp(score - score.real.max(axis=0, keepdims=True))
  weight = weight / np.sum(weight, axis=0, keepdims=True)
  return np.sum(weight[..., None] * source, axis=0)


def read_by_loops(module, sources, l, value=False):
  """One read, per token and head, and its weights [M, B, T, H]."""
  sources = [np.asarray(source) for source in sources]
  o, queries = module.options, module.queries
  array = lambda p: None if p is None else np.asarray(p[...])
  query, gain = array(queries.query)[l], array(queries.gain)
  gain = np.ones(WIDTH) if gain is None else gain[l]
  if value:
    query = array(queries.value_query)[l // 2]
  first = 0
  if o.window:
    first = max(0, len(sources) - 1 - o.window)
  places = [0, *range(1 + first, len(sources))]
  sources = [sources[i] for i in places]
  if o.null != "none":
    null = np.zeros(WIDTH)
    if o.null == "learned":
      null = array(queries.null)[l]
    sources = [np.broadcast_to(null, sources[0].shape), *sources]
    places = [None, *places]
  heads, width = o.heads, WIDTH
  part = width // heads
  h = np.zeros_like(sources[0])
  weights = np.zeros((len(sources), *h.shape[:2], heads))
  for b, t in np.ndindex(h.shape[:2]):
    for k in range(heads):
      logits = []
      for i, source in zip(places, sources):
        v = source[b, t]
        key = v[width - o.rank :] if o.rank else v
        inverse = (np.mean(key**2) + EPS) ** -0.5 if o.key_norm else 1
        u = query
        if o.query == "input":
          newest = sources[-1][b, t]
          u = newest / np.sqrt(np.mean(newest**2) + EPS) @ query
        if o.query == "static":
          logits.append(0.0 if i is None else o.logit_scale * query[i])
          continue
        if o.key_norm and not o.rank:
          u = u * gain
        mine = slice(k * part, (k + 1) * part) if heads > 1 else slice(None)
        logits.append(o.logit_scale * np.dot(u[mine], key[mine]) * inverse)
      logits = np.array(logits)
      if o.score == "sigmoid":
        a = 1 / (1 + np.exp(-logits))
      else:
        a = np.exp(logits) / np.exp(logits).sum()
      weights[:, b, t, k] = a
      mine = slice(k * part, (k + 1) * part)
      for weight, source in zip(a, sources):
        h[b, t, mine] += weight * source[b, t, mine]
  return h * (len(sources) if o.scale == "sum" else 1), weights


def full_attnres(sublayers, u, embedding):
  """Eq. 1-4 and the output aggregation."""
  values = [np.asarray(embedding)]
  for l, f in enumerate(sublayers):
    values.append(f(attend(u[l], values)))
  return attend(u[-1], values)


def fig2(sublayers, u, embedding, block_size):
  """The paper's Fig. 2, line by line, as one transformer block after another.

  `blocks` starts empty and the partial sum that comes into transformer block 0
  is the embedding; transformer blocks count from 0; the boundary comes after
  the first read and before attention. The paper's listing ends with the last
  transformer block; the text adds the output aggregation.
  """
  blocks, partial_block = [], np.asarray(embedding)
  for layer_number in range(len(sublayers) // 2):
    w_attn, w_mlp = u[2 * layer_number], u[2 * layer_number + 1]
    attn, mlp = sublayers[2 * layer_number : 2 * layer_number + 2]

    h = attend(w_attn, blocks + [partial_block])
    if layer_number % (block_size // 2) == 0:
      blocks = blocks + [partial_block]
      partial_block = None
    attn_out = attn(h)
    if partial_block is not None:
      partial_block = partial_block + attn_out
    else:
      partial_block = attn_out

    h = attend(w_mlp, blocks + [partial_block])
    partial_block = partial_block + mlp(h)
  return attend(u[-1], blocks + [partial_block])


def fig2_per_sublayer(sublayers, u, embedding, block_size):
  """Fig. 2 with the boundary per sublayer, which odd S and L need."""
  blocks, partial = [], np.asarray(embedding)
  for j, f in enumerate(sublayers):
    h = attend(u[j], blocks + [partial])
    if j % block_size == 0:
      blocks, partial = blocks + [partial], None
    partial = f(h) if partial is None else partial + f(h)
  return attend(u[-1], blocks + [partial])


def slope(function, trees, directions):
  """Derivative of a scalar in NumPy along the directions, all digits right."""
  moved = jax.tree.map(
    lambda a, d: np.asarray(a) + 1e-30j * np.asarray(d), trees, directions
  )
  return function(*moved).imag / 1e-30


def many_streams(sublayers, coefficients, embedding, count, *, mean=False):
  """Runs h = sum_i read_i X_i;  X_j <- sum_i mix_ij X_i + write_j y.

  `coefficients(l, X)` are read [M, B, T], write [M, B, T], mix [M, M, B, T].
  """
  streams = [np.asarray(embedding)] * count
  for l, f in enumerate(sublayers):
    read, write, mix = coefficients(l, streams)
    y = f(sum(read[i][..., None] * streams[i] for i in range(count)))
    streams = [
      sum(mix[i][j][..., None] * streams[i] for i in range(count))
      + write[j][..., None] * y
      for j in range(count)
    ]
  return sum(streams) / (count if mean else 1)


def prenorm(sublayers, embedding):
  h = np.asarray(embedding)
  for f in sublayers:
    h = h + f(h)
  return h

# SPDX-License-Identifier: Apache-2.0
"""What holds for every registered scheme, at random parameters.

A scheme is compiled twice around toy sublayers: as a scan, and cut in two parts
of unrolled sublayers with checkpoints, as a pipeline and `remat` would have it,
whose norms are plain functions.
By default, this is done for the first scheme of each family. The definition of
each scheme is tested in the file of its family.
"""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import flops
from attnres_jax import models
from attnres_jax import optimizer
from attnres_jax.analysis.mixing_matrix import response
from attnres_jax.common import sharding
from attnres_jax.flops import traffic
from attnres_jax.models import residuals
from attnres_jax.models import trunk
from attnres_jax.models.residuals import base
from attnres_jax.models.residuals import streams
from attnres_jax.models.residuals import styles
from tests import jaxprs
from tests import tiers
from tests import tiny_network
from tests.models import trunks

LENGTH = 5
TOKENS = np.random.default_rng(0).integers(0, 16, (2, LENGTH), dtype=np.int32)


def _block_size(name):
  # With blocks of three, its four sublayers attend to the embedding alone.
  return 1 if name == "delta_block" else 3


def _kinds(name):
  """Kinds of sublayers, in a repeated pattern that a scan may run."""
  # Programs of streams are the largest, and all their sublayers are alike.
  is_large = issubclass(residuals.RESIDUALS[name], streams.Streams)
  return trunks.KINDS[:1] * 2 if is_large else trunks.KINDS * 2


def _scheme(name):
  heads = 2 if name.startswith("delta_mh") else 0
  return trunks.scheme(
    name,
    len(_kinds(name)),
    block_size=_block_size(name),
    read=config_lib.DepthReadConfig(heads=heads),
  )


def _scanned(kinds, layers, scheme, embedding):
  return trunk.Trunk(kinds, scheme).run(layers, embedding)


def _in_parts(kinds, layers, scheme, embedding):
  cut = len(kinds) // 2
  # One sublayer of each kind in either part.
  layers = {
    kind: dataclasses.replace(layer, foreign=True)
    for kind, layer in layers.items()
  }
  first, second = (
    jax.tree.map(lambda a, i=i: a[i : i + 1], layers) for i in (0, 1)
  )
  state = scheme.init(embedding)
  before, after = (
    trunk.Trunk(kinds[part], scheme, False, "full", start=part.start or 0)
    for part in (slice(cut), slice(cut, None))
  )
  state = before.run_part(first, state, None)
  state = scheme.put_together(*scheme.take_apart(state))
  state = after.run_part(second, state, None)
  return scheme.readout(state)


def _program(forward, kinds, *arguments):
  """Traced: the score of h_out, h_out, and the gradient of the score."""

  def run(*arguments):
    h = forward(kinds, *arguments)
    return trunks.score(h), h

  gradient = jax.value_and_grad(run, argnums=(0, 1, 2), has_aux=True)
  return jax.jit(gradient).trace(*arguments)


def _schemes():
  for family in residuals.families().values():
    yield family[0]
    for name in family[1:]:
      yield pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.usefixtures("float64")
@tiers.parametrize("name", list(_schemes()), first=["block_attnres"])
def test_scan_loop_parts_and_checkpoints_agree(name):
  kinds, scheme = _kinds(name), _scheme(name)
  layers, embedding = trunks.toy(4, pre_norm=scheme.pre_norm)
  layers = {kind: layers[kind] for kind in kinds}
  arguments = layers, scheme, embedding
  compiled = _program(_scanned, kinds, *arguments).lower().compile()
  (value, h), gradient = compiled(*arguments)
  parts = _program(_in_parts, kinds, *arguments)
  (other, _), gradient_in_parts = parts.lower().compile()(*arguments)
  np.testing.assert_allclose(other, value, rtol=1e-10)
  flat, _ = jax.tree_util.tree_flatten_with_path(gradient)
  for (path, a), b in zip(flat, jax.tree.leaves(gradient_in_parts)):
    where, size = jax.tree_util.keystr(path), 1e-6 + np.abs(a).max()
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-9 * size, err_msg=where)
    assert np.any(a), f"{where} gets no gradient"
  # Nothing looks ahead: the last token changes only the last output.
  changed = embedding.at[:, -1].add(0.5)
  (_, others), _ = compiled(layers, scheme, changed)
  np.testing.assert_allclose(others[:, :-1], h[:, :-1], atol=1e-12)
  assert np.abs(others - h)[:, -1].max() > 1e-3
  # Full checkpointing recomputes a sublayer once.
  computed = [
    equation
    for equation in jaxprs.equations(parts.jaxpr)
    if equation.primitive.name == "tanh"
    and equation.outvars[0].aval.shape == embedding.shape
  ]
  assert len(computed) == 2 * len(kinds)


@pytest.mark.usefixtures("float64")
@tiers.parametrize("name", list(_schemes()), first=["block_attnres", "mhc"])
def test_reads_are_linear_while_coefficients_are_fixed(name):
  """So that mixing matrices show the coefficients, and nothing else."""
  scheme, rng = _scheme(name), np.random.default_rng(2)
  values, way, other = jnp.asarray(
    rng.standard_normal((3, len(_kinds(name)) + 1, 1, 2, trunks.WIDTH))
  )
  actual = jax.jit(lambda values: response(scheme, values, values))(values)
  for h, expected in zip(actual, trunks.reads(scheme, values), strict=True):
    for a, b in zip(base.qkv(h), base.qkv(expected)):
      np.testing.assert_allclose(a, b, atol=1e-12)

  def bend(other):
    along = lambda values: response(scheme, values, way)
    return jax.jvp(along, (values,), (other,))[1]

  assert not jaxprs.depends(bend, other)


@pytest.mark.parametrize("name", residuals.RESIDUALS)
def test_abstract_properties(name):
  config = tiny_network.config(
    name, block_size=_block_size(name), dtype="bfloat16"
  )
  network = jax.eval_shape(lambda: models.build_model(config))
  leaves = jax.tree.leaves(network)
  assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}
  mesh = sharding.make_mesh(config_lib.MeshConfig(data=1, fsdp=2, tensor=2))
  shardings = sharding.state_sharding(network, mesh)
  assert len(jax.tree.leaves(shardings)) == len(leaves)
  assert len(jax.tree.leaves(optimizer.decays(network))) == len(leaves)
  h_BTD = jax.eval_shape(lambda m: m.hidden(TOKENS), network)
  assert h_BTD.dtype == jnp.bfloat16
  assert flops.flops_per_token(config, LENGTH).residual >= 0
  moved = traffic.of_scheme(config)
  assert moved.reads > 0 and moved.writes > 0


# Fields of a residual that a scheme cannot use, and how the error begins.
REFUSED = [
  ("block_attnres", dict(num_blocks=0), "block_size: got 0, expected sublaye"),
  ("block_attnres", dict(gate="zero"), "gate: got 'zero', expected 'own'"),
  ("block_attnres", dict(rank=32), "rank: got 32, expected 0 with"),
  ("block_attnres", dict(streams=2), "streams: got 2, expected 4 with"),
  ("mhc_lite", dict(streams=7), "streams: got 7"),
  ("prenorm", dict(stream_dtype="bfloat16"), "stream_dtype: got 'bfloat1"),
]
# The same for `residual.read`.
REFUSED_READS = [
  ("block_attnres", dict(heads=3), "heads: got 3, expected a divisor of"),
  ("block_attnres", dict(rank=17), "rank: got 17, expected at most model.wid"),
  ("block_attnres", dict(rank=2, heads=2), "heads: got 2, expected 1 with"),
  ("block_attnres", dict(query="static", heads=2), "heads: got 2"),
  ("block_attnres", dict(query="static", key_norm=False), "key_norm: got Fals"),
  ("block_attnres", dict(query="static", rank=2), "rank: got 2"),
  ("block_attnres", dict(query="static", null="learned"), "null: got 'learne"),
  ("block_attnres", dict(score="sigmoid", null="zero"), "null: got 'zero', ex"),
  ("block_attnres", dict(query="input", value_query=True), "value_query: got"),
  ("prenorm", dict(heads=2), "heads: got 2.*prenorm"),
  ("delta_mh", dict(null="zero"), "null: got 'zero',"),
  ("delta_attnres", dict(scale="sum"), "scale: got 'sum'"),
]


@pytest.mark.parametrize(
  "name,fields,message",
  [
    *REFUSED,
    *(
      (name, dict(read=read), rf"read\.{message}")
      for name, read, message in REFUSED_READS
    ),
  ],
)
def test_fields_that_a_scheme_cannot_use(name, fields, message):
  start = rf"^config\.model\.residual\.{message}"
  with pytest.raises(config_lib.ConfigError, match=start):
    if "read" in fields:
      fields = dict(read=config_lib.DepthReadConfig(**fields["read"]))
    residuals.abstract_residual(tiny_network.config(name, **fields))


def test_names_and_families():
  assert sum(residuals.families().values(), []) == list(residuals.RESIDUALS)
  with pytest.raises(config_lib.ConfigError) as caught:
    tiny_network.config("hyper_conections")
  text = str(caught.value)
  assert "prenorm: prenorm, rescaled;" in text and "\n" not in text
  certainties = {scheme.certainty for scheme in residuals.RESIDUALS.values()}
  assert certainties == {styles.Certainty.PAPER, styles.Certainty.CODE}
  page = (pathlib.Path(__file__).parents[3] / "README.md").read_text()
  assert f"[{len(residuals.RESIDUALS)} residual schemes](" in page

# SPDX-License-Identifier: Apache-2.0
"""A scan over blocks computes what the unrolled form computes."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.models import block_scan
from attnres_jax.models import trunk
from attnres_jax.train import train_state
from tests import compare
from tests import jaxprs
from tests import tiny_network
from tests.models import trunks


def _rows_one_by_one(functions, split, weights, rows, constants):
  """`append_rows` by its definition."""
  rows = list(rows)
  for step in range(len(weights["scale"])):
    parts = split(jax.tree.map(lambda a, step=step: a[step], weights))
    for function, part in zip(functions, parts):
      bank = block_scan.Bank(jnp.stack(rows), jnp.asarray(len(rows)))
      rows.append(function(part, bank, constants))
  return jnp.stack(rows)


def _row(power, part, bank, constants):
  """Depends on every row there is, on two of them in other ways."""
  scale, shift = part
  is_row = jnp.arange(len(bank.rows_MBTD)) < bank.count
  visible = jnp.where(is_row[:, None], bank.rows_MBTD, 0.0)
  newest = bank.rows_MBTD[bank.count - 1]
  total = jnp.sum(jnp.tanh(visible * scale[None]), axis=0) + newest * visible[0]
  mean = total / bank.count.astype(total.dtype)
  return mean**power + shift * constants["offset"]


def _split(weights):
  """The two functions share a shift."""
  return [(scale, weights["shift"]) for scale in weights["scale"]]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("steps", [1, 3])
def test_rows_are_appended_as_one_by_one(steps):
  """Values and all gradients."""
  draw = np.random.default_rng(0).standard_normal
  weights = {"scale": draw((steps, 2, 4)), "shift": draw((steps, 4))}
  rows, constants = (draw(4), draw(4)), {"offset": draw(4)}
  functions = [functools.partial(_row, power) for power in (1, 2)]
  cotangent = draw((2 + 2 * steps, 4))
  given = jax.tree.map(jnp.asarray, (weights, rows))
  results = []
  for append in (block_scan.append_rows, _rows_one_by_one):
    run = lambda weights, rows, append=append: append(
      functions, _split, weights, rows, constants
    )
    value, pull = jax.vjp(run, *given)
    results.append((value, pull(jnp.asarray(cotangent))))
  compare.trees(*results, 1e-12)


def test_rows_are_saved_once():
  """Not once per step: what a step saves has none of their size."""
  steps, width = 5, 7
  functions = [jax.checkpoint(functools.partial(_row, 1))] * 2
  shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
  weights = {"scale": shape(steps, 2, width), "shift": shape(steps, width)}
  saved = jaxprs.saved(
    lambda w, r: block_scan.append_rows(
      functions, _split, w, r, {"offset": jnp.ones(width)}
    ),
    weights, [shape(width)] * 3,
  )  # fmt: skip
  sizes = [a.size for a in saved if a.shape[-1:] == (width,)]
  assert max(sizes) == (3 + 2 * steps) * width, saved


def _value(layers, module, embedding, *, remat, depth_loop, kinds=None):
  kinds = kinds or [trunks.KINDS[l % 2] for l in range(module.num_sublayers)]
  return trunks.score(
    trunk.Trunk(kinds, module, True, remat, depth_loop).run(layers, embedding)
  )


MIXER, MLP = trunks.KINDS
TWO_SCANS = (MIXER, MLP, MIXER, MLP, *([MLP, MIXER] * 3))
Read = config_lib.DepthReadConfig
SLOW = pytest.mark.slow


@pytest.mark.usefixtures("float64")
@pytest.mark.more
@pytest.mark.parametrize(
  "num_sublayers,remat,block_size,kinds,fields",
  [
    # Kinds of sublayers repeat in every second block; the last one is short.
    (13, "none", 3, None, {}),
    (8, "full", 2, None, {}),
    *(
      pytest.param(*case, marks=SLOW)
      for case in (
        (10, "full", 4, None, {}),
        (8, "dots", 2, None, {}),
        (6, "full", 1, None, {}),
        (10, "none", 2, TWO_SCANS, {}),
        (10, "full", 2, TWO_SCANS, {}),
        # Options of a read that change what goes through the bank.
        *(
          (6, "none", 2, None, dict(read=Read(**options)))
          for options in (
            dict(heads=2), dict(rank=3), dict(null="learned"),
            dict(value_query=True), dict(scale="sum"),
          )
        ),
      )
    ),
  ],
)  # fmt: skip
def test_scan_is_unrolled(num_sublayers, remat, block_size, kinds, fields):
  """Values and gradients."""
  layers, embedding = trunks.toy(num_sublayers)
  module = trunks.scheme(
    "block_attnres", num_sublayers, block_size=block_size, **fields
  )
  results, scans = [], []
  for form in ("scan", "unrolled"):
    value = functools.partial(_value, depth_loop=form, remat=remat, kinds=kinds)
    gradient = jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2)))
    results.append(gradient(layers, module, embedding))
    scans.append(jaxprs.count(("scan",), value, layers, module, embedding))
  assert scans[0] == (1 if kinds is None else 2)
  compare.trees(*results, 1e-12)


@pytest.mark.parametrize(
  "name,tokens,mesh",
  [
    ("block_attnres", 8, dict(data=1)),
    # `tensor` divides the tokens of a row, or does not.
    pytest.param(
      "block_attnres", 8, dict(data=2, tensor=2), marks=pytest.mark.more
    ),
    pytest.param("block_attnres", 7, dict(data=2, tensor=2), marks=SLOW),
    # Streams are sharded as well.
    pytest.param("mhc", 8, dict(data=2, tensor=2), marks=pytest.mark.more),
  ],
)
def test_networks(name, tokens, mesh):
  """A scan over blocks on a mesh against no scan on one device."""
  is_block = name == "block_attnres"
  rng = np.random.default_rng(0)
  tokens_BT = jnp.int32(rng.integers(0, 16, (4, tokens)))
  documents_BT = jnp.int32(np.arange(tokens) // 3)[None].repeat(4, axis=0)
  results = []
  for form, axes in (("scan", mesh), ("unrolled", dict(data=1))):
    model: Any = tiny_network.model(
      name, num_layers=3, block_size=2, scan_layers=is_block,
      depth_loop=form if is_block else "unrolled",
    )  # fmt: skip
    if is_block:
      query = model.residual.queries.query
      draw = np.random.default_rng(1).standard_normal(query.shape)
      query[...] = jnp.float32(0.5 * draw)

    def value(model, tokens_BT):
      return jnp.mean(jnp.square(model(tokens_BT, documents_BT)))

    mesh = sharding.make_mesh(config_lib.MeshConfig(**axes))
    given = jax.device_put((model, tokens_BT), sharding.replicated(mesh))
    with sharding.ambient(mesh):
      result = jax.jit(jax.value_and_grad(value))(*given)
    results.append(jax.device_get(result))
  (loss, gradient), (expected_loss, expected) = results
  np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
  compare.trees(gradient, expected, 1e-5, plus=0)
  if is_block:
    assert np.abs(expected.residual.queries.query[...]).max() > 1e-6


def test_sublayers_of_a_training_step_do_not_grow_with_depth():
  """Nor do its metrics, of which some are per layer."""
  sizes = []
  for num_layers in (4, 6, 8):
    config = config_lib.RunConfig(
      model=tiny_network.config(
        num_layers=num_layers, depth_loop="scan", block_size=4
      ),
      data=config_lib.DataConfig(batch_size=1, sequence_length=4),
      mesh=config_lib.MeshConfig(data=1),
    )
    mesh = sharding.make_mesh(config.mesh)
    program = train_state.make_program(config, mesh)
    state = program.abstract_state
    batch = {"tokens": jax.ShapeDtypeStruct((1, 5), jnp.int32)}
    # Lowered, since what is traced also has kernels for other platforms.
    text = program.train_step.lower(state, batch).as_text()
    sizes.append(len(text.splitlines()))
  # One more block is one more source of the readout.
  more = sizes[1] - sizes[0]
  assert 0 < more == sizes[2] - sizes[1] < 0.03 * sizes[0]


def test_what_is_saved():
  """Outputs of sublayers, and each block once."""
  model = jax.eval_shape(
    lambda: tiny_network.model(
      "block_attnres", width=32, num_layers=4, block_size=4
    )
  )

  def network(layers, residual, embedding):
    kinds = model.config.sublayer_kinds
    return trunk.Trunk(kinds, residual, True, "full", "scan").run(
      layers, embedding
    )

  embedding = jax.ShapeDtypeStruct((1, 64, 32), jnp.float32)
  saved = jaxprs.saved(network, model.sublayers, model.residual, embedding)
  # Without weights, which are reshaped for the scan.
  saved = [a.shape for a in saved if a.shape[-3:] == embedding.shape]
  vectors = sum(math.prod(shape) for shape in saved) / embedding.size
  # Of each block its outputs; blocks and embedding, as rows and once more as
  # arrays of the readout.
  assert vectors == 2 * 4 + 2 * 3


@pytest.mark.parametrize(
  "num_sublayers,fields,reason",
  [
    (5, dict(name="prenorm"), "PreNorm"),
    (5, dict(name="full_attnres"), "FullAttnRes"),
    (5, dict(name="delta_attnres"), "DeltaAttnRes"),
    (6, dict(name="block_attnres", block_size=2, form="one_softmax"), "reads"),
    (3, dict(name="block_attnres", block_size=2), "no two blocks in a row"),
  ],
)
def test_scan_by_name_runs_or_raises(num_sublayers, fields, reason):
  module = trunks.scheme(fields.pop("name"), num_sublayers, **fields)
  layers, embedding = trunks.toy(num_sublayers)
  with pytest.raises(config_lib.ConfigError, match=f"depth_loop.*{reason}"):
    jax.eval_shape(
      functools.partial(_value, remat="none", depth_loop="scan"),
      layers, module, embedding,
    )  # fmt: skip

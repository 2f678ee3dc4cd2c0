# SPDX-License-Identifier: Apache-2.0
"""A pipeline computes what one device does, and sends what was planned.

In float32 the two differ by rounding: a pipeline adds up microbatches, chunks
and devices in another order. In float64, where rounding is 1e-16, loss and
gradient of both agree to 1e-12 of each parameter's largest gradient, for all
shapes, cache rules, meshes and kinds of sublayers.
"""

import dataclasses

import jax
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.models import residuals
from attnres_jax.models.residuals import prenorm
from attnres_jax.train import checkpoint
from attnres_jax.train import saves
from attnres_jax.train import train_state
from tests import compare
from tests import tiny_network
from tests.pipeline import networks

SHAPES = [
  (4, 2, 8, 16, 4),
  (4, 2, 8, 16, 3),
  (4, 4, 8, 32, 5),
  (2, 3, 4, 12, 2),
  (4, 1, 8, 8, 2),
]


def _slow():
  """Shapes, cache rules, forms, loops, and sublayers of many kinds."""
  for shape in SHAPES:
    for data in (1, 2):
      yield shape, dict(data=data), {}
  for rule in ("naive", "cached"):
    for schedule in ("fused", "gpipe"):
      pipeline = dict(rule=rule, schedule=schedule)
      yield (
        (2, 2, 2, 4, 1),
        None,
        dict(scheme="full_attnres", pipeline=pipeline),
      )
  for scheme in (
    "block_attnres",
    "full_attnres",
    "delta_attnres",
    "delta_block",
  ):
    for form in ("two_phase", "one_softmax"):
      fields = dict(scheme=scheme, form=form, remat="full")
      yield networks.SMALL, None, fields
  for shape, fields in (
    ((2, 1, 2, 8, 2), {}),
    # Blocks begin within a pattern, and recomputation.
    ((2, 1, 2, 24, 3), dict(scan_layers=True, remat="full")),
    ((2, 2, 4, 16, 2), {}),
  ):
    yield shape, None, dict(depth_loop="scan", **fields)
  # Ten sublayers on four chunks: two or three, of up to three kinds.
  kinds = tiny_network.KINDS | dict(last_mixer="mla")
  cut = dict(fsdp=2, expert=2)
  for mesh, gather in ((dict(data=2), "tick"), (cut, "tick"), (cut, "step")):
    yield (2, 2, 2, 10, 4), mesh, dict(pipeline=dict(gather=gather), **kinds)


def _cut(gather):
  """Weights cut over the devices of a rank.

  Sources may change places without any effect, unless a rank then sends another
  one of them, as ranks do here.
  """
  return (4, 2, 4, 8, 1), dict(fsdp=2), dict(pipeline=dict(gather=gather))


@pytest.mark.parametrize(
  "shape,mesh,fields",
  [
    _cut("step"),
    pytest.param(*_cut("tick"), marks=pytest.mark.more),
    # The second chunk, which is one loop, begins within a block.
    pytest.param(
      (2, 1, 2, 14, 2), None, dict(depth_loop="scan"), marks=pytest.mark.more
    ),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in _slow()),
  ],
)
def test_equals_one_device(shape, mesh, fields):
  """In float64, where rounding cannot hide a mistake."""
  networks.assert_as_on_one_device(networks.config(shape, mesh, **fields))


@pytest.mark.parametrize(
  "shape,scheme,reason",
  [
    ((2, 2, 4, 8, 2), "block_attnres", "no two blocks in a row"),
    ((2, 1, 2, 8, 2), "prenorm", "with PreNorm"),
  ],
)
def test_chunks_that_are_no_loops(shape, scheme, reason):
  with pytest.raises(config_lib.ConfigError, match=f"depth_loop.*{reason}"):
    networks.make(networks.config(shape, scheme=scheme, depth_loop="scan"))


@pytest.mark.more
def test_autodiff_of_the_forward_loop_and_evaluation():
  shape, by_autodiff = (2, 1, 2, 2, 1), dict(schedule="gpipe")
  config = networks.config(shape, scheme="prenorm", pipeline=by_autodiff)
  compiled, arguments = networks.compile_step(config)
  expected = networks.on_one_device(networks.unstaged(config))(*arguments)
  networks.assert_equal(networks.call(compiled, arguments), expected, 1e-6)
  compiled, _ = networks.compile_step(config, "loss_sums")
  for a, b in zip(networks.call(compiled, arguments), expected[0]):
    np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.slow
def test_weights_that_travel_in_bfloat16_lose_nothing():
  """Whoever casts them, a product sees the same numbers."""
  results = []
  for mesh in (dict(fsdp=2, expert=2), dict(data=4)):
    compiled, arguments = networks.compile_step(
      networks.of_all_kinds(mesh, dtype="bfloat16")
    )
    results.append(jax.device_get(networks.call(compiled, arguments)))
  networks.assert_equal(*results, 1e-6)


def test_a_step_and_its_checkpoint(tmp_path):
  """A pipeline trains like one device, and each resumes the other's run."""
  pipelined = networks.config(
    (2, 1, 2, 2, 1), scheme="prenorm", tie_embeddings=True
  )
  pipelined = dataclasses.replace(
    pipelined, optim=config_lib.OptimConfig(warmup_steps=1, eps=1e-2)
  )
  plain = networks.unstaged(pipelined)
  rows = pipelined.data.batch_size
  rng = np.random.default_rng(1)
  tokens = rng.integers(
    0, networks.VOCAB, (rows, networks.LENGTH + 1), dtype=np.int32
  )
  segments = rng.integers(0, 3, (rows, networks.LENGTH + 1)).cumsum(
    1, dtype=np.int32
  )
  batch = {"tokens": tokens, "segment_ids": segments}
  programs = [
    train_state.make_program(config, sharding.make_mesh(config.mesh))
    for config in (plain, pipelined)
  ]

  def moved(state, program, name):
    """Saved on one mesh and restored on another."""
    with saves.Saver(tmp_path / name, config_lib.CheckpointConfig()) as saver:
      saver.save(1, state, {"data": None})
    saved = checkpoint.restore_latest(tmp_path / name, program.abstract_state)
    compare.trees(saved.state, state, 0)
    return saved.state

  first = programs[0].init_state()
  states = [first, moved(first, programs[1], "to_pipeline")]
  results = []
  for program, state in zip(programs, states):
    rows = sharding.shard_batch(batch, program.mesh)
    state, metrics = program.train_step(state, rows)
    results.append((state, jax.device_get(metrics)))
  (expected, expected_metrics), (state, metrics) = results
  assert metrics.keys() == expected_metrics.keys()
  for name, value in metrics.items():
    np.testing.assert_allclose(value, expected_metrics[name], rtol=2e-5)
  for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected)):
    np.testing.assert_allclose(
      jax.device_get(a), jax.device_get(b), rtol=0, atol=2e-6
    )
  # Each rank has its share of every matrix, and of its moments.
  core = state.model.sublayers["mlp"].core.gate[...]
  assert core.addressable_shards[0].data.size * 2 == core.size
  moved(state, programs[0], "from_pipeline")


class _Growing(prenorm.PreNorm):
  """Keeps everything, and has no blocks."""

  def init(self, embedding_BTD):
    return (embedding_BTD,)

  def open(self, state, start, stop):
    return state[-1], None

  def close(self, state, carry, stop):
    return (*state, carry)

  def readout(self, state):
    return state[-1]


def test_what_does_not_fit_is_named_in_one_line(monkeypatch):
  monkeypatch.setitem(residuals.RESIDUALS, "growing", _Growing)
  # One that mesh.tensor could cut.
  monkeypatch.setattr(networks, "LENGTH", 8)

  def refused(message, shape, mesh=None, **fields):
    optim, rows = fields.pop("optim", None), fields.pop("rows", None)
    config = networks.config(shape, mesh, **fields)
    if optim:
      config = dataclasses.replace(config, optim=optim)
    if rows:
      data = dataclasses.replace(config.data, batch_size=rows)
      config = dataclasses.replace(config, data=data)
    with pytest.raises(config_lib.ConfigError, match=message) as error:
      train_state.make_program(config, sharding.make_mesh(config.mesh))
    assert "\n" not in str(error.value)

  refused(r"pipeline\.microbatches: got 6", (4, 1, 6, 4, 1))
  refused(r"mesh\.stage: got 4", (4, 1, 4, 2, 1))
  refused(r"pipeline\.virtual_stages: got 3", (2, 3, 2, 4, 1))
  refused(r"mesh\.tensor: got 2", networks.SMALL, dict(tensor=2))
  refused(r"value_residual: got True", networks.SMALL, value_residual=True)
  refused(r"batch_size: got 12", networks.SMALL, dict(data=2), rows=12)
  optim = config_lib.OptimConfig(accumulate_steps=2)
  refused(r"accumulate_steps: got 2", networks.SMALL, optim=optim)
  refused(r"residual\.name: got 'growing'", networks.SMALL, scheme="growing")

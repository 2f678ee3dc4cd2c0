# SPDX-License-Identifier: Apache-2.0
"""Round trips, retention, and what happens to damaged checkpoints."""

import shutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import checkpoint
from attnres_jax import config as config_lib
from attnres_jax import models

CONFIG = config_lib.CheckpointConfig(keep_last=10)


class _State(NamedTuple):
  step: jax.Array
  model: dict[str, jax.Array]
  moments: tuple[jax.Array, ...]


def _state(seed, width=64):
  key = jax.random.key(seed)
  return _State(
    jnp.int32(seed),
    {"w": jax.random.normal(key, (width, 64)), "b": jnp.ones((3,))},
    (jnp.full((width, 64), 0.5 * seed), jnp.zeros((), jnp.int32)),
  )


def _abstract(state):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    state,
  )


def _save(workdir, steps, config=CONFIG):
  with checkpoint.Saver(workdir, config) as saver:
    for step in steps:
      saver.save(step, _state(step), {"config": {}, "at": step})


def _restore(workdir):
  return checkpoint.restore_latest(workdir, _abstract(_state(0)))


def _assert_equal(got, want):
  jax.tree.map(np.testing.assert_array_equal, got, want)
  assert jax.tree.structure(got) == jax.tree.structure(want)


def test_flat_names():
  flat = checkpoint.to_flat(_state(1))
  assert sorted(flat) == [
    "model/b",
    "model/w",
    "moments/0",
    "moments/1",
    "step",
  ]
  _assert_equal(checkpoint.from_flat(_state(2), flat), _state(1))


def test_round_trip(tmp_path):
  _save(tmp_path, [3, 5])
  restored = _restore(tmp_path)
  assert restored.step == 5 and restored.info["at"] == 5
  assert not restored.unreadable
  _assert_equal(restored.state, _state(5))


def test_nothing_saved(tmp_path):
  assert _restore(tmp_path) is None
  assert checkpoint.all_steps(tmp_path) == []


def test_saved_arrays_may_be_donated(tmp_path):
  bump = jax.jit(
    lambda s: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), s),
    donate_argnums=0,
  )
  state = jax.tree.map(lambda x: jnp.zeros((300, 300), x.dtype), _state(0))
  with checkpoint.Saver(tmp_path, CONFIG) as saver:
    for step in range(1, 6):
      state = bump(state)
      saver.save(step, state, {"at": step})
  for step in range(5, 0, -1):
    restored = checkpoint.restore_latest(tmp_path, _abstract(state))
    assert restored.step == step
    assert all((leaf == step).all() for leaf in jax.tree.leaves(restored.state))
    shutil.rmtree(tmp_path / "checkpoints" / str(step))


def test_restores_onto_another_sharding(tmp_path):
  _save(tmp_path, [1])
  mesh = jax.make_mesh(
    (8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  rows = jax.NamedSharding(mesh, jax.P("data"))
  everywhere = jax.NamedSharding(mesh, jax.P())
  abstract = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=rows if x.shape[:1] == (64,) else everywhere
    ),
    _state(0),
  )
  state = checkpoint.restore_latest(tmp_path, abstract).state
  assert state.model["w"].sharding == rows
  _assert_equal(state, _state(1))


def test_retention(tmp_path):
  config = config_lib.CheckpointConfig(keep_last=2, keep_every=4)
  _save(tmp_path, range(1, 11), config)
  assert checkpoint.all_steps(tmp_path) == [4, 8, 9, 10]


def _largest(folder):
  files = [path for path in folder.rglob("*") if path.is_file()]
  return max(files, key=lambda path: path.stat().st_size)


def _truncate(folder):
  file = _largest(folder)
  with file.open("r+b") as f:
    f.truncate(file.stat().st_size // 2)


DAMAGE = {
    "truncated": _truncate,
    "data deleted": lambda folder: _largest(folder).unlink(),
    "part deleted": lambda folder: shutil.rmtree(folder / "model"),
    "all deleted": lambda folder: [
        shutil.rmtree(folder), folder.mkdir()
    ],
    "metadata cut": lambda folder: (folder / "_CHECKPOINT_METADATA").write_text(
        '{"item_ha'
    ),
    "metadata deleted": lambda folder: (
        folder / "_CHECKPOINT_METADATA"
    ).unlink(),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_newest_is_set_aside(tmp_path, damage):
  _save(tmp_path, [1, 2, 3])
  DAMAGE[damage](tmp_path / "checkpoints" / "3")
  restored = _restore(tmp_path)
  assert restored.step == 2
  _assert_equal(restored.state, _state(2))
  assert list(restored.unreadable) == [3] and restored.unreadable[3]
  assert checkpoint.all_steps(tmp_path) == [1, 2]
  aside = tmp_path / "checkpoints_set_aside"
  assert (aside / "3.0").is_dir()
  assert (aside / "3.0.txt").read_text().strip() == restored.unreadable[3]
  # The same step can be saved and set aside again.
  _save(tmp_path, [3])
  assert _restore(tmp_path).step == 3
  DAMAGE[damage](tmp_path / "checkpoints" / "3")
  assert _restore(tmp_path).step == 2
  assert (aside / "3.1").is_dir()


def test_none_readable_is_an_error_and_moves_nothing(tmp_path):
  _save(tmp_path, [1, 2])
  for step in ("1", "2"):
    _truncate(tmp_path / "checkpoints" / step)
  with pytest.raises(checkpoint.CheckpointError, match="no checkpoint .* read"):
    _restore(tmp_path)
  assert checkpoint.all_steps(tmp_path) == [1, 2]
  assert not (tmp_path / "checkpoints_set_aside").exists()


def test_another_model_is_an_error_not_damage(tmp_path):
  _save(tmp_path, [1, 2])
  wanted = _abstract(_state(0, width=32))
  with pytest.raises(checkpoint.CheckpointError) as error:
    checkpoint.restore_latest(tmp_path, wanted)
  assert "model/w: (64, 64) there, (32, 64) here" in str(error.value)
  assert checkpoint.all_steps(tmp_path) == [1, 2]


def test_unfinished_save_is_ignored_and_cleared(tmp_path):
  _save(tmp_path, [1])
  folder = tmp_path / "checkpoints"
  shutil.copytree(folder / "1", folder / "2.orbax-checkpoint-tmp")
  assert _restore(tmp_path).step == 1
  _save(tmp_path, [2])
  assert _restore(tmp_path).step == 2
  assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]


class _Run(NamedTuple):
  model: models.Transformer
  moments: jax.Array


def _run_config():
  config = config_lib.default_config()
  config.model.update(
    width=16, num_layers=2, num_heads=2, mlp_width=32, vocab_size=257
  )
  config.model.residual.num_blocks = 2
  return config_lib.build_run_config(config)


def test_load_model(tmp_path):
  config = _run_config()
  trained = [models.build_model(config.model, seed=seed) for seed in (1, 2)]
  info = {"config": config_lib.to_dict(config)}
  with checkpoint.Saver(tmp_path, CONFIG) as saver:
    for step, model in enumerate(trained):
      saver.save(step, _Run(model, jnp.zeros((7,))), info)
  loaded_config, loaded = checkpoint.load_model(tmp_path)
  assert loaded_config == config
  _assert_equal(loaded, trained[1])
  _assert_equal(checkpoint.load_model(tmp_path, step=0)[1], trained[0])
  with pytest.raises(checkpoint.CheckpointError, match="no checkpoint of step"):
    checkpoint.load_model(tmp_path, step=7)
  tokens_BT = jnp.arange(12).reshape(2, 6)
  np.testing.assert_array_equal(loaded(tokens_BT), trained[1](tokens_BT))


def test_load_model_without_checkpoints(tmp_path):
  with pytest.raises(checkpoint.CheckpointError, match="no readable"):
    checkpoint.load_model(tmp_path)


def test_failed_save_is_not_swallowed(tmp_path, monkeypatch):
  def fail():
    raise OSError("disk full")

  with pytest.raises(OSError, match="disk full"):
    with checkpoint.Saver(tmp_path, CONFIG) as saver:
      saver.save(1, _state(1), {"at": 1})
      monkeypatch.setattr(saver._checkpointer, "wait", fail)
      saver.wait()

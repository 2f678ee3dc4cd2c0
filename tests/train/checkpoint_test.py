# SPDX-License-Identifier: Apache-2.0
"""Round trips, retention, and what happens to damaged checkpoints."""

import errno
import gc
import json
import os
import random
import re
import shutil
import sys
from typing import NamedTuple

from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import config as config_lib
from attnres_jax import models
from attnres_jax.common import files
from attnres_jax.train import checkpoint
from attnres_jax.train import checksums
from attnres_jax.train import orbax_io
from attnres_jax.train import saves
from tests import tiers
from tests import tiny_network

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
  with saves.Saver(workdir, config) as saver:
    for step in steps:
      saver.save(step, _state(step), {"config": {}, "at": step})


def _restore(workdir):
  return checkpoint.restore_latest(workdir, _abstract(_state(0)))


def _assert_equal(got, want):
  jax.tree.map(np.testing.assert_array_equal, got, want)
  assert jax.tree.structure(got) == jax.tree.structure(want)


@pytest.mark.parametrize("name", ["run[1]", "r*", "run?"])
def test_round_trip_in_a_folder_whose_name_would_be_a_pattern(tmp_path, name):
  for step, folder in enumerate(["run1", name]):
    _save(tmp_path / folder, [step, step + 3])
    restored = _restore(tmp_path / folder)
    assert restored.step == restored.info["at"] == step + 3
    assert not restored.unreadable
    _assert_equal(restored.state, _state(step + 3))


def test_nothing_saved(tmp_path):
  assert _restore(tmp_path) is None
  assert checkpoint.all_steps(tmp_path) == []
  with pytest.raises(checkpoint.CheckpointError, match="no readable"):
    checkpoint.load_model(tmp_path)


def test_saved_arrays_may_be_donated(tmp_path):
  bump = jax.jit(
    lambda s: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), s),
    donate_argnums=0,
  )
  state = jax.tree.map(lambda x: jnp.zeros((300, 300), x.dtype), _state(0))
  with saves.Saver(tmp_path, CONFIG) as saver:
    for step in range(1, 6):
      state = bump(state)
      saver.save(step, state, {"at": step})
  for step in range(5, 0, -1):
    restored = checkpoint.restore_latest(tmp_path, _abstract(state))
    assert restored.step == step
    assert all((leaf == step).all() for leaf in jax.tree.leaves(restored.state))
    shutil.rmtree(tmp_path / "checkpoints" / str(step))


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


@tiers.parametrize("damage", DAMAGE, first=3)
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


@pytest.mark.parametrize("failures, step", [(2, 3), (3, 2)])
def test_a_store_that_fails_for_a_moment(tmp_path, monkeypatch, failures, step):
  _save(tmp_path, [2, 3])

  def failing(read):
    left = [failures]

    def fail_or_read(*args, **options):
      left[0] -= 1
      if left[0] >= 0:
        raise ValueError("UNAVAILABLE: 503")
      return read(*args, **options)

    return fail_or_read

  monkeypatch.setattr(checkpoint, "_REMOTE_PAUSES", (0.0, 0.0))
  with monkeypatch.context() as patched:
    patched.setattr(checkpoint.files, "is_remote", lambda path: True)
    with patched.context() as described:
      described.setattr(orbax_io, "describe", failing(orbax_io.describe))
      assert checkpoint.newest_info(tmp_path)["at"] == step
    patched.setattr(checkpoint, "_read", failing(checkpoint._read))
    restored = _restore(tmp_path)
  assert restored.step == step
  assert restored.unreadable.keys() == set(range(step + 1, 4))
  assert checkpoint.all_steps(tmp_path) == list(range(2, step + 1))


def _flip(file, rng):
  data = bytearray(file.read_bytes())
  data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
  file.write_bytes(data)


@pytest.mark.parametrize("damaged,read", [(3, 2), (2, 3)])
def test_metadata_that_orbax_cannot_parse(tmp_path, damaged, read):
  _save(tmp_path, [1, 2, 3])
  file = tmp_path / "checkpoints" / str(damaged) / "_CHECKPOINT_METADATA"
  text = file.read_text()
  file.write_text(text.replace("init_timestamp_nsecs", "init_timestamp_nsec{"))
  assert file.read_text() != text
  assert checkpoint.all_steps(tmp_path) == [1, 2, 3]
  restored = _restore(tmp_path)
  assert restored.step == read and list(restored.unreadable) == [damaged]
  assert "init_timestamp_nsec{" in restored.unreadable[damaged]
  # Orbax would not save another one beside it.
  _save(tmp_path, [4])
  assert _restore(tmp_path).step == 4


def test_a_changed_data_position_is_noticed(tmp_path):
  _save(tmp_path, [1, 2])
  file = tmp_path / "checkpoints" / "2" / "_CHECKPOINT_METADATA"
  values = json.loads(file.read_text())
  assert values["custom_metadata"]["at"] == 2
  values["custom_metadata"]["at"] = 3
  file.write_text(json.dumps(values))
  assert checkpoint.newest_info(tmp_path)["at"] == 1
  restored = _restore(tmp_path)
  assert restored.step == 1 and restored.info["at"] == 1
  assert restored.unreadable == {
    2: "DamageError: _CHECKPOINT_METADATA: its content has changed"
  }


def test_a_large_file_has_many_checksums(tmp_path, monkeypatch):
  monkeypatch.setattr(checksums, "BLOCK_BYTES", 1000)
  _save(tmp_path, [1, 2])
  folder = tmp_path / "checkpoints" / "2"
  listed = json.loads((folder / checksums.FILE).read_text())["files"]
  name = max(listed, key=lambda name: len(listed[name]["xxh3"]))
  size = (folder / name).stat().st_size
  assert len(listed[name]["xxh3"]) == -(-size // 1000) > 10
  _flip(folder / name, random.Random(0))
  # Two processes check half of the blocks each; one of them sees it.
  parts, folder = ("model", "training"), epath.Path(folder)
  damage = [checksums.damage(folder, parts, (i, 2)) for i in range(2)]
  assert sorted(map(bool, damage)) == [False, True]
  assert _restore(tmp_path).step == 1


def test_without_checksums_it_loads_unverified(tmp_path):
  _save(tmp_path, [1])
  (tmp_path / "checkpoints" / "1" / checksums.FILE).unlink()
  restored = _restore(tmp_path)
  assert restored.step == 1
  assert checkpoint.newest_info(tmp_path)["at"] == 1


def test_verify_lists_what_is_damaged(tmp_path, capsys):
  command = ["verify", f"--workdir={tmp_path}"]
  assert checkpoint.main(command) == 2
  assert capsys.readouterr().err.count("\n") == 1
  _save(tmp_path, [1, 2, 3, 4])
  assert checkpoint.main(command) == 0
  folder = tmp_path / "checkpoints"
  (folder / "1" / checksums.FILE).unlink()
  _flip(_largest(folder / "2"), random.Random(0))
  (folder / "3" / "model" / "_METADATA").unlink()
  capsys.readouterr()
  assert checkpoint.main(command) == 1
  name = _largest(folder / "2").relative_to(folder / "2")
  assert capsys.readouterr().out.splitlines() == [
    "step 1: unverified, saved without checksums.json",
    f"step 2: damaged, {name}: its content has changed",
    "step 3: damaged, model/_METADATA: it is missing",
    "step 4: ok",
  ]
  # Looking changes nothing.
  assert checkpoint.all_steps(tmp_path) == [1, 2, 3, 4]


def test_a_save_without_room_is_not_begun(tmp_path, monkeypatch):
  with saves.Saver(tmp_path, CONFIG) as saver:
    saver.save(1, _state(1), {"at": 1})
    saver.wait()
    size = sum(
      path.stat().st_size
      for path in (tmp_path / "checkpoints" / "1").rglob("*")
      if path.is_file()
    )
    monkeypatch.setattr(files, "_free_bytes", lambda path: 7)
    with pytest.raises(files.DiskFullError) as full:
      saver.save(2, _state(2), {"at": 2})
    line = str(full.value)
    assert str(tmp_path / "checkpoints" / "2") in line and "7 free" in line
    needed = int(re.search(r"([0-9,]+) bytes needed", line)[1].replace(",", ""))
    assert 0.8 * size < needed <= size
    monkeypatch.undo()
    saver.save(2, _state(2), {"at": 2})
  assert _restore(tmp_path).step == 2


def test_a_disk_that_fills_up_during_a_save_is_one_line(
  tmp_path, monkeypatch, caplog
):
  def write(folder, info):
    raise OSError(errno.ENOSPC, "No space left on device")

  with pytest.raises(files.DiskFullError, match="bytes needed, .* free"):
    with saves.Saver(tmp_path, CONFIG) as saver:
      saver.save(1, _state(1), {"at": 1})
      saver.wait()
      monkeypatch.setattr(checksums, "write", write)
      saver.save(2, _state(2), {"at": 2})
      saver.wait()
  assert not caplog.records
  monkeypatch.undo()
  assert _restore(tmp_path).step == 1
  _save(tmp_path, [2])
  assert _restore(tmp_path).step == 2


def _resources():
  gc.collect()
  return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.more
def test_saves_leave_no_descriptors_and_threads_behind(tmp_path):
  config = config_lib.CheckpointConfig(keep_last=1)
  state = {"model": {"w": jnp.zeros((2,))}}
  with saves.Saver(tmp_path, config) as saver:
    for step in range(1, 16):
      saver.save(step, state, {"at": step})
      if step == 5:
        saver.wait()
        first = _resources()
    saver.wait()
    last = _resources()
  assert last[0] <= first[0] + 1 and last[1] <= first[1] + 2


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
  wider = _abstract(_state(0, width=32))
  with pytest.raises(checkpoint.CheckpointError) as error:
    checkpoint.restore_latest(tmp_path, wider)
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


def test_load_model(tmp_path):
  config = config_lib.RunConfig(model=tiny_network.config(vocab_size=257))
  trained = [models.build_model(config.model, seed=seed) for seed in (1, 2)]
  info = {"config": config_lib.to_dict(config)}
  with saves.Saver(tmp_path, CONFIG) as saver:
    for step, model in enumerate(trained):
      saver.save(step, _Run(model, jnp.zeros((7,))), info)
  loaded_config, loaded = checkpoint.load_model(tmp_path)
  assert loaded_config == config
  _assert_equal(loaded, trained[1])
  _assert_equal(checkpoint.load_model(tmp_path, step=0)[1], trained[0])
  with pytest.raises(checkpoint.CheckpointError, match="no checkpoint of step"):
    checkpoint.load_model(tmp_path, step=7)


def test_arrays_that_cannot_be_listed_name_the_damaged_file(tmp_path):
  _save(tmp_path, [1])
  folder = tmp_path / "checkpoints" / "1"
  (folder / "training" / "manifest.ocdbt").unlink()
  for reason in ("training/manifest.ocdbt: it is missing", "training: arrays"):
    with pytest.raises(checkpoint.CheckpointError, match=reason):
      checkpoint.describe(tmp_path, 1)
    (folder / "checksums.json").unlink(missing_ok=True)


def test_a_failed_read_leaves_nothing_that_prints_later(
  tmp_path, caplog, monkeypatch
):
  """Coroutines of Orbax, of which Python warns once it collects them."""
  _save(tmp_path, [1])
  folder = tmp_path / "checkpoints" / "1"
  (folder / "training" / "manifest.ocdbt").unlink()
  (folder / "checksums.json").unlink()
  warned = []
  monkeypatch.setattr(sys, "unraisablehook", warned.append)
  for read in (
    lambda: checkpoint.describe(tmp_path, 1),
    lambda: checkpoint.read(tmp_path, 1, {}),
    lambda: _restore(tmp_path),
  ):
    with pytest.raises(checkpoint.CheckpointError):
      read()
    gc.collect()
  assert not warned
  assert not [log for log in caplog.records if log.name == "asyncio"]

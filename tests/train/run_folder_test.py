# SPDX-License-Identifier: Apache-2.0
"""A run reads its folder before it starts."""

import dataclasses

from etils import epath
import pytest

from attnres_jax import config as config_lib
from attnres_jax.common import plans
from attnres_jax.common import sharding
from attnres_jax.common import trees
from attnres_jax.train import run_folder
from attnres_jax.train import train_state
from tests import tiny_network

# Another value of each field of a model that changes how it is computed.
_OTHERWISE = {
  "attention_kernel": "tiled",
  "remat": "full",
  "scan_layers": False,
  "depth_loop": "scan",
  "kda.chunk_size": 16,
  "kda.save": "arguments",
  "residual.form": "one_softmax",
  "residual.schedule_size": 3,
}


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints_set_aside"])
def test_a_file_in_the_place_of_checkpoints_is_refused(name, tmp_path):
  """At the start, not at the first save."""
  (tmp_path / name).write_text("a file of somebody")
  with pytest.raises(config_lib.ConfigError, match=f"^--workdir: .*{name}"):
    run_folder.refuse_foreign("--workdir", epath.Path(tmp_path))


def test_every_field_of_execution_is_tried():
  residual = config_lib.residual_config("full_attnres")
  model = config_lib.ModelConfig(residual=residual)
  model = config_lib.flatten(dataclasses.asdict(model))
  assert _OTHERWISE.keys() == {
    name for name in model if "execution" in config_lib.affects(f"model.{name}")
  }


@pytest.mark.parametrize("name", _OTHERWISE)
def test_a_run_may_resume_when_a_model_is_computed_otherwise(name):
  """Its checkpoint has the same arrays."""

  def arrays(model):
    data = config_lib.DataConfig(sequence_length=16, batch_size=2)
    config = config_lib.RunConfig(model=model, data=data)
    mesh = sharding.make_mesh(config_lib.MeshConfig(data=1))
    state = train_state.make_program(config, mesh).abstract_state
    return {n: (a.shape, a.dtype) for n, a in trees.to_flat(state).items()}

  scheme = "full_attnres" if "schedule" in name else "block_attnres"
  run = config_lib.RunConfig(
    model=tiny_network.config(scheme, **tiny_network.KINDS)
  )
  other = plans.apply(run, {f"model.{name}": _OTHERWISE[name]})
  assert other != run and run_folder.is_harmless(f"model.{name}")
  assert arrays(other.model) == arrays(run.model)

# SPDX-License-Identifier: Apache-2.0
"""Models are plain pytrees: they train with nnx's graph machinery off."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]

# Read by flax when it is imported, hence another process.
FLAGS = {"NNX_GRAPH_MODE": "false", "NNX_GRAPH_UPDATES": "false"}

SCRIPT = """
from flax import configurations
import jax
import jax.numpy as jnp
from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.train import train_state
from tests import tiny_network

assert not configurations.config.nnx_graph_mode
assert not configurations.config.nnx_graph_updates
jax.config.update("jax_disable_most_optimizations", True)
run = config_lib.RunConfig(
  model=tiny_network.config(block_size=4, remat="full"),
  data=config_lib.DataConfig(batch_size=2, sequence_length=3),
  optim=config_lib.OptimConfig(warmup_steps=0),
)
mesh = sharding.make_mesh(config_lib.MeshConfig(data=1))
program = train_state.make_program(run, mesh)
state = program.init_state()
batch = {"tokens": jnp.ones((2, 4), jnp.int32)}
depth = program.depth_step(state.model, batch)
state, metrics = program.train_step(state, batch)
assert metrics["finite"] and depth["depth_entropy"].shape == (5,)
queries = state.model.residual.queries
queries.query[...] = jnp.ones_like(queries.query[...])
state, metrics = program.train_step(state, batch)
assert metrics["finite"]
print("trained")
"""


def test_nothing_needs_graphs():
  path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
  done = subprocess.run(
    [sys.executable, "-W", "error::FutureWarning", "-c", SCRIPT],
    env=os.environ | FLAGS | {"PYTHONPATH": path},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.stdout.endswith("trained\n"), done.stderr

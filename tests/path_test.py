# SPDX-License-Identifier: Apache-2.0
"""The number of files that one training step runs through, and of calls."""

import pathlib
import sys

import jax

import attnres_jax
from attnres_jax import config as config_lib
from attnres_jax.common import sharding
from attnres_jax.train import train_state
from tests import tiers

# A step of PreNorm runs through the trunk, mixers, norms, loss and optimiser.
# Block adds its scheme, its reads and their two operators.
MOST = {"prenorm": 27, "block_attnres": 34}
# Functions between the step and the softmax over depth, with both.
MOST_CALLS = 17
_SOFTMAX = "/depth_attention/plain.py", "forward"
_LEFT_OUT = (
  "attnres_jax/config/",
  "attnres_jax/data/",
  "attnres_jax/common/compiler.py",
  "attnres_jax/common/chips.py",
)


@tiers.parametrize("residual", MOST, first=["block_attnres"])
def test_a_step_is_followed_through_few_files(residual):
  """Counts the files whose functions run while a plain step is traced.

  Configuration, options of the compiler and data are left out, and so are
  kernels for other platforms, which a program contains as branches.
  """
  config = config_lib.load_config(
    f"configs/lm.py:size=micro,runlocal,residual={residual}", {"mesh.data": 1}
  )
  mesh = sharding.make_mesh(config.mesh)
  files, calls = set(), []
  root = f"{pathlib.Path(attnres_jax.__file__).parents[1]}/"
  # A virtual environment may be in the clone, too.
  ours = f"{root}attnres_jax/", f"{root}kernels/", __file__

  def called(frame, event, arg):
    del arg
    code = frame.f_code
    files.add(code.co_filename)
    is_softmax = (code.co_filename[-len(_SOFTMAX[0]) :], code.co_name)
    if event == "call" and is_softmax == _SOFTMAX:
      calls.append(sum(f.startswith(ours) for f in _stack(frame)))

  shape = config.data.batch_size, config.data.sequence_length + 1
  tokens = jax.ShapeDtypeStruct(shape, "int32")
  # Forget what another test has traced already.
  jax.clear_caches()
  sys.setprofile(called)
  try:
    program = train_state.make_program(config, mesh)
    batch = {"tokens": tokens, "segment_ids": tokens}
    jax.eval_shape(program.train_step, program.abstract_state, batch)
  finally:
    sys.setprofile(None)
  names = [
    name
    for file in files
    if (name := file.removeprefix(root)).startswith("attnres_jax/")
    or "/attnres_kernels/" in name
  ]
  read = sorted(
    name
    for name in names
    if not name.startswith(_LEFT_OUT) and "/pallas_" not in name
  )
  assert "attnres_jax/models/trunk.py" in read
  assert len(read) <= MOST[residual], "\n".join(read)
  assert bool(calls) == (residual == "block_attnres")
  # This test's own frame is one more.
  assert max(calls, default=0) <= MOST_CALLS + 1, calls


def _stack(frame):
  """The files of all functions that run, the innermost first."""
  while frame:
    yield frame.f_code.co_filename
    frame = frame.f_back

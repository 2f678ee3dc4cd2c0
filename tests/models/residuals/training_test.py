# SPDX-License-Identifier: Apache-2.0
"""Every registered scheme trains in both precisions, and its runs resume."""

import shutil

import jax
import numpy as np
import pytest

from attnres_jax.models import residuals
from attnres_jax.train import loop
from tests import tiny_run

STEPS, SAVED = 20, 10
FIELDS = {
  "train.steps": STEPS,
  "train.eval_every": STEPS,
  "train.depth_every": 0,
  "checkpoint.every_steps": SAVED,
  "optim.peak_lr": 0.01,
  "mesh.data": 1,
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
  return tiny_run.corpus(tmp_path_factory.mktemp("data")) | FIELDS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", residuals.RESIDUALS)
def test_learns_and_resumes_bit_for_bit(name, dtype, fields, tmp_path):
  config = tiny_run.config(
    fields | {"model.residual.name": name, "model.dtype": dtype}
  )
  unbroken, resumed = tmp_path / "whole", tmp_path / "resumed"
  # JAX promotes dtypes where it lowers its own attention in bfloat16.
  with tiny_run.traced_once(), jax.numpy_dtype_promotion("standard"):
    loop.train_and_evaluate(config, unbroken)
    shutil.copytree(unbroken, resumed)
    tiny_run.rewind(resumed, SAVED)
    loop.train_and_evaluate(config, resumed)
  (resume,) = tiny_run.events(resumed, "resume")
  assert resume["step"] == SAVED
  tiny_run.assert_same_run(unbroken, resumed)
  rows = tiny_run.rows(unbroken, "train")
  losses = np.array([rows[step]["loss"] for step in sorted(rows)])
  assert len(losses) == STEPS and np.isfinite(losses).all()
  # Bytes: ln(257) = 5.55 at first.
  assert losses[-3:].mean() < losses[0] - 0.5

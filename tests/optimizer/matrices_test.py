# SPDX-License-Identifier: Apache-2.0
"""Parameters as matrices. What each of them is: tests/letters_test.py."""

import math

from flax import nnx
import jax.numpy as jnp
import numpy as np
import pytest

from attnres_jax import optimizer
from attnres_jax.optimizer import muon


def test_trained_leaves_out_only_selection_biases():
  tree = {
    "router": nnx.Param(jnp.zeros((2, 3)), axes="D|E"),
    "bias": nnx.Param(jnp.zeros(3), axes="E", load=True),
  }
  found = optimizer.trained(tree)
  assert found["router"][...].shape == (2, 3)
  assert found["bias"].get_value() is None


@pytest.mark.parametrize(
  "axes,shape,expected",
  [
    ("D|NH", (2, 3, 4, 5), (2, 3, 20)),
    ("NH|D", (2, 4, 5, 3), (2, 20, 3)),
    ("E|D|F", (2, 3, 4, 5), (2, 3, 4, 5)),
    ("D|F", (4, 5), (4, 5)),
  ],
)
def test_matrices(axes, shape, expected):
  x = np.arange(math.prod(shape)).reshape(shape)
  found = muon.as_matrices(x, axes)
  assert found.shape == expected
  np.testing.assert_array_equal(found.ravel(), x.ravel())


@pytest.mark.parametrize("axes,ndim", [("D|NH", 2), ("E|D|F", 2)])
def test_axes_that_do_not_fit(axes, ndim):
  with pytest.raises(ValueError, match=r"axes '.*' do not fit .* shape"):
    muon.as_matrices(np.zeros((2,) * ndim), axes)

# SPDX-License-Identifier: Apache-2.0
"""A teacher whose residual connections are random, and students of it.

The experiment of the second blog post on attention residuals, of which width,
depth, data and optimiser are not stated; those here are ours. A layer is
f_l(h) = W2_l relu(W1_l RMSNorm(h)). With values v_0 = x and v_l = f_l(h_l),
layer l reads a mixture h_l of v_0 to v_{l-1}, and so does the readout,
l = L + 1:

  teacher    h_l = sum_i a_i v_i, a = softmax(z_l / T), z_l ~ N(0, 1), fixed
  standard   h_l = sum_i v_i
  rescaled   h_l = mean_i v_i
  attention  h_l = sum_i a_i v_i, a = softmax_i(w_l . RMSNorm(v_i)), w_l learned
  static     h_l = sum_i a_i v_i, a = softmax(z_l), z_l learned

w_l and the z_l of students are zero at first. Shapes: E runs, L layers, B rows,
D columns, F hidden units, I sources.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

STUDENTS = ("standard", "rescaled", "attention", "static")
READOUTS = ("raw", "normalised")
_EPSILON = 1e-9

Parameters = dict[str, jax.Array]


class Sizes(NamedTuple):
  """Sizes D, L and F of networks, of data and training.

  Losses that are reported are of further rows. Adam has a constant rate.
  """

  width: int = 32
  layers: int = 8
  hidden: int = 128
  train_rows: int = 8192
  test_rows: int = 2048
  batch: int = 64
  steps: int = 2000


def rms_norm(x: jax.Array) -> jax.Array:
  """Divides by the root mean square along the last axis."""
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + _EPSILON)


def functions(key: jax.Array, sizes: Sizes) -> Parameters:
  """W1 [L, D, F] and W2 [L, F, D], of variance 1 / fan-in."""
  up, down = jax.random.split(key)
  layers, width, hidden = sizes.layers, sizes.width, sizes.hidden
  draw = jax.random.normal
  return {
    "up_LDF": draw(up, (layers, width, hidden)) * width**-0.5,
    "down_LFD": draw(down, (layers, hidden, width)) * hidden**-0.5,
  }


def teacher_scores(key: jax.Array, layers: int) -> jax.Array:
  """The z of a teacher: row l - 1 has one for each source of layer l."""
  return jax.random.normal(key, (layers + 1, layers + 1))


def student(name: str, key: jax.Array, sizes: Sizes) -> Parameters:
  """The initial parameters of a student."""
  depth = {
    "attention": {"query_LD": jnp.zeros((sizes.layers + 1, sizes.width))},
    "static": {"scores_LI": jnp.zeros((sizes.layers + 1, sizes.layers + 1))},
  }
  return functions(key, sizes) | depth.get(name, {})


def output(
  name: str, parameters: Parameters, x_BD: jax.Array, readout: str
) -> jax.Array:
  """The output of a network, [B, D].

  "static" names a teacher, whose scores are z / T. The readout is "raw" for
  h_{L+1}, "normalised" for its RMSNorm.
  """
  read = _READS[name]
  values = [x_BD]
  for up_DF, down_FD in zip(parameters["up_LDF"], parameters["down_LFD"]):
    h_BD = read(parameters, values)
    values.append(jax.nn.relu(rms_norm(h_BD) @ up_DF) @ down_FD)
  h_BD = read(parameters, values)
  return rms_norm(h_BD) if readout == "normalised" else h_BD


def _attention(parameters, values):
  v_IBD = jnp.stack(values)
  w_D = parameters["query_LD"][len(values) - 1]
  a_IB = jax.nn.softmax(rms_norm(v_IBD) @ w_D, axis=0)
  return jnp.einsum("ib,ibd->bd", a_IB, v_IBD)


def _static(parameters, values):
  sources = len(values)
  a_I = jax.nn.softmax(parameters["scores_LI"][sources - 1, :sources])
  return jnp.einsum("i,ibd->bd", a_I, jnp.stack(values))


_READS: Mapping[str, Callable[[Parameters, Sequence[jax.Array]], jax.Array]] = {
  "standard": lambda _, values: sum(values[1:], values[0]),
  "rescaled": lambda _, values: sum(values[1:], values[0]) / len(values),
  "attention": _attention,
  "static": _static,
}


class Task(NamedTuple):
  """The outputs of a teacher, and the student's first parameters.

  Inputs are rows of training and test. The scale is 1 over the variance of y,
  in which losses are measured. `order` is the key of the batches.
  """

  x_BD: jax.Array
  y_BD: jax.Array
  scale: jax.Array
  first: Parameters
  order: jax.Array


def task(
  name: str, readout: str, temperature: jax.Array, seed: jax.Array, sizes: Sizes
) -> Task:
  """Draws teacher, data, student and batches of a run independently.

  Runs with the same seed share all four; the teacher's z is the same at every
  temperature.
  """
  keys = jax.random.split(jax.random.key(seed), 5)
  teacher = functions(keys[0], sizes) | {
    "scores_LI": teacher_scores(keys[1], sizes.layers) / temperature
  }
  rows = sizes.train_rows + sizes.test_rows
  x_BD = jax.random.normal(keys[2], (rows, sizes.width))
  y_BD = output("static", teacher, x_BD, readout)
  scale = 1 / jnp.mean(jnp.var(y_BD, axis=0))
  return Task(x_BD, y_BD, scale, student(name, keys[3], sizes), keys[4])


def loss(
  name: str, parameters: Parameters, x_BD, y_BD, scale, readout: str
) -> jax.Array:
  """Mean squared error over the variance of the teacher's outputs."""
  error_BD = output(name, parameters, x_BD, readout) - y_BD
  return jnp.mean(error_BD**2) * scale


@functools.partial(jax.jit, static_argnames=("name", "readout", "sizes"))
def train(
  name: str, readout: str, temperature_E: jax.Array, rate_E: jax.Array,
  seed_E: jax.Array, sizes: Sizes,
) -> dict[str, jax.Array]:  # fmt: skip
  """Trains E students of one name at once.

  Returns:
    Losses on the test rows, [E]: `first_loss` and `test_loss`; not finite for a
    run that has diverged.
  """

  def train_one(temperature, rate, seed):
    data = task(name, readout, temperature, seed, sizes)
    test_rows = jnp.arange(sizes.train_rows, len(data.x_BD))

    def loss_of(parameters, rows):
      x_BD, y_BD = data.x_BD[rows], data.y_BD[rows]
      return loss(name, parameters, x_BD, y_BD, data.scale, readout)

    adam = optax.scale_by_adam()

    def step(carry: Any, number):
      parameters, state = carry
      key = jax.random.fold_in(data.order, number)
      rows = jax.random.randint(key, (sizes.batch,), 0, sizes.train_rows)
      gradients = jax.grad(loss_of)(parameters, rows)
      with jax.numpy_dtype_promotion("standard"):  # Adam counts in integers.
        updates, state = adam.update(gradients, state)
      move = lambda p, u: p - rate * u
      return (jax.tree.map(move, parameters, updates), state), None

    start = data.first, adam.init(data.first)
    (last, _), _ = jax.lax.scan(step, start, jnp.arange(sizes.steps))
    losses = [loss_of(p, test_rows) for p in (data.first, last)]
    return dict(zip(("first_loss", "test_loss"), losses))

  return jax.vmap(train_one)(temperature_E, rate_E, seed_E)

# SPDX-License-Identifier: Apache-2.0
"""The toy's identities, and its attention against the definition in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from attnres_jax.common import csv_rows
from experiments.teacher_student import report
from experiments.teacher_student import run
from experiments.teacher_student import toy

SIZES = toy.Sizes(
  width=8, layers=4, hidden=16, train_rows=64, test_rows=32, batch=8, steps=3
)


@pytest.fixture(scope="module")
def x():
  return jax.random.normal(jax.random.key(1), (5, SIZES.width))


def _student(name):
  return toy.student(name, jax.random.key(0), SIZES)


def _definition(parameters, x, weights):
  """The network in float64; weights(l, values) of the sources of layer l."""
  norm = lambda a: a / np.sqrt(np.mean(a**2, -1, keepdims=True))
  wide = {name: np.asarray(a, np.float64) for name, a in parameters.items()}
  values = [np.asarray(x, np.float64)]
  mix = lambda l: sum(
    np.asarray(a)[..., None] * v for a, v in zip(weights(l, values), values)
  )
  for l in range(1, SIZES.layers + 1):
    hidden = np.maximum(norm(mix(l)) @ wide["up_LDF"][l - 1], 0)
    values.append(hidden @ wide["down_LFD"][l - 1])
  return mix(SIZES.layers + 1)


def test_attention_is_that_of_the_definition(x):
  rng = np.random.default_rng(0)
  query = rng.normal(size=(SIZES.layers + 1, SIZES.width))
  parameters = _student("attention") | {"query_LD": jnp.float32(query)}

  def weights(l, values):
    scores = np.stack(
      [
        v / np.sqrt(np.mean(v**2, -1, keepdims=True)) @ query[l - 1]
        for v in values
      ]
    )
    return special.softmax(scores, axis=0)

  actual = toy.output("attention", parameters, x, "raw")
  np.testing.assert_allclose(
    actual, _definition(parameters, x, weights), rtol=2e-4, atol=1e-5
  )


@pytest.mark.parametrize(
  "name,weight", [("standard", lambda l: 1.0), ("rescaled", lambda l: 1 / l)]
)
def test_sum_and_mean(name, weight, x):
  parameters = _student(name)
  expected = _definition(parameters, x, lambda l, values: [weight(l)] * l)
  actual = toy.output(name, parameters, x, "raw")
  np.testing.assert_allclose(actual, expected, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("readout", toy.READOUTS)
def test_students_at_the_start_are_the_mean(x, readout):
  mean, *others = (
    toy.output(name, _student(name), x, readout)
    for name in ("rescaled", "attention", "static")
  )
  for output in others:
    np.testing.assert_allclose(output, mean, atol=1e-6)


def test_teachers_range_from_one_source_to_all():
  scores = np.asarray(toy.teacher_scores(jax.random.key(3), 8))
  rows = [scores[l - 1, :l] for l in range(1, 10)]
  hot = [jax.nn.softmax(row / 0.01) for row in rows]
  assert sum(float(jnp.max(a)) > 0.95 for a in hot) > 5
  for l, row in enumerate(rows, 1):
    flat = np.asarray(jax.nn.softmax(row / 100))
    assert flat.sum() == pytest.approx(1)
    assert np.abs(l * flat - 1).max() <= 0.05


@pytest.mark.parametrize("readout", toy.READOUTS)
def test_a_student_that_is_the_teacher_has_no_loss(readout):
  data = toy.task("static", readout, jnp.float32(0.1), jnp.int32(0), SIZES)
  keys = jax.random.split(jax.random.key(0), 5)
  same = toy.functions(keys[0], SIZES) | {
    "scores_LI": toy.teacher_scores(keys[1], SIZES.layers) / 0.1
  }
  args = data.x_BD, data.y_BD, data.scale, readout
  assert toy.loss("static", same, *args) == 0
  assert toy.loss("static", data.first, *args) > 0.1


def test_runs_of_a_seed_share_data_and_first_weights():
  tasks = [
    toy.task(name, "raw", jnp.float32(1), jnp.int32(7), SIZES)
    for name in ("standard", "attention")
  ]
  np.testing.assert_array_equal(tasks[0].y_BD, tasks[1].y_BD)
  np.testing.assert_array_equal(
    tasks[0].first["up_LDF"], tasks[1].first["up_LDF"]
  )


@pytest.mark.more
def test_the_command_resumes(tmp_path, monkeypatch):
  monkeypatch.setattr(toy, "READOUTS", ("normalised",))
  monkeypatch.setattr(toy, "STUDENTS", ("standard", "rescaled", "attention"))
  out = tmp_path / "rows.csv"
  monkeypatch.setattr(run, "SIZES", SIZES)
  assert run.main([f"--out={out}", "--seeds=1"]) == 0
  first = out.read_text().splitlines()
  settings = 3 * 25
  assert len(first) == 1 + settings
  assert run.main([f"--out={out}", "--seeds=2"]) == 0
  both = out.read_text().splitlines()
  assert both[: len(first)] == first and len(both) == 1 + 2 * settings
  # Everything that is published can be made from them.
  rows = csv_rows.read(out)
  assert report.results(rows).count("| 100 |") == 1
  best = report.best(rows)
  # One rate of a normalised readout: equal networks, equal losses but rounding.
  (rate, ours), (other, theirs) = (
    best["normalised", name, 1.0] for name in ("standard", "rescaled")
  )
  assert rate == other and ours.keys() == theirs.keys() == {0, 1}
  assert list(ours.values()) == pytest.approx(list(theirs.values()), rel=1e-3)

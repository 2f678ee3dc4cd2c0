# %% [markdown]
# # Teacher and student: does learned attention beat a plain average?
#
# A blog post on attention residuals trains students to imitate a teacher whose
# residual connections are random mixtures. Its answer: a standard residual is
# poor, a plain average (*rescaled*) is about as good as attention. This notebook
# repeats the experiment, first small and with sliders, then with the rows of
# 1,000 runs. It takes about a minute on a CPU.

# %%
import csv

import jax
import numpy as np

from notebooks import colab

colab.fetch("experiments/teacher_student/toy.py")
from experiments.teacher_student import toy

LOOKS = dict(
  zip(toy.STUDENTS, ("#8b929c", "#b5651d", "#1f77b4", "#2ca02c"), strict=True)
)

# %% [markdown]
# ## The teacher
#
# Layer $l$ of the teacher reads $h_l = \sum_i a_i v_i$ with fixed random weights
# $a = \mathrm{softmax}(z_l / T)$. At a high temperature $T$ it reads averages.
# At a low one it reads single outputs.


# %%
def show_teacher(temperature):
  scores = np.asarray(toy.teacher_scores(jax.random.key(1), 8)) / temperature
  visible = np.where(np.tri(9, dtype=bool), scores, -np.inf)
  weights = np.asarray(jax.nn.softmax(visible, axis=1))
  weights = np.where(np.tri(9, dtype=bool), weights, np.nan)
  labels = {"xlabel": "output $v_i$", "ylabel": "read $h_l$, from 1"}
  with colab.figure(4, 3, title=f"T = {temperature}", **labels) as axes:
    shown = axes.imshow(weights, vmin=0, vmax=1, cmap="viridis")
    axes.figure.colorbar(shown, label="weight")


colab.play(show_teacher, temperature=[0.1, 0.01, 1.0, 10.0, 100.0])

# %% [markdown]
# ## Train four students
#
# `standard` adds up, `rescaled` averages, `attention` learns a pseudo-query per
# layer, `static` learns weights that do not depend on the input, as the teacher
# has. The post compares raw outputs. Then the standard student starts with
# outputs that are five times too long: it adds up five arrays. With `normalised`,
# teacher and student end in an RMSNorm, and standard and rescaled are the same
# function.

# %%
SMALL = toy.Sizes(16, layers=4, hidden=32, train_rows=1024, steps=400)


def train_students(temperature, rate):
  seeds = np.arange(3)
  same = lambda value: np.full(3, value, np.float32)
  for readout in toy.READOUTS:
    labels = {"title": f"readout: {readout}", "ylabel": "test loss / variance"}
    with colab.figure(5, 2.6, **labels) as axes:
      for student in toy.STUDENTS:
        losses = toy.train(
          student, readout, same(temperature), same(rate), seeds, SMALL
        )["test_loss"]
        axes.bar(student, losses.mean(), 0.7, color=LOOKS[student])
        axes.plot([student] * 3, losses, "k.", markersize=5)


colab.play(
  train_students, temperature=[0.1, 0.01, 1.0, 10.0, 100.0],
  rate=[0.01, 0.001, 0.003, 0.03, 0.1],
)  # fmt: skip

# %% [markdown]
# Bars are means of three seeds, dots the seeds.
#
# ## All temperatures and rates
#
# The full experiment has networks of twice the width and depth, 2,000 steps, five
# rates and five seeds. A point is the mean over seeds at the best rate of each
# student; bands are the range.

# %%
path = colab.fetch("experiments/teacher_student/results.csv")
with path.open() as file:
  rows = list(csv.DictReader(file))

for readout in toy.READOUTS:
  labels = {"xlabel": "temperature of the teacher", "xscale": "log"}
  with colab.figure(6.5, 3, title=f"readout: {readout}", **labels) as axes:
    for student in toy.STUDENTS:
      points = sorted(
        [float(row[key]) for key in ("temperature", "rate", "test_loss")]
        for row in rows
        if (row["readout"], row["student"]) == (readout, student)
      )
      x_TRS, _, loss_TRS = np.moveaxis(np.reshape(points, (-1, 5, 5, 3)), -1, 0)
      best = loss_TRS.mean(2).argmin(1)
      loss_TS = loss_TRS[np.arange(len(best)), best]
      x, look = x_TRS[:, 0, 0], {"color": LOOKS[student]}
      axes.plot(x, loss_TS.mean(1), "o-", label=student, **look)
      axes.fill_between(x, loss_TS.min(1), loss_TS.max(1), alpha=0.08, **look)
    axes.set(ylabel="test loss / variance", ylim=0)

# %% [markdown]
# ## The answer
#
# The poor result of the standard student is its readout: with a norm behind it,
# its curve lies on the curve of the rescaled student. Attention beats the average
# where the teacher prefers some outputs, and ties or nearly ties where it does
# not. [The page of the experiment](https://github.com/attnres-jax/attnres-jax/tree/main/experiments/teacher_student)
# has the differences with intervals.

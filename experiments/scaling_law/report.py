# SPDX-License-Identifier: Apache-2.0
"""Results of the runs of configs/scaling.py: Fig. 4, laws and losses."""

from collections.abc import Mapping, Sequence
import contextlib
import pathlib
from typing import Any

from etils import epath
from matplotlib import figure as figure_lib
import numpy as np

from attnres_jax import config as config_lib
from attnres_jax import scaling
from attnres_jax.analysis import figures
from attnres_jax.scaling import compute as compute_lib
from attnres_jax.scaling import fit as fit_lib
from attnres_jax.scaling import plots
from attnres_jax.sweep import monitor
from attnres_jax.sweep import rows as rows_lib
from attnres_jax.sweep.pages import losses as losses_lib
from attnres_jax.sweep.pages import page
from attnres_jax.sweep.pages import svg
from attnres_jax.sweep.pages import sweep_page
from experiments.pages import readme
from experiments.scaling_law import plans

_ANSWER = pathlib.Path(__file__).with_name("answer.html")
_RATE = "optim.peak_lr"
# The counting of the figure: the paper's compute most likely includes
# attention.
COUNTING = "attention"
COUNTS = {
  "6nd": "6ND",
  "attention": "+ attention",
  "residual": "+ depth attention",
}
_DRAWS = 500

Row = Mapping[str, Any]


def render(folder: epath.Path, progress: Sequence[monitor.Progress]) -> str:
  """The page of a sweep over sizes and schemes, or over learning rates."""
  if any(run.run and _RATE in run.run.overrides for run in progress):
    return sweep_page.render(folder, progress, "Learning rates", _rates)
  return sweep_page.render(folder, progress, "Loss over compute", _answer)


def results(rows: Sequence[Row]) -> str:
  """For the README: losses, laws, and their origin."""
  return readme.text(
    losses_lib.table(rows, "size"),
    laws(rows),
    _left_out(rows),
    readme.origin(rows, runs=True),
  )


def learning_rates(rows: Sequence[Row]) -> str:
  """For the README: every rate; losses and laws at the best ones."""
  return readme.text(*_rate_tables(rows), readme.origin(rows, runs=True))


def figure(rows: Sequence[Row]) -> figure_lib.Figure:
  """Fig. 4, ours and the paper's; slopes can be compared, values cannot."""
  return plots.figure_4(
    *fits(rows, COUNTING), COUNTING, title="this sweep", figsize=(8.4, 3.9)
  )


def fits(
  rows: Sequence[Row], counting: str
) -> tuple[dict[str, fit_lib.Runs], dict[str, fit_lib.Fit]]:
  """Runs by scheme, and the laws of schemes with two or more sizes.

  Without runs that have diverged, which `_left_out` names.
  """
  runs = {
    scheme: fit_lib.without_failed(arm)[0]
    for scheme, arm in rows_lib.by_scheme(rows, counting).items()
  }
  enough = {
    scheme: arm
    for scheme, arm in runs.items()
    if len(set(arm.compute.tolist())) > 1
  }
  rng = np.random.default_rng(0)
  return runs, fit_lib.fit_schemes(enough, rng, num_samples=_DRAWS)


def _left_out(rows: Sequence[Row]) -> str:
  """A sentence that names the runs that are in no law."""
  diverged = [
    f"{figures.name_of(scheme)}, {', '.join(arm.size[i])}, seed {arm.seed[i]}"
    f" (loss {arm.loss[i]:.3g})"
    for scheme, arm in rows_lib.by_scheme(rows, COUNTING).items()
    for i in fit_lib.failed(arm)
  ]
  return f"Diverged, and in no law: {'; '.join(diverged)}." if diverged else ""


def laws(rows: Sequence[Row]) -> page.Table:
  """The fits for every way of counting, and the baseline's compute for a loss.

  As a multiple of the compute of the scheme's largest run, by the two laws, and
  as the effective speed-up over all sizes; empty for the baseline, without a
  baseline, and with too few sizes.
  """
  lines = []
  for counting in compute_lib.COUNTINGS:
    runs, fitted = fits(rows, counting)
    baseline = fitted.get(losses_lib.BASELINE)
    for scheme, fit in fitted.items():
      ratio = speedup = None
      if baseline is not None and scheme != losses_lib.BASELINE:
        largest = float(runs[scheme].compute.max())
        ratio = fit_lib.compute_advantage(baseline, fit, largest)
        with contextlib.suppress(config_lib.ConfigError):
          speedup = scaling.effective_speedup(
            runs[losses_lib.BASELINE], runs[scheme]
          )
      lines.append([
        figures.name_of(scheme), COUNTS[counting],
        page.interval(*fit.coefficient(), digits=3),
        page.interval(*fit.exponent(), digits=4),
        *(page.interval(*x) if x else "" for x in (ratio, speedup)),
      ])  # fmt: skip
  header = (
    "residual", "C counts", "A", "alpha", "PreNorm's C for its loss",
    "effective speed-up",
  )  # fmt: skip
  return page.Table(header, lines)


def _answer(rows: Sequence[Row]) -> page.Html:
  has_laws = bool(fits(rows, COUNTING)[1])
  return page.fill(
    _ANSWER.read_text(encoding="utf-8"),
    figure=svg.to_svg(figure(rows), "laws") if has_laws else "",
    laws=laws(rows).html() if has_laws else "",
    draws=_DRAWS,
    left_out=_left_out(rows),
    losses=losses_lib.table(rows, "size").html(),
  )


def _rates(rows: Sequence[Row]) -> page.Html:
  every, losses, laws_at_best = map(page.Table.html, _rate_tables(rows))
  return page.fill(
    '{{ every }}\n<p class="note">Validation loss in nats per token, means over'
    " seeds. The best rate of PreNorm is that of all schemes in the sweep.</p>"
    "\n{{ losses }}\n{{ laws }}\n"
    '<p class="note">Each scheme at its own best rate.</p>',
    every=every,
    losses=losses,
    laws=laws_at_best,
  )


def _rate_tables(rows: Sequence[Row]) -> tuple[page.Table, ...]:
  """Every rate; losses and laws, each scheme at its own best rate."""
  return (
    losses_lib.best_marked(rows, "peak_lr", "size"),
    losses_lib.table(rows, "size", at="peak_lr"),
    laws(losses_lib.rows_at_their_best(rows, "peak_lr")),
  )


PUBLISHED = readme.Published(
  __file__,
  [
    readme.Part(results),
    readme.Part(learning_rates, "learning_rates", "learning_rates"),
    readme.Part(results, "first_law", "first_law"),
    *(
      readme.Part(make, name, "../../configs/plans", f"../../docs/{page}.md")
      for make, name, page in (
        (plans.table, "plans", "plan"),
        (plans.bought, "budgets", "launch"),
      )
    ),
    readme.Part(figure, document="laws.svg"),
  ],
  render,
)

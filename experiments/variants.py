# SPDX-License-Identifier: Apache-2.0
"""Studies that train variants of one network in pairs with PreNorm.

A study is a mapping from names to variants. Its config.py is one `Study`, whose
`get_config` and `sweep` it exports:

    STUDY = variants.Study("mine", {...}, shares=ablations.STUDY)
    get_config, sweep = STUDY.get_config, STUDY.sweep

and its config takes

  scale     demo, laptop, deep or paper, see configs/paired.py
  variant   one of the study
  budget    multiplies the steps
  seeds     how many; of the small scales, more can be added at any time
  planned   mesh, microbatches and checkpointing are those that
            attnres_jax.plan.search has saved for the slice (docs/plan.md)
  runlocal  shrinks everything to seconds, to try things out

`experiments.pages.variants` has its command, tables and figures.
"""

from collections.abc import Callable, Mapping
import dataclasses
import types
from typing import Any

from attnres_jax import config as config_lib
from attnres_jax.scaling import paper
from configs import paired

BASELINE, CONTROL = "prenorm", "control"
DEMO, LAPTOP, DEEP, PAPER = "demo", "laptop", "deep", "paper"
# The budget of `Study.longer`.
TWICE = 2.0

Add = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Variant:
  """A network of a study.

  Attributes:
    label: in tables and figures.
    residual: its scheme.
    fields: what it changes besides the scheme, by dotted names.
    published: loss in arXiv:2603.15031 (436M activated parameters), in nats per
      token; None for a variant without one.
  """

  label: str
  residual: str
  fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  published: float | None = None

  def labelled(self, label: str) -> "Variant":
    """This variant under another label."""
    return dataclasses.replace(self, label=label)


def reads(label: str, residual: str, **options: Any) -> Variant:
  """A variant of depth attention, by options of `model.residual.read`."""
  fields = {f"model.residual.read.{name}": options[name] for name in options}
  return Variant(label, residual, fields)


PRENORM = Variant("PreNorm", BASELINE, published=paper.TABLE_4[BASELINE])


@dataclasses.dataclass(frozen=True)
class Study:
  """Variants, and which runs compare them.

  Attributes:
    name: of its folder.
    variants: by names, the baseline first and then the most informative first,
      for sweeps that are not complete.
    rates: by scale, learning rates of the baseline besides the default.
    rate_seeds: how many seeds are trained with these.
    budgets: multiples of the baseline's steps besides 1, for effective
      speed-ups.
    longer: variants that are also trained with twice the steps.
    shares: a study with some of the same networks, under the same names. Those
      are not trained again at the laptop's scale: its committed rows are used,
      if they are of the same text.
    deeper: variants that need the 32 sublayers of `deep` and `paper`.
    deep: variants that need more than the 8 sublayers of `demo`.
    scale: by default.
    seeds: how many, by default.
  """

  name: str
  variants: Mapping[str, Variant]
  rates: Mapping[str, tuple[float, ...]] = dataclasses.field(
    default_factory=dict
  )
  rate_seeds: int = 0
  budgets: tuple[float, ...] = ()
  longer: tuple[str, ...] = ()
  shares: "Study | None" = None
  deeper: tuple[str, ...] = ()
  deep: tuple[str, ...] = ()
  scale: str = LAPTOP
  seeds: int = 1

  @property
  def shared(self) -> list[str]:
    """Names of variants that the other study trains."""
    other = self.shares.variants if self.shares else {}
    return [
      name
      for name, variant in self.variants.items()
      if name in other and other[name].labelled(variant.label) == variant
    ]

  def get_config(self, arg: str | None = None) -> Any:
    """Config of one run; see the module docstring."""
    given = self._parse(arg)
    variant = config_lib.choose("variant", given.variant, self.variants)
    config = paired.get_config(
      f"scale={given.scale},residual={variant.residual},budget={given.budget},"
      f"planned={given.planned},runlocal={given.runlocal}"
    )
    config.name = f"{self.name}_{given.scale}_{given.variant}"
    config.update_from_flattened_dict(variant.fields)
    return config

  def sweep(self, add: Add, arg: str | None = None) -> None:
    """Every variant with every seed, seed by seed; then rates and budgets."""
    given = self._parse(arg)
    seeds = range(given.seeds)
    left_out = self.left_out(given.scale)

    def add_run(name: str, seed: int, **more: Any) -> None:
      add(variant=name, **more, seed=seed, **{"data.seed": seed})

    for seed in seeds:
      for name in self.variants:
        if name not in left_out:
          add_run(name, seed)
    for seed in seeds if given.scale != PAPER else ():
      if BASELINE not in left_out:
        rates = self.rates.get(given.scale, ())
        for rate in rates if seed < self.rate_seeds else ():
          add_run(BASELINE, seed, **{"optim.peak_lr": rate})
        for budget in self.budgets:
          add_run(BASELINE, seed, budget=budget)
      for name in self.longer:
        add_run(name, seed, budget=TWICE)

  def left_out(self, scale: str) -> set[str]:
    """Variants that are not trained at a scale."""
    # Rows of the other study are committed for the laptop's scale only. The
    # epsilon of the control is twice the small scales'.
    every = {
      DEMO: {*self.deep, *self.deeper}, LAPTOP: {*self.shared, *self.deeper},
      DEEP: set(), PAPER: {CONTROL},
    }  # fmt: skip
    return config_lib.choose("scale", scale, every)

  def _parse(self, arg: str | None) -> types.SimpleNamespace:
    return config_lib.parse_arg(
      arg, scale=self.scale, variant=BASELINE, budget=1.0,
      seeds=self.seeds, planned=False, runlocal=False,
    )  # fmt: skip

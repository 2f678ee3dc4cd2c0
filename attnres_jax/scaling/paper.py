# SPDX-License-Identifier: Apache-2.0
"""Published numbers of the scaling section, as data (arXiv:2603.15031).

Everything is printed in the paper, in the table, figure or section that is
named with it, unless it is marked as derived: computed from printed values and
checked against others.

Losses are validation losses. Schemes have their names in
`attnres_jax.models.residuals`; `mhc_lite` is the paper's column "mHC(-lite)".
"""

from collections.abc import Callable, Mapping
import dataclasses

from attnres_jax import config as config_lib
from attnres_jax import flops
from attnres_jax.scaling import architecture
from attnres_jax.scaling import compute as compute_lib
from attnres_jax.scaling import fit as fit_lib

SEQUENCE_LENGTH = 8192
SCHEMES = ("prenorm", "block_attnres", "full_attnres", "mhc_lite")


@dataclasses.dataclass(frozen=True)
class Size:
  """A row of Table 2.

  Attributes:
    name: activated parameters, as printed.
    active_params: as a number, without embedding and head (derived).
    tokens: seen in training.
    num_layers: transformer blocks.
    num_heads: of attention.
    width: d.
    expert_width: hidden width of one expert.
    peak_lr: tuned for the baseline.
    batch_size: sequences of 8192 tokens.
    losses: of `SCHEMES`, in that order.
  """

  name: str
  active_params: float
  tokens: float
  num_layers: int
  num_heads: int
  width: int
  expert_width: int
  peak_lr: float
  batch_size: int
  losses: tuple[float, float, float, float]

  @property
  def steps(self) -> int:
    """The number of optimiser steps closest to the token budget (derived)."""
    return round(self.tokens / (self.batch_size * SEQUENCE_LENGTH))

  @property
  def model(self) -> config_lib.ModelConfig:
    """The network, with the number of experts that fits (derived)."""
    shape = self.num_layers, self.width, self.num_heads, self.expert_width
    return architecture.network(*shape)

  def loss(self, scheme: str) -> float:
    return self.losses[SCHEMES.index(scheme)]

  def compute(self, counting: str, scheme: str = "prenorm") -> float:
    """PFLOP/s-days, with the published N and blocks of four sublayers."""
    residual = config_lib.residual_config(
      name=scheme if counting == "residual" else "prenorm", block_size=4
    )
    model = dataclasses.replace(self.model, residual=residual)
    counted = flops.flops_per_token(model, SEQUENCE_LENGTH)
    # N stands for all products outside attention.
    counted = dataclasses.replace(
      counted, projections=2 * self.active_params, mlp=0.0
    )
    return compute_lib.pflops_days(counted, self.tokens, counting)


TABLE_2 = (
  Size("194M", 194e6, 38.7e9, 12, 12, 896, 400, 2.99e-3, 192,
       (1.931, 1.909, 1.899, 1.906)),
  Size("241M", 241e6, 45.4e9, 13, 13, 960, 432, 2.80e-3, 256,
       (1.895, 1.875, 1.874, 1.869)),
  Size("296M", 296e6, 62.1e9, 14, 14, 1024, 464, 2.50e-3, 320,
       (1.829, 1.809, 1.804, 1.807)),
  Size("436M", 436e6, 87.9e9, 16, 16, 1168, 528, 2.20e-3, 384,
       (1.766, 1.746, 1.737, 1.747)),
  Size("528M", 528e6, 119.0e9, 17, 17, 1264, 560, 2.02e-3, 432,
       (1.719, 1.693, 1.692, 1.694)),
)  # fmt: skip


# Table 4, losses of the row of Table 2 with 16 transformer blocks, by names of
# our own. Block AttnRes has blocks of four sublayers.
TABLE_4 = {
  "prenorm": 1.766,
  "denseformer": 1.767,
  "mhc": 1.747,
  "full": 1.737,
  "input_query": 1.731,
  "static": 1.749,
  "sigmoid": 1.741,
  "no_key_norm": 1.743,
  "window": 1.764,
  "block": 1.746,
  "block_heads": 1.752,
  "block_no_key_norm": 1.750,
}
# Fig. 4 and section 5.1, with three decimals.
PUBLISHED_LAWS = {
  "prenorm": fit_lib.PowerLaw(1.891, 0.057),
  "block_attnres": fit_lib.PowerLaw(1.870, 0.058),
  "full_attnres": fit_lib.PowerLaw(1.865, 0.057),
}
# Where the paper compares them, and its result (section 5.1).
PUBLISHED_COMPUTE = 5.6
PUBLISHED_LOSSES = {"prenorm": 1.714, "block_attnres": 1.692}
PUBLISHED_ADVANTAGE = 1.25


def runs(scheme: str, counting: str) -> fit_lib.Runs:
  """Table 2's runs of a scheme, for fitting.

  Under "residual", the baseline has no work to count.
  """
  return fit_lib.Runs(
    compute=[size.compute(counting, scheme) for size in TABLE_2],
    loss=[size.loss(scheme) for size in TABLE_2],
    size=tuple(size.name for size in TABLE_2),
    seed=(0,) * len(TABLE_2),
  )


# Table 1: the multiple of d that a token reads and writes per sublayer, from
# (L, N, S, m).
TABLE_1: Mapping[str, Callable[[int, int, int, int], float]] = {
  "prenorm": lambda l, n, s, m: 3,
  "mhc": lambda l, n, s, m: 8 * m + 2,
  "full_attnres": lambda l, n, s, m: (n - 1) + (s - 1) + 2,
  # Phase 2 is printed as reading (N/S) d; the total needs the 3 d of section
  # 4.2.
  "block_attnres": lambda l, n, s, m: n / s + 3 + 2,
}


@dataclasses.dataclass(frozen=True)
class Cell:
  """One network of the architecture sweep.

  Attributes:
    width_per_layer: d / L_b of the grid (Fig. 7).
    heads_per_layer: H / L_b of the grid (Fig. 7).
    model: a concrete network near it: d and d_ff multiples of 16, activated
      parameters within two percent of 230M (derived).
  """

  width_per_layer: int
  heads_per_layer: float
  model: config_lib.ModelConfig

  @property
  def tokens(self) -> float:
    """The budget of the sweep over 6 N (derived; about 47B)."""
    return SWEEP_FLOPS / (6 * architecture.active_params(self.model))


WIDTHS_PER_LAYER = (15, 30, 45, 60, 75)
HEADS_PER_LAYER = (0.3, 0.4, 0.5, 0.6, 0.7)
SWEEP_FLOPS = 6.5e19
SWEEP_ACTIVE_PARAMS = 2.3e8
# Layers, width, heads, expert width; a row per d / L_b, a column per H / L_b.
_CELLS = (
  ((34, 512, 11, 224), (33, 480, 13, 224), (31, 464, 16, 208),
   (30, 448, 18, 208), (29, 432, 20, 192)),
  ((24, 720, 7, 320), (23, 704, 9, 320), (22, 688, 11, 304),
   (22, 656, 13, 288), (21, 640, 15, 288)),
  ((19, 848, 6, 384), (18, 848, 7, 384), (18, 816, 9, 368),
   (18, 784, 11, 352), (17, 800, 12, 352)),
  ((16, 960, 5, 432), (15, 976, 6, 432), (16, 896, 8, 400),
   (15, 912, 9, 416), (15, 896, 10, 400)),
  ((13, 1088, 4, 496), (14, 1008, 6, 448), (14, 992, 7, 448),
   (13, 1024, 8, 464), (13, 992, 9, 448)),
)  # fmt: skip
FIG_7 = tuple(
  Cell(rho, eta, architecture.network(*shape))
  for rho, row in zip(WIDTHS_PER_LAYER, _CELLS)
  for eta, shape in zip(HEADS_PER_LAYER, row)
)


@dataclasses.dataclass(frozen=True)
class Optimum:
  """The best cell of one heatmap of Fig. 7."""

  width_per_layer: int
  heads_per_layer: float
  loss: float


# The paper does not say which AttnRes variant the second heatmap shows.
_BASELINE, _ATTNRES = Optimum(60, 0.3, 1.847), Optimum(45, 0.3, 1.802)
FIG_7_OPTIMA = {
  "prenorm": _BASELINE,
  "block_attnres": _ATTNRES,
  "full_attnres": _ATTNRES,
}
# The smallest and largest gain of AttnRes over the 25 cells (Fig. 7).
FIG_7_GAINS = (0.019, 0.063)

# SPDX-License-Identifier: Apache-2.0
"""Every residual scheme under one schedule; see `experiments.variants`."""

from attnres_jax.analysis import figures
from attnres_jax.models import residuals
from experiments import variants
from experiments.ablations import config as ablations

# Names of the schemes that are rows of Table 4.
_SHARED = {"block_attnres": "block", "full_attnres": "full"}
# By scheme.
NAMES = {name: _SHARED.get(name, name) for name in residuals.RESIDUALS}


def _variant(name: str) -> variants.Variant:
  ablated = ablations.STUDY.variants.get(NAMES[name])
  variant = variants.Variant(figures.name_of(name), name)
  return ablated.labelled(variant.label) if ablated else variant


STUDY = variants.Study(
  "residual_zoo",
  {NAMES[name]: _variant(name) for name in residuals.RESIDUALS},
  # Those that end lowest, and two for comparison.
  longer=("postnorm", "highway", "mudd", "mrla", "full", "siamesenorm"),
  shares=ablations.STUDY,
)
get_config, sweep = STUDY.get_config, STUDY.sweep

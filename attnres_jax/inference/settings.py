# SPDX-License-Identifier: Apache-2.0
"""How the tokens of a text are drawn; needs no JAX, so that flags do not."""

import dataclasses
from typing import Annotated

from attnres_jax.config import fields

# Lower temperatures are 0: logits divided by them would not fit into float32.
_LEAST_TEMPERATURE = 1e-4
_Temperature = Annotated[
  float, fields.Accepted(lambda x: 0 <= x <= 100, "a number from 0 to 100")
]


@dataclasses.dataclass(frozen=True)
class Settings(fields.Checked, root="--"):
  """How the tokens of a request are drawn.

  Attributes:
    temperature: divides the logits; 0 for the most likely token, as is
      everything below 1e-4.
    top_k: only so many of the most likely tokens; 0 for all.
    top_p: only the most likely tokens, as many as needed for so much of the
      probability.
    seed: the same seed draws the same tokens, in the same stream.
  """

  temperature: _Temperature = 1.0
  top_k: fields.Count = 0
  top_p: fields.Fraction = 1.0
  seed: fields.Seed = 0

  def __post_init__(self):
    super().__post_init__()
    if self.temperature < _LEAST_TEMPERATURE:
      object.__setattr__(self, "temperature", 0.0)

# SPDX-License-Identifier: Apache-2.0
"""One name for each TPU slice, for all launchers and the preflight.

Names are those that `python -m attnres_jax.aot --topology=` accepts, such as
`v6e:4x4` or `v5p-128`; clouds and schedulers name the same slice differently.
"""

import dataclasses
import math
import re

from attnres_jax.aot import topology
from attnres_jax.sweep.launchers import settings

# By prefix of the name: the node label of Google Kubernetes Engine, and the
# accelerator type of Ray.
_WORDS = {
  "v4": ("tpu-v4-podslice", "TPU-V4"),
  "v5e": ("tpu-v5-lite-podslice", "TPU-V5LITEPOD"),
  "v5p": ("tpu-v5p-slice", "TPU-V5P"),
  "v6e": ("tpu-v6e-slice", "TPU-V6E"),
  "tpu7x": ("tpu7x", "TPU-V7X"),
}
# In slices with several hosts, each host has four chips, in all generations.
CHIPS_PER_HOST = 4


@dataclasses.dataclass(frozen=True)
class Slice:
  """One TPU slice.

  Attributes:
    kind: its generation, such as "v6e".
    shape: its chips, such as "4x4".
    gke_accelerator: value of the label `cloud.google.com/gke-tpu-accelerator`.
    ray_accelerator: accelerator type of Ray.
  """

  kind: str
  shape: str
  gke_accelerator: str
  ray_accelerator: str

  @property
  def chips(self) -> int:
    return math.prod(map(int, self.shape.split("x")))


def parse(setting: str, name: str) -> Slice:
  """The slice with this name.

  Args:
    setting: where the name comes from, for the error.
    name: such as "v6e:4x4" or "v6e-16".

  Raises:
    ConfigError: there is no such slice.
  """
  match = re.fullmatch(r"(\w+):(\d+(?:x\d+)+)", topology.topology_name(name))
  if match is None or match[1] not in _WORDS:
    accepted = "a TPU slice such as v6e:4x4 or v5p-128, of "
    settings.fail(setting, name, accepted + ", ".join(_WORDS))
  return Slice(match[1], match[2], *_WORDS[match[1]])

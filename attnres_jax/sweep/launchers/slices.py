# SPDX-License-Identifier: Apache-2.0
"""One name for each TPU slice, for all launchers.

`python -m attnres_jax.plan --topology=` accepts the same names, such as
`v6e:4x4` or `v5p-128`; clouds and schedulers name the same slice differently.
"""

import dataclasses
import math
import re

from attnres_jax.common import topology
from attnres_jax.sweep.launchers import settings

# By prefix of the name: the node label of Google Kubernetes Engine, the
# accelerator type of Ray, and of TPU VMs the accelerator type, how many of its
# units a chip has, and the software version. Empty: not there.
_WORDS = {
  "v2": ("", "", "v2", 2, "tpu-ubuntu2204-base"),
  "v3": ("", "", "v3", 2, "tpu-ubuntu2204-base"),
  "v4": ("tpu-v4-podslice", "TPU-V4", "v4", 2, "tpu-ubuntu2204-base"),
  "v5e": ("tpu-v5-lite-podslice", "TPU-V5LITEPOD", "v5litepod", 1,
          "v2-alpha-tpuv5-lite"),
  "v5p": ("tpu-v5p-slice", "TPU-V5P", "v5p", 2, "v2-alpha-tpuv5"),
  "v6e": ("tpu-v6e-slice", "TPU-V6E", "v6e", 1, "v2-alpha-tpuv6e"),
  "tpu7x": ("tpu7x", "TPU-V7X", "tpu7x", 2, "v2-alpha-tpu7-ubuntu2404"),
}  # fmt: skip
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
    cloud_name: first part of the accelerator type of TPU VMs.
    units_per_chip: what its second part counts.
    runtime: default software version of TPU VMs.
  """

  kind: str
  shape: str
  gke_accelerator: str
  ray_accelerator: str
  cloud_name: str
  units_per_chip: int
  runtime: str

  @property
  def cloud_type(self) -> str:
    """The accelerator type of TPU VMs, such as v5litepod-16."""
    return f"{self.cloud_name}-{self.chips * self.units_per_chip}"

  @property
  def hosts(self) -> int:
    """Number of hosts; TPU VMs of v5e and v6e have up to 8 chips on one."""
    single = 8 if self.kind in ("v5e", "v6e") else CHIPS_PER_HOST
    return 1 if self.chips <= single else self.chips // CHIPS_PER_HOST

  @property
  def chips(self) -> int:
    return math.prod(map(int, self.shape.split("x")))


def parse(setting: str, name: str, needs: str = "cloud_name") -> Slice:
  """The slice of a setting, such as "v6e:4x4" or "v6e-16".

  `needs` is the field of the slice that a launcher reads.

  Raises:
    ConfigError: there is no such slice.
  """
  match = re.fullmatch(r"(\w+):(\d+(?:x\d+)+)", topology.topology_name(name))
  slices = {
    kind: Slice(kind, match[2] if match else "1x1", *words)
    for kind, words in _WORDS.items()
  }
  slices = {kind: s for kind, s in slices.items() if getattr(s, needs)}
  if match is None or match[1] not in slices:
    accepted = "a TPU slice such as v6e:4x4 or v5p-128, of "
    settings.fail(setting, name, accepted + ", ".join(slices))
  return slices[match[1]]

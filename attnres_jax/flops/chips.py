# SPDX-License-Identifier: Apache-2.0
"""Peak FLOP rates of chips, for dense products."""

# Dense bfloat16 peak (float16 if a chip has no bfloat16) per JAX device, by
# prefix of `device_kind`; the longest match counts. TPU v2, v3 and 7x have two
# devices per chip.
PEAK_FLOPS_PER_SECOND = {
  "TPU v2": 22.5e12,
  "TPU v3": 61.5e12,
  "TPU v4": 275e12,
  "TPU v4 lite": 138e12,
  "TPU v5 lite": 197e12,
  "TPU v5e": 197e12,
  "TPU v5": 459e12,
  "TPU v5p": 459e12,
  "TPU v6 lite": 918e12,
  "TPU v6e": 918e12,
  "TPU7x": 1153.5e12,
  "TPU v7x": 1153.5e12,
  "NVIDIA B200": 2250e12,
  "NVIDIA GB200": 2500e12,
  "NVIDIA H200": 989e12,
  "NVIDIA H100": 989e12,
  "NVIDIA H100 PCIe": 756e12,
  "NVIDIA GH200": 989e12,
  "NVIDIA A100": 312e12,
  "NVIDIA A10G": 70e12,
  "NVIDIA L4": 121e12,
  "NVIDIA L40S": 362e12,
  "Tesla T4": 65e12,
  "Tesla V100": 125e12,
}


def peak_flops_per_second(device_kind: str) -> float | None:
  """Peak of one JAX device of this kind; None if it is not in the table."""
  rows = [kind for kind in PEAK_FLOPS_PER_SECOND if _matches(device_kind, kind)]
  return PEAK_FLOPS_PER_SECOND[max(rows, key=len)] if rows else None


def model_flop_utilisation(
  flops_per_second: float, device_kind: str, num_devices: int
) -> float | None:
  """Fraction of the peak of all devices; None on CPU and unknown chips."""
  peak = peak_flops_per_second(device_kind)
  return flops_per_second / (peak * num_devices) if peak else None


def _matches(device_kind: str, row: str) -> bool:
  """Whether `row` is a prefix of `device_kind` that ends at a word boundary.

  So "NVIDIA A100" matches "NVIDIA A100-SXM4-80GB", but "NVIDIA L4" does not
  match "NVIDIA L40S".
  """
  rest = device_kind[len(row) :]
  return device_kind.startswith(row) and not rest[:1].isalnum()

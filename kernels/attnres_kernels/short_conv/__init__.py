# SPDX-License-Identifier: Apache-2.0
"""Short causal convolution with SiLU: the features of Kimi delta attention."""

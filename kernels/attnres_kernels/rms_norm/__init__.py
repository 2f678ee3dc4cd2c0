# SPDX-License-Identifier: Apache-2.0
"""RMSNorm of rows, for values that no matrix product can normalise."""

# SPDX-License-Identifier: Apache-2.0
"""From a write to several residual streams to the next read of them."""

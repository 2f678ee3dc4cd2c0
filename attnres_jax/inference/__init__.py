# SPDX-License-Identifier: Apache-2.0
"""Text from trained networks."""

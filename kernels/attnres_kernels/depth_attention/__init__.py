# SPDX-License-Identifier: Apache-2.0
"""Phase 1: several queries over earlier depth sources, in one read."""

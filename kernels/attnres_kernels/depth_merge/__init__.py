# SPDX-License-Identifier: Apache-2.0
"""Phase 2: one more source, the partial block, merged into a mixture."""

# SPDX-License-Identifier: Apache-2.0
"""Phase 2: merges one more source, the partial block, into a mixture."""

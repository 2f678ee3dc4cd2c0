# SPDX-License-Identifier: Apache-2.0
"""One read over all sources and the next pre-norm, for a few tokens."""

# SPDX-License-Identifier: Apache-2.0
"""Small doubly stochastic matrices, one per token."""

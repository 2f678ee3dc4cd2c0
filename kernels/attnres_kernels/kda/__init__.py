# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention: a linear recurrence with a decay per channel."""

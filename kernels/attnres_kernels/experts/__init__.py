# SPDX-License-Identifier: Apache-2.0
"""Gated experts of rows that are sorted by expert, on TPU (`pallas_tpu`)."""

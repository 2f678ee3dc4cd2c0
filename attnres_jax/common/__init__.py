# SPDX-License-Identifier: Apache-2.0
"""Shared by all packages: files, buckets, devices, precision, flags."""

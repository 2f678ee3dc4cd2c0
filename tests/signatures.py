# SPDX-License-Identifier: Apache-2.0
"""Checks calls against signatures; conftest.py says of which packages."""

import beartype

# An int is a float, as for a type checker.
check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))

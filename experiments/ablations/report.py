# SPDX-License-Identifier: Apache-2.0
"""Results of the ablations."""

from experiments.ablations import config
from experiments.pages import variants

PUBLISHED = variants.published(__file__, config.STUDY)

# SPDX-License-Identifier: Apache-2.0
"""Reports as HTML, and the tables and figures that they share with READMEs.

Needs jinja2, matplotlib and pandas (`pip install "attnres-jax[plots]"`).
"""

# SPDX-License-Identifier: Apache-2.0
"""One run: the training loop, its state, checkpoints, metrics and folder.

`loop.train_and_evaluate` reads top to bottom what a run does.
"""

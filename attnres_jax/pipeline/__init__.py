# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism for Block AttnRes (paper, section 4.1).

A plan: `layout` knows which sublayers are where and what crosses between them,
`schedule` who works on what at each tick, `memory` what a rank holds meanwhile,
`drawing` shows all three. None of them needs a device.

A program that follows it: `transport` sends, `stage` computes a chunk forward
and backward, `placement` brings parameters to their ranks, and `spmd` is the
loop over ticks. `config.mesh.stage` and `config.pipeline` turn it on.
"""

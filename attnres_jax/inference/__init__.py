# SPDX-License-Identifier: Apache-2.0
"""Text generation with trained networks.

The room exceeds its budget of 2,000 lines. More than half is `serve` with
`serving`: what strangers may send, and how long it may take, has limits, each
with an error of its own. Slots and chunks on a mesh take most of the rest.
"""

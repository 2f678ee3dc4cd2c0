# SPDX-License-Identifier: Apache-2.0
"""Serves a network over HTTP, by the completions API of OpenAI.

A request goes one way through these modules: `connections` limits who may ask,
`post` reads a body, `api` checks it, `app` gives it to `service`, whose thread
has the engine, and `replies` writes what comes back. docs/inference.md
describes the server for users.
"""

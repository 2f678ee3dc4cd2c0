# SPDX-License-Identifier: Apache-2.0
"""Serves a network over HTTP, by the completions API of OpenAI.

A request goes one way through these modules: `app` reads it, `asked` checks
what it asks for, `service` gives it to the engine, which has a thread of its
own, and `replies` writes what comes back. docs/inference.md describes it for
users.
"""

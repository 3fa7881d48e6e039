"""Measures: `scripts/bench` (this project's own figures) and `sglmt bench URL` (any OpenAI-compatible server).

Nothing here runs in a server process, and no server process imports it.
"""

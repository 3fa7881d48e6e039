"""sglmt: launcher and process supervisor for a multi-tokenizer LLM serving front end.

The package is filed by who runs what: `supervisor` and `control` run in `sglmt launch`, `workers` in the
child processes it spawns, `messages`, `ipc` and `delivery` in all of them. `docs/architecture.md` follows one
request from socket to socket and one process from spawn to reap.
"""

__version__ = "0.1.0"

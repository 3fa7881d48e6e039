"""Soak: an instance under load whose processes are hit every second while it is scaled and restarted, and launches
whose supervisor is killed at any moment. Run by `scripts/soak` and `scripts/kill-launches`."""

"""Chaos: keep an instance busy, kill its processes, and check that no client notices. Run by `scripts/chaos`."""

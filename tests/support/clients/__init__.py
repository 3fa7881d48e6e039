"""Other people's clients against live servers: an opt-in check, see `scripts/clients`."""

"""What `sglmt launch` does around the supervisor: check, run in the foreground, run in the background."""

"""Pure delivery logic: request keys, attempts, offsets, and both sides of reconciliation. No I/O, no clock."""

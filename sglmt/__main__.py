"""`python -m sglmt`: the same command as the installed `sglmt`."""

from __future__ import annotations

from sglmt.cli import main

if __name__ == "__main__":
    main(prog_name="sglmt")

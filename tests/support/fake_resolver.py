"""A stand-in for the model resolver: answers at once, or as `argv[1]` says: `error`, `hang`, `die`."""

from __future__ import annotations

import json
import sys
import time

question = json.load(sys.stdin)
mode = sys.argv[1] if len(sys.argv) > 1 else "ok"
if mode == "hang":
    time.sleep(600)
if mode == "die":
    print("last words of the resolver", file=sys.stderr)
    sys.exit(3)
print(json.dumps({"error": "no such model"} if mode == "error" else {"model": {"asked": question}}))

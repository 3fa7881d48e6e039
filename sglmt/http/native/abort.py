"""`POST /abort_request`: which requests to end. Pure; runs in the tokenizer workers.

An id means exactly the request of that id, never those it is a prefix of; everything is ended only by saying so.
"""

from __future__ import annotations

import msgspec

from sglmt.http.checks import MAX_RID_BYTES
from sglmt.http.errors import bad_field
from sglmt.http.json_body import BodyDecoder


class AbortBody(msgspec.Struct, kw_only=True):
    """The fields that count; others are ignored."""

    rid: str | None = None
    abort_all: bool | None = None


_BODY = BodyDecoder(AbortBody)


def parse_abort(body: bytes) -> tuple[str | None, bool]:
    """(rid, False) or (None, True). Raises ApiError (400) when neither an id nor `abort_all` is given, or both."""
    fields = _BODY.decode(body)
    if fields.abort_all:
        if fields.rid:
            raise bad_field("abort_all", "cannot be combined with rid")
        return None, True
    if not fields.rid:
        raise bad_field("rid", "the id of a request is expected; to end all requests send abort_all: true")
    if len(fields.rid.encode("utf-8")) > MAX_RID_BYTES:
        raise bad_field("rid", f"an id has at most {MAX_RID_BYTES} bytes")
    return fields.rid, False

"""docs/http-api.md names every field the endpoints know and every kind of error."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglmt.http.auth import OPEN_PATHS
from sglmt.http.errors import ERROR_TYPES
from sglmt.http.native.encode import EncodeBody
from sglmt.http.native.generate import GenerateBody, NativeSampling
from sglmt.http.native.tokenize import DetokenizeBody
from sglmt.http.openai.chat import ChatBody
from sglmt.http.openai.completions import CompletionBody
from sglmt.http.openai.embeddings import EmbeddingBody

PAGE = (Path(__file__).parents[3] / "docs" / "http-api.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "body", [CompletionBody, ChatBody, EmbeddingBody, GenerateBody, NativeSampling, EncodeBody, DetokenizeBody]
)
def test_every_known_field_is_documented(body: type) -> None:
    names: tuple[str, ...] = body.__struct_fields__  # type: ignore[attr-defined]
    assert [name for name in names if f"`{name}" not in PAGE and f'"{name}"' not in PAGE] == []


def test_every_error_and_open_route_is_documented() -> None:
    assert [kind for status, kind in ERROR_TYPES.items() if f"| {status} | `{kind}`" not in PAGE] == []
    keys = PAGE.partition("## Keys")[2]
    assert [path for path in OPEN_PATHS if f"`{path}`" not in keys] == []

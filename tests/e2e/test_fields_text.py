"""Field cases of text: bad ids, half characters, stop strings in every position (20, 21, 23, 25, 26).

The simulator is told the ids to emit, so every answer begins with one known text, a token at a time; behind it
stands an id that no vocabulary has.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglmt.tokenizer.default_model import default_model_path
from sglmt.tokenizer.loading import Tokenizer, load_tokenizer
from sglmt.tokenizer.resolve import resolve_model
from tests.support.instance import Instance
from tests.support.serving import busy, events_of, failure_code, get, look, post, streams_to, until
from tests.support.wait import wait_until

PIECES = (
    "鑫龘", " 🔥", " 👩‍👩‍👧‍👦", " 🇫🇷", " cafe\u0301", " สวัสดี",
    " Fin", "ish", " MN", "O", "PQ", "R", " abc", " xxSTOPyy", " a", "\n", "b", " \u4e00",
)  # fmt: skip
NO_ID = 999_999_999
REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Script:
    """The instance, and what it emits before the bad id."""

    instance: Instance
    tokenizer: Tokenizer
    ids: list[int]

    def text(self, count: int) -> str:
        """Of the first `count` ids, decoded at once."""
        return self.tokenizer.decode(self.ids[:count])

    def upto(self, piece: str) -> int:
        """How many ids there are up to the end of the first piece of that name."""
        at = PIECES.index(piece) + 1
        return sum(len(self.tokenizer.encode(each)) for each in PIECES[:at])


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Script]:
    tokenizer = load_tokenizer(resolve_model(default_model_path(), None, None, tmp_path_factory.mktemp("model")))
    ids = [token_id for piece in PIECES for token_id in tokenizer.encode(piece)]
    with Instance(runtime_dir=Path(tmp_path_factory.mktemp("t"))) as made:
        made.launch(
            "--engine", "simulator", "--simulator-step-ms", "2", "--workers", "2", "--detokenizers", "2",
            "--simulator-tokens", ",".join(map(str, [*ids, NO_ID])),
        )  # fmt: skip
        yield Script(made, tokenizer, ids)


@pytest.fixture(autouse=True)
def nothing_unexplained(script: Script) -> Iterator[None]:
    """No process died, nothing is in flight, every message had an address."""
    yield
    wait_until(lambda: not busy(script.instance), 5, "nothing is left in flight")
    snapshot = look(script.instance)
    assert sum(row.restarts for row in snapshot.processes) == 0
    assert not {"unroutable", "undecodable"} & snapshot.totals.counters.keys()


def ask(script: Script, tokens: int, stream: bool, **sampling: Any) -> dict[str, Any]:
    """The answer, joined: text, ids and the last meta_info."""
    params = {"max_new_tokens": tokens, **sampling}
    body = {"text": "a", "sampling_params": params, "incremental_streaming_output": True}
    answer = post(script.instance, "/generate", **body, stream=stream)
    assert answer.status_code == 200, answer.text
    if not stream:
        whole: dict[str, Any] = answer.json()
        return {"text": whole["text"], "ids": whole["output_ids"], "meta": whole["meta_info"]}
    events = events_of(answer.text)
    ids = [token for event in events for token in event["output_ids"]]
    return {"text": "".join(event["text"] for event in events), "ids": ids, "meta": events[-1]["meta_info"]}


def test_the_script_is_what_it_is_taken_for(script: Script) -> None:
    whole = "".join(PIECES)
    assert script.text(len(script.ids)) == whole
    assert any(REPLACEMENT in script.text(count) for count in range(1, len(script.ids)))  # some ids are half characters


def test_a_bad_id_ends_its_own_stream_only(script: Script) -> None:
    count = len(script.ids)

    async def scenario() -> None:
        async with streams_to(script.instance) as streams:

            def start(tokens: int) -> Any:
                return streams.start("/generate", text="a", sampling_params={"max_new_tokens": tokens})

            bad, *good = [start(count + 20), *(start(count) for _ in range(7))]
            for stream in good:
                last = (await stream.finish()).events[-1]
                assert last["text"] == script.text(count)
                assert last["meta_info"]["finish_reason"] == {"type": "length", "length": count}
            await bad.finish()
            assert failure_code(bad) == "invalid_token_id"
            assert bad.events[-2]["output_ids"] == script.ids

    asyncio.run(scenario())
    refused = post(script.instance, "/generate", text="a", sampling_params={"max_new_tokens": count + 20})
    assert (refused.status_code, refused.json()["error"]["code"]) == (500, "invalid_token_id")


def test_a_negative_id_is_an_error_as_well(instance: Instance) -> None:
    instance.launch("--engine", "simulator", "--simulator-step-ms", "1", "--simulator-tokens", "500,501,-1")
    for path, body in (("/generate", {"text": "a"}), ("/v1/completions", {"prompt": "a"})):
        refused = post(instance, path, **body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (500, "invalid_token_id")
    good = post(instance, "/v1/completions", prompt="a", max_tokens=2)
    assert good.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("token_id", [4294967295, -1, 2**70, 1.5])
def test_detokenizing_ids_that_cannot_be(script: Script, token_id: float) -> None:
    refused = post(script.instance, "/detokenize", tokens=[token_id])
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert get(script.instance, "/health").status_code == 200


def test_no_half_character_before_the_end(script: Script) -> None:
    """Cut at every id: the stream shows U+FFFD at the very end at most, and joins to what comes whole."""
    counts = range(1, script.upto(" สวัสดี") + 1)

    async def answers(stream: bool) -> list[httpx.Response]:
        url = script.instance.url + "/v1/completions"
        async with httpx.AsyncClient(timeout=60) as client:
            bodies = [{"prompt": "a", "max_tokens": count, "stream": stream} for count in counts]
            return list(await asyncio.gather(*(client.post(url, json=body) for body in bodies)))

    half = 0
    for count, streamed, whole in zip(counts, asyncio.run(answers(True)), asyncio.run(answers(False)), strict=True):
        assert "\\ud8" not in streamed.text.lower()
        pieces = [choice["text"] for event in events_of(streamed.text) for choice in event["choices"]]
        assert REPLACEMENT not in "".join(pieces[:-1])
        text = json.loads(whole.content)["choices"][0]["text"]
        text.encode("utf-8")  # no half of a surrogate pair
        assert "".join(pieces) == text == script.text(count)
        half += REPLACEMENT in text
    assert half


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "matched", "last_piece"),
    [
        (["Finish"], "Finish", "ish"),
        (["MNOPQR"], "MNOPQR", "R"),
        (["ab", "bc"], "ab", " abc"),
        (["bc", "ab"], "ab", " abc"),
        (["STOP"], "STOP", " xxSTOPyy"),
        (["inis", "Finishx"], "inis", "ish"),
        (["👧"], "👧", " 👩‍👩‍👧‍👦"),
        (["a\nb"], "a\nb", "b"),
    ],
)
def test_nothing_of_a_stop_string_is_sent(
    script: Script, stop: list[str], matched: str, last_piece: str, stream: bool
) -> None:
    whole = "".join(PIECES)
    end = whole.index(matched) + len(matched)
    for no_trim in (False, True):
        got = ask(script, len(script.ids), stream, stop=stop, no_stop_trim=no_trim)
        assert got["text"] == whole[: end if no_trim else end - len(matched)]
        assert got["meta"]["finish_reason"] == {"type": "stop", "matched": matched}
        assert got["ids"] == script.ids[: len(got["ids"])]  # cut at the id that completed the match
        assert matched in script.text(len(got["ids"]))
        assert matched not in script.text(len(got["ids"]) - 1)
        assert got["meta"]["completion_tokens"] == len(got["ids"]) <= script.upto(last_piece)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("last_piece", ["\n", "b"])
def test_the_beginning_of_a_stop_string_that_goes_on_otherwise_is_text(
    script: Script, last_piece: str, stream: bool
) -> None:
    tokens = script.upto(last_piece)
    got = ask(script, tokens, stream, stop=["\n\nEND", "a\nbc", "\n\n"])
    assert got["text"] == script.text(tokens)
    assert got["text"].endswith("a\n" if last_piece == "\n" else "a\nb")
    assert got["meta"]["finish_reason"] == {"type": "length", "length": tokens}


def test_a_stop_string_and_an_end_token_in_one(script: Script) -> None:
    """The id that completes the stop string is also a stop id: the text is the same, cut before the stop string."""
    tokens = script.upto("R")
    for stream in (False, True):
        got = ask(script, len(script.ids), stream, stop=["MNOPQR"], stop_token_ids=[script.ids[tokens - 1]])
        assert got["text"] == script.text(tokens).removesuffix("MNOPQR")
        assert got["meta"]["finish_reason"] == {"type": "stop", "matched": "MNOPQR"}


def test_no_stream_loses_its_text_state_however_many_there_are(script: Script) -> None:
    count, streams_at_once = len(script.ids), 256

    async def scenario() -> None:
        async with streams_to(script.instance) as streams:
            body = {"prompt": "a", "max_tokens": count, "stop": ["\n\nEND"]}
            opened = [streams.start("/v1/completions", **body) for _ in range(streams_at_once)]
            for stream in opened:
                events = (await stream.finish()).events
                assert "".join(choice["text"] for event in events for choice in event["choices"]) == script.text(count)
            await until(lambda: not busy(script.instance), 5, "every state is gone")

    asyncio.run(scenario())

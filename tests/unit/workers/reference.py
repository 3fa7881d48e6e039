"""What a request must bring in the end, computed without any of the delivery code.

Ids and log-probabilities come from one undisturbed run of the simulator; the text from a decode of all bytes at
once and a plain search for the stop strings, not from the incremental code under test.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglmt.engines.base import EngineRequest
from sglmt.engines.simulator import SimulatorEngine
from sglmt.messages.columns import unpack
from sglmt.messages.sampling import TextSpec
from sglmt.messages.to_scheduler import TokenizedGenerateReqInput
from sglmt.tokenizer.byte_level import bytes_to_token
from sglmt.tokenizer.decoder_rules import DecoderRules
from sglmt.tokenizer.token_table import TokenTable

# Whole letters, pairs of them, and the bytes of "é" (2) and "鑫" (3), so that characters are split over tokens.
PIECES = (
    b"<s>", b"a", b"b", b"c", b"ab", b"bc", b"cab", b" ", b"\n", b"\xc3", b"\xa9", b"\xe9", b"\x91\xab", b"a\xe9\x91",
)  # fmt: skip
SPECIAL = frozenset({0})
VOCAB = len(PIECES)
CONTEXT = 512
SEED = 3


def token_table() -> TokenTable:
    """The table of the small vocabulary."""
    return TokenTable([bytes_to_token(piece) for piece in PIECES], DecoderRules("bytes"), SPECIAL)


def simulator(clock: Callable[[], float], step_s: float = 0.0, bad_ids: int = 0, seed: int = SEED) -> SimulatorEngine:
    """A simulator of the small vocabulary that may also emit `bad_ids` ids outside of it."""
    return SimulatorEngine(
        vocab_size=VOCAB + bad_ids,
        context_length=CONTEXT,
        eos_token_ids=[],
        special_token_ids=SPECIAL,
        step_s=step_s,
        seed=seed,
        script=None,
        clock=clock,
    )


@dataclass
class Expected:
    """The whole answer to one request. `matched` is the stop string or id; `bad`: it must end with an error."""

    ids: list[int]
    text: str
    kind: str
    matched: str | int | None
    chosen: list[float | None]


def decoded(ids: Sequence[int], final: bool) -> str:
    """The text of `ids`; without `final` an unfinished character at the end is left out."""
    data = b"".join(PIECES[i] for i in ids if i not in SPECIAL)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data, final)


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """(end, stop) of the stop string that ends first, the longest of those that end there."""
    found = [(at + len(stop), -len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return None
    end, _, stop = min(found)
    return end, stop


def text_of(ids: Sequence[int], spec: TextSpec, kind: str, matched: str | int | None) -> Expected:
    """Cut `ids` where they stop being output, and say what the text is."""
    for count in range(1, len(ids) + 1):
        if not 0 <= ids[count - 1] < VOCAB:
            return text_of(ids[: count - 1], spec, "error", None)
        stop = first_stop(decoded(ids[:count], False), spec.stop)
        if stop is not None:
            return _stopped(ids[:count], spec, decoded(ids[:count], False), stop)
    text = decoded(ids, True)
    stop = first_stop(text, spec.stop)
    if stop is not None:
        return _stopped(ids, spec, text, stop)
    return Expected(list(ids), text, kind, matched, [])


def _stopped(ids: Sequence[int], spec: TextSpec, text: str, stop: tuple[int, str]) -> Expected:
    end, matched = stop
    return Expected(list(ids), text[: end if spec.no_stop_trim else end - len(matched)], "stop", matched, [])


def expected(request: TokenizedGenerateReqInput, engine: SimulatorEngine) -> Expected:
    """Run `request` alone on `engine`."""
    engine.submit(
        EngineRequest(
            key=request.key,
            prompt_ids=list(unpack("I", request.input_ids)),
            prefix_ids=[],
            sampling=request.sampling,
            logprobs=request.logprobs,
        )
    )
    ids: list[int] = []
    chosen: list[float | None] = []
    while engine.has_work():
        for output in engine.step().all_outputs():
            ids.extend(output.token_ids)
            if output.logprobs is not None:
                chosen.extend(output.logprobs.chosen)
            kind, matched = output.finish_kind, output.matched_id
    assert kind is not None
    answer = text_of(ids, request.text, kind, matched)
    answer.chosen = chosen[: len(answer.ids)]
    return answer


def check_continuation(
    request: TokenizedGenerateReqInput, ids: Sequence[int], chosen: Sequence[float | None], seeds: Sequence[int]
) -> None:
    """Each id (and its log-probability) must be what a simulator with one of `seeds` gives after the ids before it."""
    engines = [simulator(lambda: 0.0, seed=seed) for seed in seeds]
    for position, token_id in enumerate(ids):
        given = [_next_of(engine, request, list(ids[:position])) for engine in engines]
        assert token_id in {one for one, _ in given}, (position, token_id, given)
        if request.logprobs is not None:
            assert (token_id, chosen[position]) in given


def _next_of(
    engine: SimulatorEngine, request: TokenizedGenerateReqInput, prefix: list[int]
) -> tuple[int, float | None]:
    """The id, and its log-probability, that `engine` continues with."""
    engine.submit(
        EngineRequest(
            key=1,
            prompt_ids=list(unpack("I", request.input_ids)),
            prefix_ids=prefix,
            sampling=request.sampling,
            logprobs=request.logprobs,
        )
    )
    (output,) = engine.step().all_outputs()
    engine.abort(1)
    return output.token_ids[0], None if output.logprobs is None else output.logprobs.chosen[0]

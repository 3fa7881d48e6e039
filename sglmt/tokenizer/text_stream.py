"""One request's text as the detokenizer sees it: ids in, text that may be sent out, and where a stop string ends.

Runs in the detokenizer, one object per request (and choice); owns the unfinished character and the text held back
for a possible stop string. The text emitted after k ids depends on those k ids alone, never on how they were
grouped, and only grows: replaying a request's ids through a fresh object gives the same text again.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglmt.tokenizer.detokenize import IncrementalDetokenizer, TokenIdError
from sglmt.tokenizer.stop_strings import StopAutomaton, StopMatcher
from sglmt.tokenizer.token_table import TokenTable


class RequestText:
    """The text of one request.

    `matched` is the stop string that ended the text, None so far. `used` is the number of ids of the last push that
    belong to the output: those up to the one that completed the match, all of them without a match, none after it.
    With `no_stop_trim` the text ends right after the stop string, else right before it.
    """

    __slots__ = ("_detokenizer", "_matcher", "_size", "matched", "used")

    def __init__(
        self,
        table: TokenTable,
        stops: Sequence[str] | StopAutomaton = (),
        no_stop_trim: bool = False,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        shown_ids: Sequence[int] = (),
    ) -> None:
        automaton = stops if isinstance(stops, StopAutomaton) else StopAutomaton(stops) if stops else None
        self._detokenizer = IncrementalDetokenizer(table, skip_special_tokens, spaces_between_special_tokens, shown_ids)
        self._matcher = StopMatcher(automaton, no_stop_trim) if automaton and automaton.stops else None
        self._size = table.size
        self.matched: str | None = None
        self.used = 0

    def push(self, ids: Sequence[int]) -> str:
        """The text that may be emitted after these ids. Raises TokenIdError, leaving the state as it was."""
        if self._matcher is None:
            text = self._detokenizer.push(ids)
            self.used = len(ids)
            return text
        return self._push_matching(ids, self._matcher)

    def push_one(self, token_id: int) -> str:
        """`push` of a single id."""
        if self._matcher is None:
            text = self._detokenizer.push_one(token_id)
            self.used = 1
            return text
        if self.matched is not None:
            self.used = 0
            return ""
        text = self._detokenizer.push_one(token_id)
        self.used = 1
        if text:
            text = self._matcher.feed(text)
            self.matched = self._matcher.matched
        return text

    def looks_up(self, texts: list[str | None]) -> bool:
        """Whether the next id adds what `texts` holds for it, unless that is None: `push_one` would do no more."""
        return self._matcher is None and self._detokenizer.looks_up(texts)

    def finish(self) -> str:
        """The text held back at the end of the output; may itself complete a stop string (see `matched`)."""
        if self.matched is not None:
            return ""
        text = self._detokenizer.finish()
        if self._matcher is None:
            return text
        text = self._matcher.feed(text)
        self.matched = self._matcher.matched
        return text + self._matcher.flush()

    def _push_matching(self, ids: Sequence[int], matcher: StopMatcher) -> str:
        if self.matched is not None:
            self.used = 0
            return ""
        size = self._size
        for token_id in ids:
            if not 0 <= token_id < size:
                raise TokenIdError(token_id, size)
        push_one, feed = self._detokenizer.push_one, matcher.feed
        texts: list[str] = []
        for count, token_id in enumerate(ids, 1):
            text = push_one(token_id)
            if text:
                texts.append(feed(text))
                if matcher.matched is not None:
                    self.matched, self.used = matcher.matched, count
                    return "".join(texts)
        self.used = len(ids)
        return "".join(texts)

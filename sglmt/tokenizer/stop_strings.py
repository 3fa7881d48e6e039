"""Stop strings in streamed text: what may be emitted, and where the first stop string ends.

Runs in the detokenizer, one small matcher per request that has stop strings. The automaton (Aho and Corasick, 1975)
is immutable and can be shared. Text is held back only while it could still be the beginning of a stop string, to
the character; every character is looked at a constant number of times on average, so time is linear in the text
whatever the stop strings are.

The match reported is the one that ends first; of those that end at the same character, the longest.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence


class StopAutomaton:
    """All stop strings of a request compiled together. State 0 is "nothing begun"; empty strings are ignored."""

    __slots__ = ("begin", "depth", "fail", "goto", "match", "owner", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stop for stop in stops if stop)
        self.goto: list[dict[str, int]] = [{}]
        self.depth = [0]  # characters of a stop string seen in this state: what must be held back
        self.owner = [-1]  # a stop string that begins with these characters
        self.match = [-1]  # the longest stop string that ends here
        for index, stop in enumerate(self.stops):
            self._add(index, stop)
        self.fail = [0] * len(self.goto)
        self._link()
        firsts = "".join(re.escape(char) for char in self.goto[0])
        self.begin = re.compile(f"[{firsts}]" if firsts else "(?!)")

    def _add(self, index: int, stop: str) -> None:
        state = 0
        for char in stop:
            following = self.goto[state].get(char)
            if following is None:
                following = len(self.goto)
                self.goto[state][char] = following
                self.goto.append({})
                self.depth.append(self.depth[state] + 1)
                self.owner.append(index)
                self.match.append(-1)
            state = following
        if self.match[state] < 0:
            self.match[state] = index

    def _link(self) -> None:
        """Breadth first: where to go on when the next character does not continue this state."""
        queue = deque(self.goto[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self.goto[state].items():
                self.fail[following] = self.step(self.fail[state], char)
                queue.append(following)
            if self.match[state] < 0:
                self.match[state] = self.match[self.fail[state]]

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        goto, fail = self.goto, self.fail
        while state and char not in goto[state]:
            state = fail[state]
        return goto[state].get(char, 0)


class StopMatcher:
    """The search of one request. `matched` is the stop string found, or None; after a match nothing is emitted.

    With `keep` (the request's "no trim") the stop string is emitted too and nothing is ever held back.
    """

    __slots__ = ("_automaton", "_begins", "_keep", "_state", "matched")

    def __init__(self, stops: Sequence[str] | StopAutomaton, keep: bool = False) -> None:
        self._automaton = stops if isinstance(stops, StopAutomaton) else StopAutomaton(stops)
        self._begins = self._automaton.begin.search
        self._keep = keep
        self._state = 0
        self.matched: str | None = None

    @property
    def held(self) -> str:
        """The text held back now: the beginning of a stop string."""
        if self._keep or self.matched is not None:
            return ""
        return self._held(self._automaton.depth[self._state])

    def feed(self, text: str) -> str:
        """The text that may be emitted now that `text` has arrived; sets `matched`."""
        if not self._state and self._begins(text) is None:
            return text  # nothing begun (after a match the state is never 0)
        if self.matched is not None:
            return ""
        before = self._automaton.depth[self._state]
        start, end, stop = self._advance(text)
        if stop is not None:
            kept = end if self._keep else end - len(stop)
            emitted = text[:kept] if self._keep else self._joined(start, before, text, kept)
            self.matched = stop
            return emitted
        if self._keep:
            return text
        return self._joined(start, before, text, len(text) - self._automaton.depth[self._state])

    def flush(self) -> str:
        """The text held back, at the end of the output: it was real text after all."""
        held = self.held
        if self.matched is None:
            self._state = 0
        return held

    def _advance(self, text: str) -> tuple[int, int, str | None]:
        """Run the automaton: (state before, characters used, stop string that ends there)."""
        automaton = self._automaton
        goto, fail, match, begin = automaton.goto, automaton.fail, automaton.match, automaton.begin
        start = state = self._state
        position, length = 0, len(text)
        while position < length:
            if not state:
                candidate = begin.search(text, position)
                if candidate is None:
                    break
                position = candidate.start()
            char = text[position]
            position += 1
            while state and char not in goto[state]:
                state = fail[state]
            state = goto[state].get(char, 0)
            if match[state] >= 0:
                self._state = state
                return start, position, automaton.stops[match[state]]
        self._state = state
        return start, length, None

    def _joined(self, state: int, held: int, text: str, kept: int) -> str:
        """What was held in `state`, then `text` up to `kept` characters (negative: fewer of the held)."""
        if not held:
            return text[:kept] if kept >= 0 else ""
        prefix = self._automaton.stops[self._automaton.owner[state]]
        if kept <= 0:
            return prefix[: held + kept] if held + kept > 0 else ""
        return prefix[:held] + text[:kept]

    def _held(self, depth: int) -> str:
        return self._automaton.stops[self._automaton.owner[self._state]][:depth] if depth else ""

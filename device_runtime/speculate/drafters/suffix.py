"""Suffix lookup: proposes what followed the longest earlier match, in this or earlier requests.

A suffix automaton (Blumer et al. 1985; as a draft: arXiv 2411.10666) holds every substring of the
text. Appending a token takes amortized constant time. The automaton maintains the longest suffix
of the text that occurred before, so no search is needed.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from edgellm.device_runtime.speculate.text_lookup import Continuation, Lookup

MEMORY_TOKENS = 1 << 15  # about 15 MB; when full, the oldest half is evicted
_SEPARATOR = -1  # between requests; continuations end here
_SHORTEST_MATCH = 2
_OTHERS = 0.25  # confidence of earlier occurrences, relative to the latest
_SURE = 200  # tokens of a match; longer matches have the same confidence
_MAX_UNREAD = 1 << 12  # maximum tokens of finished requests before the next lookup


class SuffixAutomaton:
    """States are sets of substrings with equal end positions; T tokens make at most 2 T states."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.next: list[dict[int, int]] = [{}]  # state after one more token
        self.length = [0]  # of the longest substring of a state
        self.end = [0]  # an end position of the state's substrings
        self.link = [-1]  # suffix link: the longest suffix with more end positions
        self._whole = 0  # state of the whole text
        self.match = 0  # state of the longest suffix that occurred before

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens."""
        tokens, following, link, end = self.tokens, self.next, self.link, self.end
        for token_id in token_ids:
            end[self.match] = len(tokens)  # until now the end of an earlier occurrence
            tokens.append(token_id)
            state, new = self._whole, self._add({}, len(tokens), len(tokens))
            while state >= 0 and token_id not in following[state]:
                following[state][token_id] = new
                state = link[state]
            if state >= 0:
                link[new] = self._ending(state, token_id)
            self._whole, self.match = new, link[new]

    def _ending(self, state: int, token_id: int) -> int:
        """The state of `state`'s longest substring plus `token_id`, split off if necessary."""
        found = self.next[state][token_id]
        length = self.length[state] + 1
        if self.length[found] == length:
            return found
        shorter = self._add(dict(self.next[found]), length, self.end[found])
        self.link[shorter], self.link[found] = self.link[found], shorter
        while state >= 0 and self.next[state].get(token_id) == found:
            self.next[state][token_id] = shorter
            state = self.link[state]
        return shorter

    def _add(self, following: dict[int, int], length: int, end: int) -> int:
        self.next.append(following)
        self.length.append(length)
        self.end.append(end)
        self.link.append(0)
        return len(self.next) - 1


def remember() -> Callable[[], Lookup]:
    """The factory of lookups for requests, which share the texts of finished requests."""
    return SuffixMemory().begin


class _Text:
    """An automaton of the newest tokens, with a maximum size."""

    def __init__(self, maximum: int) -> None:
        self.automaton, self._maximum = SuffixAutomaton(), maximum

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens; when full, the oldest half is evicted."""
        at = 0
        while at < len(token_ids):
            room = self._maximum - len(self.automaton.tokens)
            if not room:
                newest = self.automaton.tokens[-(self._maximum // 2) :]
                self.automaton = SuffixAutomaton()
                self.automaton.extend(newest)
                continue
            self.automaton.extend(token_ids[at : at + room])
            at += room


class SuffixMemory:
    """The texts of finished requests."""

    def __init__(
        self, *, memory_tokens: int = MEMORY_TOKENS, longest: int = 16, branches: int = 3
    ) -> None:
        """Start empty.

        Args:
            memory_tokens: maximum tokens of all requests.
            longest: maximum tokens of a continuation.
            branches: maximum continuations, with different first tokens.
        """
        self.memory_tokens, self.longest, self.branches = memory_tokens, longest, branches
        self.text, self.version = _Text(memory_tokens), 0
        self.confidences = [matched / (matched + 4) for matched in range(_SURE + longest)]
        self._ended: deque[list[int]] = deque()
        self._lock = threading.Lock()

    def begin(self) -> SuffixLookup:
        """The lookup of a new request."""
        return SuffixLookup(self)

    def read(self) -> None:
        """Append the texts of finished requests."""
        while self._ended:
            if self.text.automaton.tokens:
                self.text.extend([_SEPARATOR])
            self.text.extend(self._ended.popleft())
            self.version += 1

    def end(self, token_ids: list[int]) -> None:
        """Queue a finished request's text for the next lookup; thread-safe."""
        if not token_ids:
            return
        with self._lock:
            self._ended.append(token_ids)
            unread = sum(map(len, self._ended))
            while len(self._ended) > 1 and unread > _MAX_UNREAD:
                unread -= len(self._ended.popleft())


class SuffixLookup:
    """Proposes what followed the longest earlier match, in this or in earlier texts."""

    def __init__(self, memory: SuffixMemory) -> None:
        self._memory, self._own = memory, _Text(memory.memory_tokens)
        self.maximum = memory.longest * memory.branches
        self._recall([])

    def _recall(self, token_ids: Sequence[int]) -> None:
        """Match the text's suffix again after the memory has changed."""
        self._version, self._state, self._matched = self._memory.version, 0, 0
        for token_id in (_SEPARATOR, *token_ids):
            self._advance(token_id)

    def _advance(self, token_id: int) -> None:
        """Update the longest suffix that is in the memory by one token."""
        known = self._memory.text.automaton
        while self._state and token_id not in known.next[self._state]:
            self._state = known.link[self._state]
            self._matched = known.length[self._state]
        if token_id in known.next[self._state]:
            self._state = known.next[self._state][token_id]
            self._matched += 1

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens."""
        self._catch_up()
        self._own.extend(token_ids)
        for token_id in token_ids:
            self._advance(token_id)

    def _catch_up(self) -> None:
        self._memory.read()
        if self._version != self._memory.version:
            self._recall(self._own.automaton.tokens)

    def end(self, token_ids: Sequence[int]) -> None:
        """Store the text for later requests."""
        self._memory.end([*self._own.automaton.tokens, *token_ids])

    def continuations(self) -> list[Continuation]:
        """What followed the longest suffix that occurred before, the latest occurrence first."""
        self._catch_up()
        own, known, memory = self._own.automaton, self._memory.text.automaton, self._memory
        own_matched = own.length[own.match]
        matched = max(own_matched, self._matched)
        if matched < _SHORTEST_MATCH:
            return []
        following = _places(known, self._state, is_own=False) if self._matched == matched else {}
        if own_matched == matched:
            following |= _places(own, own.match, is_own=True)
        begin, found = min(matched, _SURE), list[Continuation]()
        for is_own, end, token_id in heapq.nlargest(memory.branches, following.values()):
            if token_id == _SEPARATOR:
                continue
            followed = self._follow(end, token_id, is_own=is_own)
            confidences = memory.confidences[begin : begin + len(followed)]
            if found:
                confidences[0] *= _OTHERS
            found.append(Continuation(followed, confidences))
        return found

    def _follow(self, end: int, token_id: int, *, is_own: bool) -> list[int]:
        """`token_id`, which ends at `end`, and the tokens after it; a loop repeats."""
        tokens = (self._own if is_own else self._memory.text).automaton.tokens
        longest = self._memory.longest
        followed = [token_id, *tokens[end : end + longest - 1]]
        if not is_own:
            end_of_text = followed.index(_SEPARATOR) if _SEPARATOR in followed else longest
            return followed[:end_of_text]
        while len(followed) < longest:
            followed.append(followed[end + len(followed) - 1 - len(tokens)])
        return followed


def _places(
    automaton: SuffixAutomaton, state: int, *, is_own: bool
) -> dict[int, tuple[bool, int, int]]:
    """The tokens that follow a state's substrings, with the latest end position of each."""
    end = automaton.end
    following = automaton.next[state].items()
    return {token: (is_own, end[after], token) for token, after in following}

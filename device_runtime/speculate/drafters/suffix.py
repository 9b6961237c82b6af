"""What followed the longest earlier match, in this request or those before.

A suffix automaton (Blumer et al. 1985; as a draft: arXiv 2411.10666) holds every run of tokens of
the text. It grows by a token in amortized constant time, and knows the longest ending of the text
that occurred before without searching.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from edgellm.device_runtime.speculate.lookup import Continuation, Lookup

MEMORY_TOKENS = 1 << 15  # some 15 MB; the oldest half is forgotten when it is full
_SEPARATOR = -1  # between requests: nothing is continued beyond it
_SHORTEST_MATCH = 2
_OTHERS = 0.25  # confidence of what followed elsewhere, over that of the latest place


class SuffixAutomaton:
    """States are sets of runs that end at the same places; T tokens make at most 2 T states."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.next: list[dict[int, int]] = [{}]  # state after one more token
        self.length = [0]  # of the longest run of a state
        self.end = [0]  # tokens up to the end of a place where a state's runs occur
        self.link = [-1]  # state of the longest ending that occurs at more places
        self._whole = 0  # state of the whole text
        self.match = 0  # state of the longest ending that occurred before

    def push(self, token_id: int) -> None:
        """Append a token."""
        self.end[self.match] = len(self.tokens)  # used until now: an earlier place
        self.tokens.append(token_id)
        state, new = self._whole, self._add({}, len(self.tokens), len(self.tokens))
        while state >= 0 and token_id not in self.next[state]:
            self.next[state][token_id] = new
            state = self.link[state]
        if state >= 0:
            self.link[new] = self._ending(state, token_id)
        else:
            self.link[new] = 0
        self._whole, self.match = new, self.link[new]

    def _ending(self, state: int, token_id: int) -> int:
        """The state of `state`'s longest run and `token_id`, split from longer runs if need be."""
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
    """What starts the lookup of a request, with the texts of those before."""
    return SuffixMemory().begin


class _Text:
    """An automaton of the newest tokens, at most so many."""

    def __init__(self, most: int) -> None:
        self.automaton, self._most = SuffixAutomaton(), most

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens; the oldest half is forgotten when it is full."""
        for token_id in token_ids:
            if len(self.automaton.tokens) >= self._most:
                newest = self.automaton.tokens[-(self._most // 2) :]
                self.automaton = SuffixAutomaton()
                for known in newest:
                    self.automaton.push(known)
            self.automaton.push(token_id)


class SuffixMemory:
    """The texts of requests that are over."""

    def __init__(
        self, *, memory_tokens: int = MEMORY_TOKENS, longest: int = 16, branches: int = 3
    ) -> None:
        """Begin with nothing.

        Args:
            memory_tokens: of all requests; never more are held.
            longest: tokens of a continuation.
            branches: continuations, by their first tokens.
        """
        self.memory_tokens, self.longest, self.branches = memory_tokens, longest, branches
        self.text, self.version = _Text(memory_tokens), 0
        self._ended: deque[list[int]] = deque()

    def begin(self) -> SuffixLookup:
        """The lookup of a request that begins, behind all that have ended."""
        while self._ended:
            if self.text.automaton.tokens:
                self.text.extend([_SEPARATOR])
            self.text.extend(self._ended.popleft())
            self.version += 1
        return SuffixLookup(self)

    def end(self, token_ids: list[int]) -> None:
        """A request is over; its text is read when the next begins, hence from any thread."""
        if token_ids:
            self._ended.append(token_ids)


class SuffixLookup:
    """Foresees what followed the longest earlier match, in its own text or in earlier ones."""

    def __init__(self, memory: SuffixMemory) -> None:
        self._memory, self._own = memory, _Text(memory.memory_tokens)
        self.most = memory.longest * memory.branches
        self._recall([])

    def _recall(self, token_ids: Sequence[int]) -> None:
        """Find the ending of the text in the memory anew: other requests have ended since."""
        self._version, self._state, self._matched = self._memory.version, 0, 0
        for token_id in (_SEPARATOR, *token_ids):
            self._advance(token_id)

    def _advance(self, token_id: int) -> None:
        """The longest ending that the memory has, after one more token."""
        known = self._memory.text.automaton
        while self._state and token_id not in known.next[self._state]:
            self._state = known.link[self._state]
            self._matched = known.length[self._state]
        if token_id in known.next[self._state]:
            self._state = known.next[self._state][token_id]
            self._matched += 1

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens."""
        if self._version != self._memory.version:
            self._recall(self._own.automaton.tokens)
        self._own.extend(token_ids)
        for token_id in token_ids:
            self._advance(token_id)

    def end(self) -> None:
        """Later requests may find the text."""
        self._memory.end(self._own.automaton.tokens)

    def continuations(self) -> list[Continuation]:
        """What followed the longest ending that occurred before, the latest place first."""
        if self._version != self._memory.version:
            self._recall(self._own.automaton.tokens)
        own, known = self._own.automaton, self._memory.text.automaton
        matched = max(own.length[own.match], self._matched)
        if matched < _SHORTEST_MATCH:
            return []
        following = _places(known, self._state) if self._matched == matched else {}
        if own.length[own.match] == matched:
            following |= {token: (True, end) for token, (_, end) in _places(own, own.match).items()}
        places = [(is_own, end, token) for token, (is_own, end) in following.items()]
        found = []
        for is_own, end, token_id in heapq.nlargest(self._memory.branches, places):
            if token_id == _SEPARATOR:
                continue
            followed = self._follow(end, token_id, is_own=is_own)
            confidences = [_confidence(matched + at) for at in range(len(followed))]
            if found:
                confidences[0] *= _OTHERS
            found.append(Continuation(followed, confidences))
        return found

    def _follow(self, end: int, token_id: int, *, is_own: bool) -> list[int]:
        """`token_id`, whose place ends at `end`, and what came after; a loop goes on looping."""
        tokens = (self._own if is_own else self._memory.text).automaton.tokens
        followed = [token_id]
        while len(followed) < self._memory.longest:
            at = end + len(followed) - 1
            if at >= len(tokens) and not is_own:
                break
            following = tokens[at] if at < len(tokens) else followed[at - len(tokens)]
            if following == _SEPARATOR:
                break
            followed.append(following)
        return followed


def _places(automaton: SuffixAutomaton, state: int) -> dict[int, tuple[bool, int]]:
    """The tokens that follow a state's runs, and where the latest place of each ends."""
    following = automaton.next[state].items()
    return {token: (False, automaton.end[after]) for token, after in following}


def _confidence(matched: int) -> float:
    """Before anything was learned: the longer a match, the likelier it goes on."""
    return matched / (matched + 4)

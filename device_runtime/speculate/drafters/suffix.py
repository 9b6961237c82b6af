"""What followed the longest earlier match, in this request or those before.

A suffix automaton (Blumer et al. 1985; as a draft: arXiv 2411.10666) holds every run of tokens of
the text. It grows by a token in amortized constant time, and knows the longest ending of the text
that occurred before without searching.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from edgellm.device_runtime.speculate.lookup import Continuation

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
        self._link = [-1]  # state of the longest ending that occurs at more places
        self._whole = 0  # state of the whole text
        self.match = 0  # state of the longest ending that occurred before

    def push(self, token_id: int) -> None:
        """Append a token."""
        self.end[self.match] = len(self.tokens)  # used until now: an earlier place
        self.tokens.append(token_id)
        state, new = self._whole, self._add({}, len(self.tokens), len(self.tokens))
        while state >= 0 and token_id not in self.next[state]:
            self.next[state][token_id] = new
            state = self._link[state]
        if state >= 0:
            self._link[new] = self._ending(state, token_id)
        else:
            self._link[new] = 0
        self._whole, self.match = new, self._link[new]

    def _ending(self, state: int, token_id: int) -> int:
        """The state of `state`'s longest run and `token_id`, split from longer runs if need be."""
        found = self.next[state][token_id]
        length = self.length[state] + 1
        if self.length[found] == length:
            return found
        shorter = self._add(dict(self.next[found]), length, self.end[found])
        self._link[shorter], self._link[found] = self._link[found], shorter
        while state >= 0 and self.next[state].get(token_id) == found:
            self.next[state][token_id] = shorter
            state = self._link[state]
        return shorter

    def _add(self, following: dict[int, int], length: int, end: int) -> int:
        self.next.append(following)
        self.length.append(length)
        self.end.append(end)
        self._link.append(0)
        return len(self.next) - 1


class SuffixLookup:
    """Foresees what followed the longest earlier match; remembers requests and answers."""

    def __init__(
        self, *, memory_tokens: int = MEMORY_TOKENS, longest: int = 16, branches: int = 3
    ) -> None:
        """Begin with nothing.

        Args:
            memory_tokens: of all requests; never more are held.
            longest: tokens of a continuation.
            branches: continuations, by their first tokens.
        """
        self.most = longest * branches
        self._memory, self._longest, self._branches = memory_tokens, longest, branches
        self.automaton = SuffixAutomaton()

    def begin(self) -> None:
        """Close the request before."""
        tokens = self.automaton.tokens
        if tokens and tokens[-1] != _SEPARATOR:
            self.extend([_SEPARATOR])

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens."""
        for token_id in token_ids:
            if len(self.automaton.tokens) >= self._memory:
                newest = self.automaton.tokens[-(self._memory // 2) :]
                self.automaton = SuffixAutomaton()
                for known in newest:
                    self.automaton.push(known)
            self.automaton.push(token_id)

    def continuations(self) -> list[Continuation]:
        """What followed the longest ending that occurred before, the latest place first."""
        automaton = self.automaton
        matched = automaton.length[automaton.match]
        if matched < _SHORTEST_MATCH:
            return []
        following = automaton.next[automaton.match]
        places = [(automaton.end[state], token) for token, state in following.items()]
        found = []
        for end, token_id in heapq.nlargest(self._branches, places):
            if token_id == _SEPARATOR:
                continue
            followed = self._follow(end, token_id)
            confidences = [_confidence(matched + at) for at in range(len(followed))]
            if found:
                confidences[0] *= _OTHERS
            found.append(Continuation(followed, confidences))
        return found

    def _follow(self, end: int, token_id: int) -> list[int]:
        """`token_id`, whose place ends at `end`, and what came after; a loop goes on looping."""
        tokens, followed = self.automaton.tokens, [token_id]
        while len(followed) < self._longest:
            at = end + len(followed) - 1
            following = tokens[at] if at < len(tokens) else followed[at - len(tokens)]
            if following == _SEPARATOR:
                break
            followed.append(following)
        return followed


def _confidence(matched: int) -> float:
    """Before anything was learned: the longer a match, the likelier it goes on."""
    return matched / (matched + 4)

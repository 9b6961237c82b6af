"""The suffix automaton against searches of the whole text; its memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.device_runtime.speculate.drafters.suffix import SuffixAutomaton, SuffixMemory

TEXTS = st.one_of(
    st.lists(st.integers(0, 2), max_size=60),
    st.lists(st.integers(0, 7), max_size=60),
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=5), st.integers(1, 9)).map(
        lambda loop: loop[0] * loop[1]
    ),
)


def earlier_places(tokens: list[int], length: int) -> list[int]:
    """Ends before the text's own where its last `length` tokens occur."""
    ending = tokens[len(tokens) - length :]
    return [end for end in range(length, len(tokens)) if tokens[end - length : end] == ending]


def longest_match(tokens: list[int]) -> int:
    return max((size for size in range(len(tokens)) if earlier_places(tokens, size)), default=0)


def continued(tokens: list[int], end: int, maximum: int) -> list[int]:
    """Continuation after a position of the text, repeated where it ends."""
    longer = list(tokens)
    for at in range(end, end + maximum):
        longer.append(longer[at])
    return longer[len(tokens) :]


@settings(max_examples=150)
@given(TEXTS)
def test_the_match_is_the_longest_at_every_token(text):
    automaton = SuffixAutomaton()
    for count, token_id in enumerate(text, start=1):
        automaton.extend([token_id])
        tokens = text[:count]
        length = automaton.length[automaton.match]
        assert length == longest_match(tokens)
        assert length == 0 or automaton.end[automaton.match] in earlier_places(tokens, length)
    # Bound of the work: all but a few steps for each token make a state or a transition.
    assert len(automaton.next) <= max(2 * len(text), 2)
    assert sum(map(len, automaton.next)) <= 3 * len(text)


@settings(max_examples=150)
@given(TEXTS, st.integers(1, 9))
def test_continuations_follow_the_match(text, longest):
    lookup = SuffixMemory(longest=longest, branches=99).begin()
    lookup.extend(text)
    found, length = lookup.continuations(), longest_match(text)
    if length < 2:
        assert found == []
        return
    places = earlier_places(text, length)
    assert {one.token_ids[0] for one in found} == {text[end] for end in places}
    assert len(found) == len({text[end] for end in places})
    for one in found:
        assert list(one.token_ids) in [continued(text, end, longest) for end in places]
        assert len(one.confidences) == longest
        assert all(0 < confidence < 1 for confidence in one.confidences)
    assert found[0].confidences[0] >= max(one.confidences[0] for one in found)


def test_latest_occurrence_comes_first():
    lookup = SuffixMemory(longest=2, branches=2).begin()
    lookup.extend([1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 5, 9, 1, 2])
    first, second = lookup.continuations()
    assert (first.token_ids, second.token_ids) == ([5, 9], [4, 9])
    assert first.confidences[0] > second.confidences[0]
    lookup = SuffixMemory(longest=2).begin()
    lookup.extend([5, 1, 2, 3, 8, 6, 1, 2, 3, 7, 4, 1, 2])
    assert [one.token_ids for one in lookup.continuations()] == [[3, 7]]


def test_a_loop_is_continued():
    lookup = SuffixMemory(longest=8).begin()
    lookup.extend([7, 7, 7])
    assert lookup.continuations()[0].token_ids == [7] * 8
    lookup.extend([1, 2, 3, 1, 2, 3, 1])
    assert lookup.continuations()[0].token_ids == [2, 3, 1, 2, 3, 1, 2, 3]


def test_matches_in_earlier_requests_end_with_them():
    memory = SuffixMemory()
    lookup = memory.begin()
    lookup.extend([1, 2, 3, 4, 5])
    lookup.end([])
    memory.begin().end([])
    lookup = memory.begin()
    lookup.extend([9, 2, 3])
    (found,) = lookup.continuations()
    assert found.token_ids == [4, 5]
    lookup.extend([4, 5])
    assert lookup.continuations() == []


def _joined(earlier: list[list[int]], own: list[int]) -> tuple[int, set[int]]:
    """The longest match of the current text in all texts joined, and its continuation."""
    tokens = [token for request in earlier for token in (*request, -1)] + own
    sizes = range(1, len(own) + bool(earlier) + 1)
    length = max((size for size in sizes if earlier_places(tokens, size)), default=0)
    return length, {tokens[end] for end in earlier_places(tokens, length)} - {-1}


@settings(max_examples=150)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=5), TEXTS)
def test_earlier_requests_and_the_current_text_are_searched_alike(earlier, own):
    memory = SuffixMemory(branches=99)
    for request in earlier:
        lookup = memory.begin()
        lookup.extend(request)
        lookup.end([])
    lookup = memory.begin()
    for count, token in enumerate(own, start=1):
        lookup.extend([token])
        length, following = _joined(earlier, own[:count])
        if length >= 2:
            assert {one.token_ids[0] for one in lookup.continuations()} == following
        else:
            assert lookup.continuations() == []


def test_requests_that_finish_meanwhile_are_found():
    memory = SuffixMemory()
    first, other = memory.begin(), memory.begin()
    first.extend([1, 2])
    other.extend([7, 1])
    assert first.continuations() == []
    other.end([2, 3])
    assert [one.token_ids for one in first.continuations()] == [[3]]
    first.extend([3, 1, 2])
    assert first.continuations()[0].token_ids[:3] == [3, 1, 2]


@pytest.mark.parametrize("memory", [2, 7, 64])
def test_memory_is_bounded_and_the_newest_stays(memory):
    kept = SuffixMemory(memory_tokens=memory)
    for request in range(60):
        lookup = kept.begin()
        for token_id in range(request % 5, 12):
            lookup.extend([token_id])
            for text in (lookup._own, kept.text):
                assert len(text.automaton.tokens) <= memory
                assert len(text.automaton.next) <= 2 * memory
        lookup.end([])
    lookup = kept.begin()
    lookup.extend([8, 9])
    assert memory < 7 or lookup.continuations()[0].token_ids[0] == 10
    lookup.extend([8, 9])
    assert memory < 7 or lookup.continuations()[0].token_ids[0] in (8, 10)

"""Words become final when two successive decodings have them, and stay."""

from __future__ import annotations

import numpy as np

from edgellm.device_runtime.transcription.stable_words import StableWords

PIECES = [" The", " old", " light", "house", ".", ",", " stood", " ", "7", "\u706f", "\u5854"]
THE, OLD, LIGHT, HOUSE, POINT, COMMA, STOOD, SPACE, SEVEN, LAMP, TOWER = range(len(PIECES))


def _added(*decodings, language="en"):
    """The final tokens after each decoding."""
    words, found = StableWords(lambda token: PIECES[token].encode()), []
    for each in decodings:
        before = words.token_ids
        assert words.add(each, language) == (words.token_ids != before)
        found.append([*words.token_ids])
    return found


def test_words_of_two_decodings_are_final():
    """Also if punctuation follows them, which may change; a word is not final in part."""
    assert _added(
        [THE, POINT],
        [THE, OLD, POINT],
        [THE, OLD, LIGHT, POINT],
        [THE, OLD, LIGHT, HOUSE, POINT],
        [THE, OLD, LIGHT, HOUSE, COMMA, STOOD],
        [THE, OLD, LIGHT, HOUSE, COMMA, STOOD, POINT],
    ) == [
        [],
        [THE],
        [THE, OLD],
        [THE, OLD],
        [THE, OLD, LIGHT, HOUSE],
        [THE, OLD, LIGHT, HOUSE, COMMA, STOOD],
    ]


def test_words_that_differ_wait():
    assert _added([OLD], [THE, OLD], [THE, LIGHT], [THE, LIGHT])[1:] == [[], [THE], [THE, LIGHT]]
    assert _added([], [THE], [], [THE])[-1] == []


def test_characters_are_words_of_some_languages():
    assert _added([LAMP, SEVEN], [LAMP, TOWER], language="zh")[-1] == [LAMP]
    assert _added([LAMP, SEVEN], [LAMP, TOWER])[-1] == []


def test_final_words_are_the_beginning_of_both_decodings():
    random = np.random.default_rng(0)
    words, before, seen = StableWords(lambda token: PIECES[token].encode()), [], set()
    for _ in range(300):
        known = [*words.token_ids]
        if len(known) > 6:
            words, before, known = StableWords(lambda token: PIECES[token].encode()), [], []
        kept = before[: random.integers(len(known), len(before) + 1)]
        decoded = kept + random.integers(0, len(PIECES), random.integers(0, 4)).tolist()
        words.add(decoded, "en")
        final = [*words.token_ids]
        assert final[: len(known)] == known
        assert before[: len(final)] == decoded[: len(final)] == final
        seen.add(len(final) - len(known))
        before = decoded
    assert {0, 1, 2} <= seen

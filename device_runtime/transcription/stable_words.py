"""Words of speech that has not ended: those on which two successive decodings agree are final.

The rule is LocalAgreement-2 (arXiv 2307.14743), by words without the punctuation after them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgellm.device_runtime.transcription.word_times import split_words


class StableWords:
    """The words of one region of speech that later decodings do not change.

    Attributes:
        token_ids: of the words, with which each later decoding has to begin.
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        """Args: `bytes_of`, the bytes that a token adds to a text."""
        self.token_ids: tuple[int, ...] = ()
        self._bytes_of = bytes_of
        self._latest: list[tuple[int, ...]] = []  # words of the latest decoding

    def add(self, decoded: Sequence[int], language: str) -> bool:
        """Compare a decoding with the one before it; return whether more words are final.

        Args:
            decoded: tokens of text, which begin with `token_ids`.
            language: code of the text.
        """
        pieces = [self._bytes_of(token) for token in decoded]
        words = [tuple(decoded[w.begin : w.end]) for w in split_words(pieces, language)]
        before, self._latest = self._latest, words
        agreed: list[int] = []
        for one, other in zip(words, before, strict=False):
            core = self._without_punctuation(one)
            if core != self._without_punctuation(other):
                break
            if one != other:
                agreed += core
                break
            agreed += one
        found = self._without_punctuation(agreed)
        if len(found) <= len(self.token_ids):
            return False
        self.token_ids = found
        return True

    def _without_punctuation(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Without the tokens at the end that have no letter and no digit."""
        end = len(token_ids)
        while end and not _has_letters(self._bytes_of(token_ids[end - 1])):
            end -= 1
        return tuple(token_ids[:end])


def _has_letters(piece: bytes) -> bool:
    """Whether a token has letters or digits, or a part of a character."""
    text = piece.decode(errors="replace")
    return "\ufffd" in text or any(each.isalnum() for each in text)

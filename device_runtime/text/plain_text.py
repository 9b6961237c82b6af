"""Prompts in which users' words that spell special tokens stay text.

The tokenizers library parses all special tokens of a text, or none. A prompt needs both: those of
the chat template are tokens, those typed by a user are text. A copy of the tokenizer renames each
special token to a stand-in, which replaces the tokens written by the template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer
from tokenizers.models import Model

# Noncharacters, which no text contains: a mark that splits a word, and the ends of a stand-in.
CUT, _OPEN, _CLOSE = "\ufdd0", "\ufdd1", "\ufdd2"
_MARKS = re.compile(f"[{CUT}{_OPEN}{_CLOSE}]")


def without_marks(text: str) -> str:
    """A text without the marks of `PlainText.marked`."""
    return _MARKS.sub("", text)


class PlainText:
    """Marks words that spell special tokens, and encodes prompts with such marks."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Store the tokenizer; a copy that shares its model is made for the first marked prompt."""
        self._tokenizer = tokenizer
        self._added = dict(sorted(tokenizer.get_added_tokens_decoder().items()))
        self._special = {at: token.content for at, token in self._added.items() if token.special}
        self._patterns: dict[frozenset[str], re.Pattern[str]] = {}
        self._copy: _Copy | None = None

    def marked(self, text: str, kept: Iterable[str] = ()) -> str:
        """`text` with marks in words that spell special tokens; chat templates keep the marks.

        Args:
            text: of a user; returned unchanged without such words.
            kept: special tokens that are allowed.
        """
        words, text = self._pattern(frozenset(kept)), without_marks(text)
        found = words.sub(lambda first: first[0] + CUT, text)
        if found == text and words.search(self._normalized(text)) is not None:
            # Full-width characters, or capitals, are normalized to such a word.
            return "".join(character + CUT for character in text)
        return found

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text with marks."""
        text = "".join(self._named(text))
        copy = self._copy or self._renamed(self._tokenizer.model)
        found = copy.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if self._reads_words(copy, found, text):
            copy = self._renamed(self._without_words())
            found = copy.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        self._copy = copy
        tokens = zip(found.ids, found.special_tokens_mask, strict=True)
        return [index if is_own else copy.ids.get(index, index) for index, is_own in tokens]

    def _pattern(self, kept: frozenset[str]) -> re.Pattern[str]:
        """Regex for the first character of each special token, also of one inside another."""
        if (known := self._patterns.get(kept)) is not None:
            return known
        rests: dict[str, list[str]] = {}
        for content in {*self._special.values()} - {"", *kept}:
            rests.setdefault(content[0], []).append(re.escape(content[1:]))
        firsts = (f"{re.escape(first)}(?={'|'.join(found)})" for first, found in rests.items())
        return self._patterns.setdefault(kept, re.compile("|".join(firsts) or "(?!)", re.DOTALL))

    def _named(self, text: str) -> Iterator[str]:
        """The text without marks, with stand-ins for the remaining special tokens."""
        found, end = self._tokenizer.encode(text, add_special_tokens=False), 0
        for index, (begin, stop) in zip(found.ids, found.offsets, strict=True):
            content = self._special.get(index)
            at = -1 if content is None else text.find(content, begin, stop)
            if content is None or at < end:
                continue
            if len(content) == 1 and text.startswith(CUT, at + 1):  # a user's, too short to part
                continue
            yield without_marks(text[end:at])
            yield _stand_in(index)
            end = at + len(content)
        yield without_marks(text[end:])

    def _renamed(self, model: Model) -> _Copy:
        """The tokenizer with this model, whose special tokens have the names of their stand-ins."""
        original, copy = self._tokenizer, Tokenizer(model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if (found := getattr(original, part)) is not None:
                setattr(copy, part, found)
        names = {
            index: _stand_in(index) if token.special else token.content
            for index, token in self._added.items()
        }
        copy.add_tokens([self._named_token(index, name) for index, name in names.items()])
        read = copy.get_vocab(with_added_tokens=True)
        return _Copy(copy, {read[name]: index for index, name in names.items()})

    def _named_token(self, index: int, name: str) -> AddedToken:
        """An added token that is not special; it matches inside words, as its text was matched."""
        token = self._added[index]
        return AddedToken(
            name,
            single_word=token.single_word and not token.special,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized and name in self._normalized(name),
        )

    def _normalized(self, text: str) -> str:
        normalizer = self._tokenizer.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    def _reads_words(self, copy: _Copy, found: Encoding, text: str) -> bool:
        """Whether the model itself made a special token from a user's word."""
        tokens = zip(found.ids, found.special_tokens_mask, found.offsets, strict=True)
        for index, is_own, (begin, stop) in tokens:
            content = self._special.get(index, "")
            if len(content) < 2 or is_own or index in copy.ids:  # one character may be all it has
                continue
            if content in self._normalized(text[begin:stop]):  # and it is no unknown word
                return True
        return False

    def _without_words(self) -> Model:
        """The model, with stand-ins for special tokens in its vocabulary."""
        whole: dict[str, Any] = json.loads(self._tokenizer.to_str())
        model = whole["model"]
        names = {word: _stand_in(index) for index, word in self._special.items() if len(word) > 1}
        vocabulary = model["vocab"]
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(word, word): at for word, at in vocabulary.items()}
        else:
            model["vocab"] = [[names.get(word, word), score] for word, score in vocabulary]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        if "merges" in model:
            model["merges"] = [
                merge for merge in model["merges"] if names.keys().isdisjoint(_parts(merge))
            ]
        whole |= {"added_tokens": [], "post_processor": None}
        return Tokenizer.from_str(json.dumps(whole)).model


@dataclass(frozen=True, slots=True)
class _Copy:
    """A tokenizer that parses stand-ins."""

    tokenizer: Tokenizer
    ids: dict[int, int]  # the original's, of its added tokens


def _stand_in(token_id: int) -> str:
    return f"{_OPEN}{token_id}{_CLOSE}"


def _parts(merge: str | list[str]) -> tuple[str, str, str]:
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second, first + second

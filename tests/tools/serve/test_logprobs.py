"""Bytes and places of tokens: those of a text, in whatever pieces it comes.

The bytes of a token are compared with llguidance's, places with arithmetic on UTF-8.
"""

from __future__ import annotations

import bisect
import codecs
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lettered_engine import with_letters
from serve_process import serving
from tokenizer_families import FAMILIES, make_tokenizer

from edgellm.device_runtime.engine.sequence import Step
from edgellm.device_runtime.sampling.logprobs import TokenLogprobs
from edgellm.device_runtime.text.tokenizer import ChatTokenizer
from edgellm.tools.serve.engines.events import Finished, Started
from edgellm.tools.serve.protocols.openai.completions import CompletionWriter
from edgellm.tools.serve.protocols.openai.logprobs import (
    TokenPlaces,
    chat_logprobs,
    completion_logprobs,
)
from edgellm.tools.serve.schemas.openai import CompletionRequest

_WITH_BYTES = ["prepend", "metaspace_first", "metaspace_always", "metaspace_never", "byte_level"]
_SOME_BYTES = [bytes([byte]) for byte in (0xC3, 0xA9, 0xE2, 0x82, 0xF0, 0x9F, 0x80, 0xFF)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {}
    for family in FAMILIES:
        found[family] = tmp_path_factory.mktemp(family)
        make_tokenizer(family).save(str(found[family] / "tokenizer.json"))
    return found


@pytest.fixture(scope="module")
def tokenizers(folders) -> dict[str, ChatTokenizer]:
    return {family: ChatTokenizer(folder) for family, folder in folders.items()}


def _entries(ids: Sequence[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_id, -1.0, ((token_id, -1.0), (5, -2.0))) for token_id in ids]


def _places(tokenizer: ChatTokenizer, *, begins: bool = True) -> TokenPlaces:
    places = TokenPlaces(tokenizer, tokenizer.hidden_ids())
    places.begins = begins
    return places


@pytest.mark.parametrize("family", _WITH_BYTES)
def test_bytes_of_every_token_are_those_of_llguidance(folders, tokenizers, family):
    from llguidance import LLTokenizer

    theirs = LLTokenizer(str(folders[family] / "tokenizer.json"), eos_token=2)
    ours = tokenizers[family]
    for token_id in range(3, len(ours.vocabulary())):
        found = ours.token_bytes(token_id)
        assert found == theirs.decode_bytes([token_id]) or found == b"\xff"  # its own mark


def test_a_character_of_several_tokens(tokenizers):
    ids = tokenizers["byte_level"].encode("a👩z", add_special_tokens=False)
    found = chat_logprobs(_entries(ids), _places(tokenizers["byte_level"]))
    assert [one["bytes"] for one in found] == [[97], [240, 159], [145], [169], [122]]
    shown = completion_logprobs(_entries(ids), _places(tokenizers["byte_level"]))
    assert shown["text_offset"] == [0, 1, 1, 1, 2]
    assert shown["tokens"] == ["a", "bytes:\\xf0\\x9f", "bytes:\\x91", "bytes:\\xa9", "z"]
    assert [len(top) for top in shown["top_logprobs"]] == [2] * 5


@pytest.mark.parametrize("family", FAMILIES)
@given(text=st.text("the xyé👩.\n", min_size=1, max_size=14), begins=st.booleans())
def test_all_bytes_together_are_the_text(tokenizers, family, text, begins):
    tokenizer = tokenizers[family]
    ids = [1, *tokenizer.encode(text, add_special_tokens=False), 2]  # which are hidden
    before = () if begins else tokenizer.encode("x", add_special_tokens=False)
    stream = tokenizer.stream(after=before)
    expected = "".join(map(stream.push, ids)) + stream.finish()
    found = chat_logprobs(_entries(ids), _places(tokenizer, begins=begins))
    assert b"".join(bytes(one["bytes"]) for one in found).decode() == expected
    shown = completion_logprobs(_entries(ids), _places(tokenizer, begins=begins))
    added, offsets = b"", []
    for token_id, one in zip(ids, found, strict=True):
        offsets.append(len(added.decode(errors="ignore")))
        added += bytes(one["bytes"])
        assert one["top_logprobs"][0]["bytes"] == one["bytes"]
        assert (token_id in (0, 1, 2)) <= (one["bytes"] == [])
    assert shown["text_offset"] == offsets


def _character_starts(data: bytes) -> list[int]:
    """The first byte of each character of a text, as `bytes.decode` replaces what is no UTF-8."""
    ends: dict[int, int] = {}

    def note(fault: UnicodeError) -> tuple[str, int]:
        assert isinstance(fault, UnicodeDecodeError)
        ends[fault.start] = fault.end
        return "\ufffd", fault.end

    codecs.register_error("noted", note)
    starts, at = [], 0
    for character in data.decode("utf-8", "noted"):
        starts.append(at)
        at = ends.get(at, at + len(character.encode()))
    return starts


def _offsets_by_definition(tokens: list[tuple[bytes, bool]], begin: int) -> list[int]:
    """Offsets of tokens, given their bytes and whether byte fallback made them.

    Hugging Face's ByteFallback replaces every byte of a run that is not UTF-8.
    """
    found: list[int] = []
    for is_run, group in itertools.groupby(tokens, lambda token: token[1]):
        parts = [part for part, _ in group]
        data = b"".join(parts)
        starts = _character_starts(data)
        if is_run and "\ufffd" in data.decode(errors="replace"):
            starts = [*range(len(data))]
        firsts = itertools.accumulate(map(len, parts[:-1]), initial=0)
        found += [begin + bisect.bisect(starts, first) - 1 for first in firsts]
        begin += len(starts)
    return found


def _sent(
    tokenizer: ChatTokenizer, ids: Sequence[int], prompt: Sequence[int], *, stream: bool
) -> tuple[str, list[int]]:
    """Text and offsets of a completion, one token a step, with its prompt."""
    asked = {"prompt": [*prompt], "logprobs": 1, "echo": True}
    llm: Any = SimpleNamespace(tokenizer=tokenizer, manifest=SimpleNamespace(eos_token_ids=()))
    writer = CompletionWriter(CompletionRequest.model_validate(asked), llm, "model")
    events = writer.begin(Started(len(prompt), tuple(prompt), tuple(_entries(prompt[1:]))))
    texts = tokenizer.stream(after=prompt)
    for token_id in ids:
        step = Step((token_id,), texts.push(token_id), logprobs=tuple(_entries([token_id])))
        events += writer.step(step)
    events += writer.step(Step((), texts.finish()))
    figures = Finished(
        finish_reason="length",
        prompt_tokens=len(prompt),
        cached_tokens=0,
        completion_tokens=len(ids),
        rounds=(),
        queue_ms=0.0,
        first_token_ms=0.0,
        generation_ms=0.0,
    )
    sent = [*events, *writer.end(figures)] if stream else [writer.whole(figures)]
    choices = [event["choices"][0] for event in sent]
    text = "".join(choice["text"] for choice in choices)
    return text, [at for choice in choices for at in choice["logprobs"]["text_offset"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("family", ["prepend", "metaspace_never", "unigram", "byte_level"])
@given(data=st.data())
def test_offsets_are_places_in_the_final_text(tokenizers, family, stream, data):
    """With bytes in any order, so that many are no characters."""
    tokenizer = tokenizers[family]
    vocabulary = range(3, len(tokenizer.vocabulary()))
    likely = [at for at in vocabulary if tokenizer.token_bytes(at) in _SOME_BYTES]
    ids = data.draw(st.lists(st.sampled_from([*likely, *likely, *vocabulary]), max_size=12))
    prompt = tokenizer.encode("xyx", add_special_tokens=False)
    before = tokenizer.decode(prompt)
    text, offsets = _sent(tokenizer, ids, prompt, stream=stream)
    assert text == tokenizer.decode([*prompt, *ids])
    tokens = [(tokenizer.token_bytes(at), tokenizer.is_fallback_byte(at)) for at in ids]
    assert offsets[len(prompt) :] == _offsets_by_definition(tokens, len(before))


def test_a_prompt_may_end_within_a_character(tokenizers):
    """The text has U+FFFD for its part, and then what the next token makes of it."""
    tokenizer = tokenizers["byte_level"]
    first, second, letter = tokenizer.encode("éz", add_special_tokens=False)
    for ids, expected in (([second, letter], "\ufffdéz"), ([letter, letter], "\ufffdzz")):
        for stream in (False, True):
            text, offsets = _sent(tokenizer, ids, [first], stream=stream)
            assert (text, offsets) == (expected, [0, 1, 2])


def test_tokens_that_differ_by_a_space_have_names_of_their_own(tokenizers):
    tokenizer = tokenizers["prepend"]
    spaced, plain = (tokenizer.vocabulary()[token] for token in ("▁the", "the"))
    entry = TokenLogprobs(spaced, -0.5, ((spaced, -0.5), (plain, -1.5)))
    assert completion_logprobs([entry], _places(tokenizer, begins=False))["top_logprobs"] == [
        {" the": -0.5, "the": -1.5}
    ]
    found = completion_logprobs([entry], _places(tokenizer))["top_logprobs"]
    assert found == [{"the": -0.5}]  # the likelier one, where they are spelled alike


def test_special_tokens_of_a_prompt_count_where_it_spells_them_out(tokenizers):
    tokenizer = tokenizers["byte_level"]
    prompt = "<s>the</s>x"
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    for text, expected in ((prompt, [0, 3, 6, 10]), ("thex", [0, 0, 3, 3])):
        shown = completion_logprobs(_entries(ids[1:]), _places(tokenizer), ids[0], text)
        assert shown["text_offset"] == expected


@pytest.fixture(scope="module")
def server(roomy_engine, tmp_path_factory):
    engine = with_letters(roomy_engine, tmp_path_factory.mktemp("letters") / "engine")
    with serving(engine, "--modelName", "tiny") as process:
        yield process


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_places_in_answers(server, stream, echo):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    asked = {"model": "tiny", "prompt": "ab cd", "max_tokens": 9, "temperature": 1.5, "seed": 3}
    asked |= {"logprobs": 1, "stop": ["never"], "extra_body": {"ignore_eos": True}}
    found = client.completions.create(**asked, echo=echo, stream=stream)
    choices = [chunk.choices[0] for chunk in (found if stream else [found])]
    text = "".join(choice.text for choice in choices)
    shown = [choice.logprobs for choice in choices if choice.logprobs is not None]
    tokens = [token for one in shown for token in one.tokens]
    offsets = [offset for one in shown for offset in one.text_offset]
    assert len(tokens) == (14 if echo else 9)
    for token, offset, end in zip(tokens, offsets, [*offsets[1:], len(text)], strict=True):
        assert text[offset:end] in (token, "")  # "": a special token
    assert text.startswith("ab cd") == echo


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_in_answers(server, stream):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    asked = {"model": "tiny", "max_tokens": 9, "top_logprobs": 2, "temperature": 0}
    found = client.chat.completions.create(
        **asked, messages=[{"role": "user", "content": "ab"}], logprobs=True, stream=stream
    )
    choices = [chunk.choices[0] for chunk in (found if stream else [found])]
    parts = [choice.delta if stream else choice.message for choice in choices]
    text = "".join(part.content or "" for part in parts)
    shown = [one for choice in choices if choice.logprobs for one in choice.logprobs.content]
    assert b"".join(bytes(one.bytes) for one in shown).decode() == text
    assert all(one.top_logprobs[0].bytes == one.bytes for one in shown)

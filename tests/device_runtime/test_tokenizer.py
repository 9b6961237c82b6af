from __future__ import annotations

import pytest
from conftest import write_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_families import FAMILIES, make_tokenizer

from edgellm.core.errors import (
    BrokenArtifactError,
    RequestError,
)
from edgellm.device_runtime.engine.chat_template import Formatter
from edgellm.device_runtime.text.tokenizer import ChatTokenizer, StopMatcher


@pytest.fixture
def tokenizer(tmp_path) -> ChatTokenizer:
    """The word-level tokenizer with its template."""
    return _with_template(
        tmp_path,
        "{%- for m in messages -%}{{ m.role }}={{ m.content }};{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ eos_token }}{%- endif -%}",
    )


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> ChatTokenizer:
    """One token per byte, so that characters have several tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return ChatTokenizer(folder)


def _with_template(folder, template) -> ChatTokenizer:
    write_tokenizer(folder, 40)
    (folder / "chat_template.jinja").write_text(template)
    return ChatTokenizer(folder)


def test_template_gets_messages_special_tokens_and_flags(tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.render(messages, add_generation_prompt=True) == "user=hi;</s>"
    assert tokenizer.render(messages) == "user=hi;"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{% for %}", "refuses"),
        ("{{ messages[0].content + 1 }}", "refuses"),
    ],
)
def test_failing_and_unsafe_templates_are_rejected(tmp_path, template, message):
    tokenizer = _with_template(tmp_path, template)
    with pytest.raises(RequestError, match=message):
        tokenizer.render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "hi"),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}", "1"),
        ("{{ strftime_now('%Y') | length }}", "4"),
    ],
)
def test_templates_get_variables_of_transformers(tmp_path, template, expected):
    tokenizer = _with_template(tmp_path, template)
    assert tokenizer.render([{"role": "user", "content": "hi"}]) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% for i in m.content %}{{ i.text }}{% endfor %}{% endfor %}",
    ],
)
def test_texts_become_items_if_the_template_needs_them(tmp_path, template):
    """As those of Idefics3 and SmolVLM2, which silently drop a content that is a string."""
    formatter = Formatter(_with_template(tmp_path, template))
    items = [{"type": "text", "text": "w2"}]
    turns = [{"role": "user", "content": "w1"}, {"role": "user", "content": items}]
    assert formatter.format(turns) == "w1w2"


def test_messages_are_not_rendered_as_templates(tokenizer):
    rendered = tokenizer.render([{"role": "user", "content": "{{ eos_token }}{% x %}"}])
    assert rendered == "user={{ eos_token }}{% x %};"


def test_models_without_a_template_raise(byte_level):
    with pytest.raises(RequestError, match="no chat template"):
        byte_level.render([])


def test_duplicate_tokenizer_settings(tmp_path):
    write_tokenizer(tmp_path, 20)
    path = tmp_path / "tokenizer_config.json"
    path.write_text('{"bos_token": "<s>", "bos_token": "</s>"}')
    with pytest.raises(BrokenArtifactError, match=r"config\.json .*the key \$\.bos_token is there"):
        ChatTokenizer(tmp_path)


def test_damaged_tokenizers_are_rejected(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BrokenArtifactError, match=r"tokenizer\.json cannot be read"):
        ChatTokenizer(tmp_path)


@given(st.text(min_size=1, max_size=30))
def test_streamed_pieces_are_whole_characters(byte_level, text):
    stream = byte_level.stream()
    pieces = [stream.push(t) for t in byte_level.encode(text, add_special_tokens=False)]
    assert "�" not in "".join(pieces) or "�" in text
    assert "".join(pieces) + stream.finish() == text


@pytest.fixture(scope="module")
def families(tmp_path_factory) -> dict[str, ChatTokenizer]:
    """A tokenizer of each family."""
    found = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        make_tokenizer(family).save(str(folder / "tokenizer.json"))
        found[family] = ChatTokenizer(folder)
    return found


@pytest.mark.each_change("byte_level", "unigram_normalized", "wordpiece", "whole_words", "prepend")
@pytest.mark.parametrize("family", FAMILIES)
@given(
    before=st.text("the xyé👩.\n\ufffd ", min_size=1, max_size=12),
    after=st.text("the xyé👩.\n\ufffd ", max_size=12),
    special=st.integers(0, 12),
)
def test_an_output_continues_the_prompt(families, family, before, after, special):
    """Prompt and output equal the library's decoding of both together."""
    tokenizer = families[family]
    prompt = [1, *tokenizer.encode(before, add_special_tokens=False), *[2] * special]
    ids = tokenizer.encode(after, add_special_tokens=False)
    stream = tokenizer.stream(after=prompt)
    text = "".join(stream.push(token_id) for token_id in ids) + stream.finish()
    assert tokenizer.decode(prompt) + text == tokenizer.decode([*prompt, *ids])


@pytest.mark.parametrize("family", ["prepend", "metaspace_first", "metaspace_always", "unigram"])
def test_the_space_before_a_continuation(families, family):
    tokenizer = families[family]
    the = tokenizer.vocabulary()["▁the"]
    raw = tokenizer.stream(after=tokenizer.encode("x y", add_special_tokens=True))
    assert [raw.push(the), raw.push(the)] == [" the", " the"]
    own = tokenizer.stream()
    assert [own.push(the), own.push(the)] == ["the", " the"]


@pytest.mark.parametrize("family", ["prepend", "metaspace_never", "unigram"])
def test_a_prompt_that_ends_with_byte_tokens_is_not_repeated(families, family):
    tokenizer = families[family]
    the = tokenizer.vocabulary()["▁the"]
    for before in ("x 👩", "x é", "x ."):
        stream = tokenizer.stream(after=tokenizer.encode(before, add_special_tokens=False))
        assert [stream.push(2), stream.push(the), stream.finish()] == ["", " the", ""]


def test_an_incomplete_character_of_the_prompt_is_completed(byte_level):
    *before, last = byte_level.encode("a👩", add_special_tokens=False)
    for end, text in ((last, "👩"), (byte_level.vocabulary()["b"], "b")):
        assert byte_level.stream(after=before).push(end) == text


def test_an_incomplete_character_becomes_u_fffd(byte_level):
    ids = byte_level.encode("aé", add_special_tokens=False)
    stream = byte_level.stream()
    assert [stream.push(t) for t in ids[:-1]] == ["a", ""]
    assert stream.finish() == "�"


WORDS = ["▁", "▁a", "b", "▁b", "é", "▁▁", "日", "\ufffd"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
DECODERS = {
    "llama 2": [("Replace", "▁", " "), ("ByteFallback",), ("Fuse",), ("Strip", " ", 1, 0)],
    "gemma": [("Replace", "▁", " "), ("ByteFallback",), ("Fuse",)],
    "metaspace": [("ByteFallback",), ("Metaspace",)],
}


@pytest.fixture(scope="module", params=DECODERS)
def byte_fallback(request, tmp_path_factory) -> ChatTokenizer:
    """Words, and a token for each byte of other characters."""
    from tokenizers import Tokenizer, decoders, models

    folder = tmp_path_factory.mktemp("fallback")
    vocabulary = {name: at for at, name in enumerate(["<unk>", "<s>", "</s>", *WORDS, *BYTES])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    parts = [getattr(decoders, name)(*rest) for name, *rest in DECODERS[request.param]]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.save(str(folder / "tokenizer.json"))
    return ChatTokenizer(folder)


def _streamed(tokenizer: ChatTokenizer, names: list[str]) -> tuple[list[str], str]:
    """Streamed texts, and the tokenizer's own decoding of all tokens."""
    ids = [tokenizer.vocabulary()[name] for name in names]
    stream = tokenizer.stream()
    return [*map(stream.push, ids), stream.finish()], tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("tail", "text"),
    [
        ("<0xC3> <0xA9> <0xFF> b", "\ufffd\ufffd\ufffdb"),
        ("<0xC3> <0xA9> b <0xFF> b", "éb\ufffdb"),
        ("<0xC3> <s> <0xA9> <0xFF>", "\ufffd\ufffd\ufffd"),
        ("<0xF0> <0x9F> <0x98> <0x80> b", "😀b"),
        ("<0xE2> <0x82>", "\ufffd\ufffd"),
    ],
)
def test_invalid_bytes_are_replaced(byte_fallback, tail, text):
    pieces, whole = _streamed(byte_fallback, ["b", *tail.split()])
    assert "".join(pieces) == whole == f"b{text}"


@given(
    st.lists(st.sampled_from([*WORDS, "</s>", *BYTES[0xC2:0xC5], *BYTES[0x80:0x83], *BYTES[-3:]]))
)
def test_streams_equal_decoded_tokens(byte_fallback, names):
    pieces, whole = _streamed(byte_fallback, names)
    assert "".join(pieces) == whole


def test_byte_characters_are_returned_after_their_run(byte_fallback):
    """Later tokens may make the whole run of bytes invalid."""
    pieces, _ = _streamed(byte_fallback, ["b", "<0xC3>", "<0xA9>", "b", "<0xC3>", "<0xA9>"])
    assert pieces == ["b", "", "", "éb", "", "", "é"]


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.integers(1, 5),
)
def test_stop_strings_are_never_part_of_the_text(text, stops, size):
    matcher, shown, stopped = StopMatcher(stops), "", None
    for begin in range(0, len(text), size):
        piece, stopped = matcher.push(text[begin : begin + size])
        shown += piece
        if stopped:
            break
    if not stopped:
        shown += matcher.finish()
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    assert (stopped in stops) == any(stop in text for stop in stops)
    if not stopped:
        assert shown == text


def test_marked_words_are_text_and_not_special_tokens(tiny_engine):
    tokenizer = ChatTokenizer(tiny_engine)
    end = tokenizer.encode("</s>", add_special_tokens=False)
    assert len(end) == 1
    marked = tokenizer.as_text("w20 </s> w30")
    ids = tokenizer.encode(f"<s> user : {marked} </s>", add_special_tokens=False)
    assert ids.count(end[0]) == 1  # the template's own
    assert ids[-1] == end[0]
    word = tokenizer.encode("w30", add_special_tokens=False)[0]
    assert word in ids
    assert tokenizer.encode("</s>", add_special_tokens=False) == end  # settings are restored


def test_text_without_special_tokens_is_unchanged(tiny_engine):
    tokenizer = ChatTokenizer(tiny_engine)
    assert tokenizer.as_text("w20 <br> w30 \U0001f642") == "w20 <br> w30 \U0001f642"
    assert tokenizer.as_text("w20\ufdd0") == "w20"

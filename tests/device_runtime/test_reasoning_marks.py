"""Reasoning is handled equally whether its tags are special tokens or text.

The expected ids of conversations are those of transformers' `apply_chat_template`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizer_families import make_tokenizer
from tokenizers import AddedToken

from edgellm.core.errors import RequestError
from edgellm.device_runtime.engine.chat_template import Formatter
from edgellm.device_runtime.text.tokenizer import ChatTokenizer

NEW_TURN = {"continue_final_message": False}
_TURN = (
    "{% for m in messages %}{% set c = m.content %}"
    "{% if m.role == 'assistant' and CLOSING in c %}"
    "{% set c = c.split(CLOSING)[-1].lstrip('\\n') %}{% endif %}"
    "<s>{{ m.role }}\n{{ c }}</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n"
    "{% if enable_thinking %}OPENING{% endif %}{% endif %}"
)
_FAMILIES = [
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>", "<channel|>"),  # Gemma 4, whose thoughts begin with `thought`
]
_HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}"
    "{% if '<|channel|>' in m.content %}{{ raise_exception('channels in content') }}{% endif %}"
    "{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def _made(folder: Path, template: str, marks: tuple[str, ...], *, special: bool) -> ChatTokenizer:
    tokenizer = make_tokenizer("byte_level")
    added = [AddedToken(mark, normalized=False, special=special) for mark in marks]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "chat_template.jinja").write_text(template)
    return ChatTokenizer(folder)


def _pair(tmp_path: Path, tags: tuple[str, str]) -> tuple[ChatTokenizer, ChatTokenizer]:
    quoted = _TURN.replace("CLOSING", f"'{tags[1]}'").replace("OPENING", tags[0])
    special = _made(tmp_path / "True", quoted, tags, special=True)
    return special, _made(tmp_path / "False", quoted, tags, special=False)


def _streamed(tokenizer: ChatTokenizer, text: str) -> str:
    stream = tokenizer.stream()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return "".join(stream.push(index) for index in ids) + stream.finish()


@pytest.mark.parametrize("tags", _FAMILIES)
def test_outputs_contain_the_tags(tmp_path, tags):
    text = f"{tags[0]}\nthe thought\n{tags[1]}\n\nthe answer"
    special, plain = _pair(tmp_path, tags)
    assert _streamed(special, text) == _streamed(plain, text) == text
    assert _streamed(special, f"{text}</s>") == text  # others stay hidden


@pytest.mark.parametrize("tags", _FAMILIES)
@pytest.mark.parametrize(
    "answer", ["OPEN\nthought\nCLOSE\n\nyes", "thought CLOSE yes", "OPEN cut", "yes", "", "CLOSE"]
)
def test_reasoning_of_earlier_turns(tmp_path, tags, answer):
    from transformers import PreTrainedTokenizerFast

    answer = answer.replace("OPEN", tags[0]).replace("CLOSE", tags[1])
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "y"},
    ]
    special, plain = _pair(tmp_path, tags)
    for at, ours in (("True", special), ("False", plain)):
        file = str(tmp_path / at / "tokenizer.json")
        theirs = PreTrainedTokenizerFast(tokenizer_file=file, eos_token="</s>")
        theirs.chat_template = ours.chat_template
        expected = theirs.apply_chat_template(
            turns, tokenize=True, return_dict=False, add_generation_prompt=True
        )
        found = ours.encode(Formatter(ours).format(turns, NEW_TURN), add_special_tokens=False)
        assert found == expected
        assert ("thought" in ours.decode(found)) == ("thought" in answer and tags[1] not in answer)


@pytest.mark.parametrize("tags", _FAMILIES)
def test_tags_of_other_families_stay_text(tmp_path, tags):
    special, _ = _pair(tmp_path, tags)
    ids = special.added_ids(tags)
    for turn in (
        {"role": "user", "content": f"{tags[0]}x{tags[1]}y"},
        {"role": "system", "content": tags[1]},
        {"role": "assistant", "content": f"the word {tags[0]} begins it"},
        {"role": "assistant", "content": f"{tags[0]}x{tags[1]}y {tags[0]} {tags[1]} </s>"},
    ):
        found = special.encode(
            Formatter(special).format([turn], NEW_TURN), add_special_tokens=False
        )
        assert not {*found} & {*ids.values()}
        assert found.count(2) == 1  # </s>, the template's own


@pytest.mark.parametrize("is_special", [True, False])
def test_channels_of_gpt_oss(tmp_path, is_special):
    """Its template rejects channels in a text, and takes the reasoning separately."""
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
    ours = _made(tmp_path / "engine", _HARMONY, marks, special=is_special)
    answer = (
        "<|channel|>analysis<|message|>the thought<|end|><|start|>assistant"
        "<|channel|>final<|message|>the answer"
    )
    assert _streamed(ours, answer) == answer
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": answer}]
    text = ours.shown(Formatter(ours).format(turns, NEW_TURN))
    assert text == (
        "<|start|>user<|message|>x<|end|>"
        "<|start|>assistant<|channel|>final<|message|>the answer<|end|><|start|>assistant"
    )
    for cut in range(len(answer)):  # of an output that was stopped
        turns[1] = {"role": "assistant", "content": answer[:cut]}
        try:
            assert "thought" not in Formatter(ours).format(turns, NEW_TURN)
        except RequestError:
            pytest.fail(f"refused after {answer[:cut]!r}")

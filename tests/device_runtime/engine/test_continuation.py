"""Continued messages: transformers' apply_chat_template is the reference."""

from __future__ import annotations

import pytest
from chat_templates import CHATML, ITEMS, TEMPLATES
from conftest import write_tokenizer
from transformers import PreTrainedTokenizerFast

from edgellm.core.errors import RequestError
from edgellm.device_runtime.engine.chat_template import Formatter
from edgellm.device_runtime.text.tokenizer import ChatTokenizer

TEXTS = ["Sure", "Sure, ", "  Sure:\n", "{", "line\n\nline", "Sure </s> it", "```json\n", "", "é✓ "]


def _formatter(folder, template: str) -> Formatter:
    write_tokenizer(folder, 40)
    (folder / "chat_template.jinja").write_text(template)
    return Formatter(ChatTokenizer(folder))


def _turns(text, **more):
    user = {"role": "user", "content": "Name a fruit. "}
    earlier = [{"role": "assistant", "content": " Sure"}, user]
    return [user, *earlier, {"role": "assistant", "content": text, **more}]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_prompt_equals_transformers(tmp_path, name, text):
    formatter = _formatter(tmp_path, TEMPLATES[name])
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    expected = reference.apply_chat_template(
        _turns(text),
        chat_template=TEMPLATES[name],
        tokenize=False,
        continue_final_message=True,
        enable_thinking=False,
    )
    found = formatter.format(_turns(text))
    assert formatter.tokenizer.shown(found) == expected
    assert formatter.format(_turns(text), {"continue_final_message": True}) == found
    assert formatter.format(_turns([{"type": "text", "text": text}])) == found
    closed = formatter.format(_turns(text), {"continue_final_message": False})
    assert closed == formatter.format(_turns(text), {"add_generation_prompt": True})
    assert len(closed) > len(found)


def test_fields_of_vllm(tmp_path):
    formatter = _formatter(tmp_path, CHATML)
    turns = _turns("Sure")
    whole, start = formatter.format(turns).removesuffix("Sure"), "<|im_start|>assistant\n"
    assert whole.endswith(start)
    ended = f"{whole}Sure<|im_end|>\n"
    assert formatter.format(turns, {"add_generation_prompt": False}) == ended
    assert formatter.format(turns, {"continue_final_message": False}) == ended + start
    both = {"continue_final_message": True, "add_generation_prompt": False}
    assert formatter.format(turns, both) == f"{whole}Sure"
    neither = {"continue_final_message": None, "add_generation_prompt": None}
    assert formatter.format(turns, neither) == f"{whole}Sure"
    both = {"continue_final_message": False, "add_generation_prompt": False}
    assert formatter.format(turns, both) == ended
    asked = turns[:1]
    assert formatter.format(asked).endswith(start)
    assert formatter.format(asked, {"continue_final_message": True}).endswith("Name a fruit. ")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    with pytest.raises(RequestError, match="contradict each other"):
        formatter.format(turns, both)
    with pytest.raises(RequestError, match="is not True or False"):
        formatter.format(turns, {"continue_final_message": "content"})


def test_the_last_text_of_items_is_continued(tmp_path):
    formatter = _formatter(tmp_path, ITEMS)
    items = [{"type": "image"}, {"type": "text", "text": "It is a "}]
    assert formatter.format(_turns(items)).endswith("assistant:<image>It is a ")
    assert formatter.format(_turns("It is")).endswith("assistant:It is")
    with pytest.raises(RequestError, match="it ends with an item of type 'image'"):
        formatter.format(_turns(items[::-1]))


CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("template", "turn", "fault"),
    [
        (CHATML, {"content": "Sure", "tool_calls": [CALL]}, "it calls tools"),
        (CHATML, {"content": None, "tool_calls": [CALL]}, "it calls tools"),
        (CHATML, {"content": " \n"}, "it holds white space alone"),
        (CHATML, {"content": [{"type": "text", "text": "\t"}]}, "it holds white space alone"),
        ("{{ messages[0].content }}", {"content": "Sure"}, "changes it or drops it"),
        ("{{ messages[-1].content | upper }}", {"content": "Sure"}, "changes it or drops"),
        (TEMPLATES["Qwen3"], {"content": "a</think>b<think>"}, "changes it or drops it"),
        ("{{ raise_exception('user turns come last') }}", {"content": "a"}, "user turns come last"),
    ],
)
def test_messages_that_cannot_be_continued_are_rejected(tmp_path, template, turn, fault):
    formatter = _formatter(tmp_path, template)
    with pytest.raises(RequestError, match=fault) as caught:
        formatter.format([*_turns("x")[:-1], {"role": "assistant", **turn}])
    assert "\n" not in str(caught.value)


# As Qwen3-ASR's: messages of the assistant are left out
TRANSCRIBING = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ 'user:' + m.content + '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
)


def test_a_text_follows_the_beginning_of_an_answer_where_templates_drop_it(tmp_path):
    formatter = _formatter(tmp_path, TRANSCRIBING)
    reference = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    turns = _turns("language English ")
    begun = reference.apply_chat_template(
        turns[:-1], chat_template=TRANSCRIBING, tokenize=False, add_generation_prompt=True
    )
    assert formatter.tokenizer.shown(formatter.format(turns)) == begun + "language English "
    assert formatter.format(turns, {"add_generation_prompt": True}) == begun
    with pytest.raises(RequestError, match="changes it or drops it"):
        formatter.format(
            [*turns[:-1], {"role": "tool", "content": "w"}], {"continue_final_message": True}
        )


def test_reasoning_precedes_the_text(tmp_path):
    formatter = _formatter(tmp_path, TEMPLATES["Qwen3"])
    turns = _turns("A pear", reasoning_content="Hm.")
    assert formatter.format(turns).endswith("<think>\nHm.\n</think>\n\nA pear")
    assert formatter.format(_turns("", reasoning_content="Hm.")).endswith("Hm.\n</think>\n\n")

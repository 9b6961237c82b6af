"""Think, then guide: the form of an output begins after the model's reasoning."""

from __future__ import annotations

import pytest
from guided_texts import Guided

from edgellm.device_runtime.sampling.params import Channels, Guide, Thinking
from edgellm.device_runtime.text import reasoning_marks
from edgellm.tools.serve.tool_calls.formats.harmony import HarmonyParser
from edgellm.tools.serve.tool_calls.grammar import forced_calls

FORM = '{"a": 1}'
GUIDES = [
    Guide.of_schema({"properties": {"a": {"const": 1}}, "required": ["a"]}),
    Guide("regex", r'\{"a": \d\}'),
    Guide("choice", '["{\\"a\\": 1}", "no"]'),
    Guide("ebnf", 'root ::= "{" "\\"a\\": 1" "}"'),
    Guide("lark", 'start: "{" A "}"\nA: /"a": [0-9]/'),
]


@pytest.fixture(scope="module")
def guided(tmp_path_factory):
    return Guided(tmp_path_factory.mktemp("guided"))


def _thinking(guide, *, is_inside):
    thinking = Thinking(opening="<think>", closing="</think>", is_inside=is_inside)
    return Guide(guide.kind, guide.text, thinking=thinking)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda one: one.kind)
def test_the_form_begins_after_the_reasoning(guided, guide):
    reasoned = f'Hm: {{"b": 2}} </thin\n</think>\n\n{FORM}'
    inside, outside = (_thinking(guide, is_inside=value) for value in (True, False))
    assert guided.takes(inside, reasoned)
    assert guided.takes(outside, f"<think>{reasoned}")
    assert guided.takes(outside, FORM)
    for wrong in (FORM, "Hm.", "Hm.</think>", f"Hm.</think>{FORM}!", "Hm.</think>Well."):
        assert not guided.takes(inside, wrong), wrong
    for wrong in (reasoned, "Well.", f"<think>Hm.{FORM}", "<think>Hm.</think>Well."):
        assert not guided.takes(outside, wrong), wrong
    assert guided.takes(guide, FORM)
    assert not guided.takes(guide, f"<think>{reasoned}")


@pytest.mark.parametrize(
    ("prompt", "continues", "expected"),
    [
        ("user: <think>x</think>\nassistant:", False, False),
        ("assistant:\n<think>\n", False, True),
        ("assistant:\n<think>\n\n</think>\n\n", False, None),
        ("assistant:\n<think>\nWell,", True, True),
        ("assistant:\n<think>\nWell.</think>Yes", True, None),
        ("assistant: Yes", True, None),
    ],
)
def test_the_prompt_says_whether_the_model_reasons(prompt, continues, expected):
    form = reasoning_marks.find("<think></think>")
    assert reasoning_marks.opened(form, prompt, continues=continues) is expected


def test_an_opening_mark_of_a_token_and_text(tmp_path):
    """Gemma 4's."""
    form = reasoning_marks.find("'<|channel>thought\n' + text + '\n<channel|>'")
    assert form.shown == ("<|channel>", "<channel|>")
    for special in ((), form.shown):
        folder = tmp_path / str(len(special))
        folder.mkdir()
        guided = Guided(folder, special)
        thinking = Thinking(
            opening=form.opening,
            closing=form.closing,
            is_inside=False,
            ids=(*guided.ids.items(),),
        )
        guide = Guide(GUIDES[0].kind, GUIDES[0].text, thinking=thinking)
        assert guided.takes(guide, FORM)
        assert guided.takes(guide, f"<|channel>thought\nHm.\n<channel|>{FORM}")
        for wrong in (f"<|channel>Hm.<channel|>{FORM}", f"Hm.<channel|>{FORM}"):
            assert not guided.takes(guide, wrong), wrong


# ------------------------------------------------------------------------------- gpt-oss
FINAL, CALL = "<|channel|>final<|message|>", "<|channel|>commentary to=functions.f "
CALL += "<|constrain|>json<|message|>{}"
NOTES = [
    f"<|channel|>{name}<|message|>Hm: {{<|end|><|start|>assistant"
    for name in ("analysis", "commentary")
]


@pytest.fixture(scope="module", params=[(), reasoning_marks.CHANNEL_MARKS], ids=["text", "tokens"])
def channels(request, tmp_path_factory):
    return Guided(tmp_path_factory.mktemp("channels"), request.param)


@pytest.mark.parametrize("guide", GUIDES, ids=lambda one: one.kind)
def test_the_form_is_in_the_final_channel(channels, guide):
    own = Guide(guide.kind, guide.text, thinking=Channels(ids=(*channels.ids.items(),)))
    for right in (f"{FINAL}{FORM}", f"{NOTES[0]}{FINAL}{FORM}", f"{''.join(NOTES)}{FINAL}{FORM}"):
        assert channels.takes(own, right), right
        assert not channels.takes(own, f"{right}!"), right
    for wrong in (FORM, f"{NOTES[0]}{FORM}", f"{NOTES[0]}{FINAL}x", NOTES[0], CALL):
        assert not channels.takes(own, wrong), wrong
    parser = HarmonyParser({})
    found = [*parser.push(f"{NOTES[0]}{FINAL}{FORM}"), *parser.finish()]
    assert "".join(item for item in found if isinstance(item, str)) == FORM


def test_a_forced_call_of_gpt_oss_comes_after_its_reasoning(channels):
    for after_messages in (True, False):
        grammar = forced_calls(
            HarmonyParser.form,
            {"f": None},
            marks=channels.ids,
            several=False,
            after_messages=after_messages,
        )
        guide = Guide("lark_with_thinking", grammar)
        assert channels.takes(guide, CALL)
        assert channels.takes(guide, NOTES[0] + CALL) == after_messages
        assert not channels.takes(guide, f"{NOTES[0]}{FINAL}x")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|start|>user<|message|>x<|end|><|start|>assistant", True),
        ("<|start|>assistant<|channel|>final<|message|>Well", False),
        ("<|start|>user<|message|>assistant", False),
        ("", False),
    ],
)
def test_the_prompt_says_whether_a_message_of_gpt_oss_begins(prompt, expected):
    assert reasoning_marks.begins_message(prompt) == expected

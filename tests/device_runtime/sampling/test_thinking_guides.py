"""Think, then guide: the form of an output begins after the model's reasoning."""

from __future__ import annotations

import pytest
from guided_texts import Guided

from edgellm.device_runtime.sampling.params import Guide, Thinking
from edgellm.device_runtime.text import reasoning_marks

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

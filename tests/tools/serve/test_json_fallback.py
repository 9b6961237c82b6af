"""Calls as bare or fenced JSON, by any cut of the text, before the parser of a model's family."""

from __future__ import annotations

import json

import pytest
from answer_cuts import read_cut
from hypothesis import example, given
from hypothesis import strategies as st

from edgellm.tools.serve import tool_calls
from edgellm.tools.serve.tool_calls.formats.hermes import HermesParser
from edgellm.tools.serve.tool_calls.json_fallback import JsonFallbackParser
from edgellm.tools.serve.tool_calls.parser import Call

NAMES = {"weather", "add"}
WEATHER, ADD = Call("weather", '{"city": "Köln"}'), Call("add", '{"a": 1}')
W = '{"name": "weather", "arguments": {"city": "Köln"}}'
A = '{"name": "add", "parameters": {"a": 1}}'
OPENAI = '{"type": "function", "function": {"name": "add", "arguments": "{\\"a\\": 1}"}}'
CODE = "```python\nprint({})\n```\n"
CASES = {
    "": [],
    "no call at all": ["no call at all"],
    W: [WEATHER],
    f"\n {A}\n": [ADD],
    f"[{W}, {A}]": [WEATHER, ADD],
    f"{W}\n{A}": [WEATHER, ADD],
    json.dumps(json.loads(W), indent=2): [WEATHER],
    OPENAI: [ADD],
    f"```json\n{W}\n```": [WEATHER],
    f"```\n{A}\n```\n": [ADD],
    f"```json\n{W}": [WEATHER],  # the answer ended before the fence
    f"I look.\n```json\n{W}\n```\nWait.": ["I look.\n", WEATHER, "Wait."],
    f"```tool_call\n[{W}]\n```\n\n```json\n{A}\n```": [WEATHER, ADD],
    f"{CODE}then ```json\n{A}\n```": [f"{CODE}then ", ADD],
    f"<tool_call>{W}</tool_call>": [WEATHER],
    # No calls: other JSON, other names, other languages, incomplete.
    '{"answer": 5}': ['{"answer": 5}'],
    "{": ["{"],
    "[1] a source": ["[1] a source"],
    '[{"name": "add"}, 5]': ['[{"name": "add"}, 5]'],
    W.replace("weather", "unknown"): [W.replace("weather", "unknown")],
    W[:-4]: [W[:-4]],
    f"{W} is what I would write": [f"{W} is what I would write"],
    '{"name": "add", "arguments": 5}': ['{"name": "add", "arguments": 5}'],
    '{"name": ["add"], "arguments": {}}': ['{"name": ["add"], "arguments": {}}'],
    "```json\n{}\n```": ["```json\n{}\n```"],
    "```jsonc\n": ["```jsonc\n"],
    CODE: [CODE],
    f"```python\n# {W}\n```": [f"```python\n# {W}\n```"],
    "a ``` b `` c ` d``": ["a ``` b `` c ` d``"],
}


@pytest.mark.parametrize(("text", "expected"), CASES.items())
@given(cuts=st.sets(st.integers(0, 150), max_size=8))
@example(cuts=set(range(150)))
def test_json_calls_are_parsed_wherever_the_stream_is_cut(text, expected, cuts):
    assert read_cut(JsonFallbackParser(HermesParser(NAMES), NAMES), text, cuts) == expected


@given(st.text('`json{}[]":name add;\nTOLCS</tool_call>', max_size=60))
def test_no_text_is_lost_or_breaks_a_parser(text):
    for kind in tool_calls.PARSERS:
        parser = JsonFallbackParser(kind(NAMES), NAMES)
        found = [*parser.push(text), *parser.finish()]
        if all(isinstance(item, str) for item in found):
            assert "".join(found) == text or text.isspace()


def test_text_is_not_held_longer_than_it_must_be():
    parser = JsonFallbackParser(HermesParser(NAMES), NAMES)
    assert parser.push("Hello `") == ["Hello "]
    assert "".join(parser.push("x` ```python\n")) == "`x` ```python\n"

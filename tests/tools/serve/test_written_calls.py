"""Calls with the slips that models make; the tests of vLLM and llama.cpp have the same kinds."""

from __future__ import annotations

import ast
import json

import pytest
from answer_cuts import read_cut, require_read
from hypothesis import assume, given
from hypothesis import strategies as st

from edgellm.tools.serve import tool_calls
from edgellm.tools.serve.tool_calls.formats.gemma4 import Gemma4Parser
from edgellm.tools.serve.tool_calls.formats.lfm2 import Lfm2Parser
from edgellm.tools.serve.tool_calls.formats.qwen3_coder import Qwen3CoderParser
from edgellm.tools.serve.tool_calls.parser import Call

TOOLS = {
    "run": {"properties": {"command": {"type": "string"}}},
    "cook.order": None,
    "measure": {"properties": {"width": {"type": "float"}, "count": {"type": ["int", "null"]}}},
}


def _read(kind, text):
    """What a parser returns for a text, which may be cut anywhere; calls as names and arguments."""
    items = read_cut(tool_calls.reader(kind, TOOLS), text, ())
    require_read(lambda: tool_calls.reader(kind, TOOLS), text, items)
    return [(it.name, json.loads(it.arguments)) if isinstance(it, Call) else it for it in items]


def _lfm2(calls, after=""):
    return _read(Lfm2Parser, f"<|tool_call_start|>{calls}<|tool_call_end|>{after}")


@pytest.mark.parametrize(
    ("written", "command"),
    [
        ("'awk '{print $1}' data.txt'", "awk '{print $1}' data.txt"),
        ("'cat <<EOF\nx = [1]\nEOF'", "cat <<EOF\nx = [1]\nEOF"),
        ("'python -c \"print(f(a, sep='\\;'))\"'", "python -c \"print(f(a, sep='\\;'))\""),
        ("'grep \"]\" a.log'", 'grep "]" a.log'),
        (r"'it\'s \"here\"'", 'it\'s "here"'),
        ("'a\x00b'", "a\x00b"),
        (r"'C:\users\Nils'", r"C:\users\Nils"),
        (r"'tab\there \d'", "tab\there \\d"),
        ('"echo "a", then "b""', 'echo "a", then "b"'),
    ],
)
def test_strings_that_python_does_not_parse_are_mended(written, command):
    expected = ("run", {"command": command})
    assert _lfm2(f"[run(command={written})]") == [expected]
    assert _lfm2(f"[run(command={written}), run(command='ls')]") == [
        expected,
        ("run", {"command": "ls"}),
    ]


@given(st.text("ab'\"\n $;|/.\0é", max_size=30))
def test_a_command_in_quotes_is_read_back(command):
    source = f"run(command='{command}')"
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        assert _lfm2(f"[{source}]") == [("run", {"command": command})]
    else:
        assume(False)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ("[cook.order(tags={'hot', 'new'})]", [("cook.order", {"tags": ["hot", "new"]})]),
        ("[cook.order(month=07, day=010)]", [("cook.order", {"month": 7, "day": 10})]),
        ("[cook.order(rate=0.07, id='007')]", [("cook.order", {"rate": 0.07, "id": "007"})]),
        ("[cook.order(x=-4.5, y=1e3)]", [("cook.order", {"x": -4.5, "y": 1000.0})]),
        ("[cook.order(a={}, b=[], c=None)]", [("cook.order", {"a": {}, "b": [], "c": None})]),
        (" [cook.order()]", [("cook.order", {})]),
        ("[]", []),
        ("[ ]", []),
        ("[cook.order(), run(command=b'x')]", [("cook.order", {}), "run(command=b'x')"]),
        ("[cook.order(), unknown(a=1)]", [("cook.order", {}), "unknown(a=1)"]),
        (
            '[{"name": "cook.order", "arguments": {"n": 1}}]',
            [("cook.order", {"n": 1})],
        ),
    ],
)
def test_values_of_python_become_json(calls, expected):
    assert _lfm2(calls) == expected


def test_what_is_no_list_of_calls_stays_text():
    for calls in ("[run(command='a]", "[run(command=oops)]", "[run(*'a')]", "[1, 2]", "run"):
        assert _lfm2(calls) == [f"<|tool_call_start|>{calls}<|tool_call_end|>"]


def test_the_echo_of_a_list_of_calls_is_dropped():
    calls = "[cook.order(items=[{'name': 'apple'}, {'name': 'bread'}])]"
    expected = ("cook.order", {"items": [{"name": "apple"}, {"name": "bread"}]})
    assert _lfm2(calls, f"{calls}<|tool_call_end|>") == [expected]
    assert _lfm2(calls, f"\n{calls}<|tool_call_end|>Done.") == [expected, "Done."]
    assert _lfm2(calls, "\nDone.") == [expected, "Done."]
    assert _lfm2(calls, "[cook") == [expected, "[cook"]
    again = f"<|tool_call_start|>{calls}<|tool_call_end|>"
    assert _lfm2(calls, again) == [expected, expected]  # a second call has both tags


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        ("x:108.,y:22.8,top:.5,low:-1e3", {"x": 108.0, "y": 22.8, "top": 0.5, "low": -1000.0}),
        ("a:true,b:false,c:null,d:", {"a": True, "b": False, "c": None, "d": ""}),
        ('m:{<|"|>3<|"|>:{x:<|"|>new, text<|"|>}}', {"m": {"3": {"x": "new, text"}}}),
        ('l:[[<|"|>a]b<|"|>],<|"|>}<|"|>]', {"l": [["a]b"], "}"]}),
        ('a:<|"|><p class="x">\n<tool_call|></p><|"|>', {"a": '<p class="x">\n<tool_call|></p>'}),
    ],
)
def test_arguments_of_gemma_4(arguments, expected):
    text = f"I look.\n<|tool_call>call:cook.order{{{arguments}}}<tool_call|><br>"
    assert _read(Gemma4Parser, text) == ["I look.\n", ("cook.order", expected), "<br>"]


def test_calls_of_qwen_without_all_of_their_tags():
    values = "<parameter=width>\n3.5\n</parameter>\n<parameter=count>\n4\n</parameter>\n"
    call = ("measure", {"width": 3.5, "count": 4})
    function = f"<function=measure>\n{values}</function>"
    whole = f"<tool_call>\n{function}\n</tool_call>"
    assert _read(Qwen3CoderParser, f"So:\n{whole}\n{whole}") == ["So:\n", call, call]
    assert _read(Qwen3CoderParser, function) == [call]
    assert _read(Qwen3CoderParser, f"{function}\n{function}") == [call, call]
    assert _read(Qwen3CoderParser, f"So:\n\n{function}\n</tool_call>") == ["So:\n\n", call]
    assert _read(Qwen3CoderParser, f"{function}\n</tool_call>\nDone") == [call, "Done"]
    assert _read(Qwen3CoderParser, f"{function}\n</tool") == [call, "</tool"]
    unclosed = whole.replace("3.5\n</parameter>", "3.5")
    assert _read(Qwen3CoderParser, unclosed) == [call]
    broken = "<tool_call>\n<function=measure\n</function>\n</tool_call>"
    assert _read(Qwen3CoderParser, broken) == [broken]
    assert _read(Qwen3CoderParser, f"{broken}\n{whole}")[-1] == call

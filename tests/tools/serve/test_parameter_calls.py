"""Calls whose arguments stand one by one: typed by the schema, guided in the model's own form."""

from __future__ import annotations

import json
from itertools import pairwise

import anthropic
import openai
import pytest
from answer_cuts import joined
from guided_texts import Guided
from hypothesis import given
from hypothesis import strategies as st
from lettered_engine import with_letters
from serve_process import serving

from edgellm.device_runtime.sampling.params import Guide
from edgellm.tools.serve import tool_calls
from edgellm.tools.serve.tool_calls.formats.glm45 import Glm45Parser
from edgellm.tools.serve.tool_calls.formats.qwen3_coder import Qwen3CoderParser
from edgellm.tools.serve.tool_calls.grammar import forced_calls
from edgellm.tools.serve.tool_calls.parameter_rules import parameter_rules
from edgellm.tools.serve.tool_calls.parser import CallPart
from edgellm.tools.serve.tool_calls.typed_values import value_of

FORMS = {"qwen": Qwen3CoderParser, "glm": Glm45Parser}
ROOT = {"$defs": {"Unit": {"enum": ["C", "F"]}, "Loop": {"$ref": "#/$defs/Loop"}}}
INTEGER, NULL, TEXT = {"type": "integer"}, {"type": "null"}, {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (TEXT, "5", "5"),
        (TEXT, " null ", " null "),
        (INTEGER, " 5 ", 5),
        (INTEGER, "5.0", 5),
        (INTEGER, "5.5", "5.5"),
        (INTEGER, "five", "five"),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "-1.5e3", -1500.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        ({"anyOf": [TEXT, NULL]}, "None", None),
        ({"anyOf": [TEXT, NULL]}, "5", "5"),
        ({"anyOf": [TEXT, INTEGER]}, "5", "5"),
        ({"anyOf": [INTEGER, TEXT]}, "5", 5),
        ({"type": ["integer", "null"]}, "null", None),
        ({"$ref": "#/$defs/Unit"}, "C", "C"),
        ({"$ref": "#/$defs/Loop"}, "C", "C"),
        ({"$ref": "#/$defs/None"}, "C", "C"),
        ({"enum": [1, "1"]}, "1", 1),
        ({"const": True}, "true", True),
        (None, "5", "5"),
        ({}, "[5]", "[5]"),
        (True, "5", "5"),
    ],
)
def test_values_have_the_type_of_their_schema(schema, text, value):
    found = value_of(text, schema, ROOT)
    assert (type(found), found) == (type(value), value)


def _written(kind, name, arguments):
    """A call as the family's chat template writes it."""
    form = kind.form.parameters
    pairs = [
        form.opening.replace("KEY", key)
        + (value if isinstance(value, str) else json.dumps(value))
        + form.closing
        + form.between
        for key, value in arguments.items()
    ]
    return form.before.replace("NAME", name) + "".join(pairs) + form.after


@pytest.fixture(scope="module")
def guided(tmp_path_factory):
    return Guided(tmp_path_factory.mktemp("guided"))


PIECES = st.sampled_from(['"', "\n", "</b>", "</parameter> x", "<", "5", "null", "é", "{", "\\"])
VALUES = {
    "text": (TEXT, st.lists(PIECES, max_size=6).map("".join)),
    "count": (INTEGER, st.integers(-9, 9999)),
    "unit": ({"enum": ["C", "F"]}, st.sampled_from("CF")),
    "on": ({"type": "boolean"}, st.booleans()),
    "many": (
        {"type": "array", "items": {"type": "object", "properties": {"a": TEXT}}},
        st.lists(st.fixed_dictionaries({"a": st.text('a"\n<}', max_size=3)}), max_size=2),
    ),
    "maybe": ({"anyOf": [INTEGER, NULL]}, st.none() | st.integers(0, 9)),
}


@pytest.mark.parametrize("family", FORMS)
@given(st.data())
def test_what_templates_write_is_let_through_and_read_back(guided, family, data):
    names = data.draw(st.permutations([*VALUES]))[: data.draw(st.integers(0, 4))]
    required = [name for name in names if data.draw(st.booleans())]
    properties = {name: VALUES[name][0] for name in names}
    schema = {"type": "object", "properties": properties, "required": required}
    given_names = [n for n in names if n in required or data.draw(st.booleans())]
    arguments = {name: data.draw(VALUES[name][1]) for name in given_names}
    kind = FORMS[family]
    text = _written(kind, "f", arguments)
    grammar = forced_calls(kind.form, {"f": schema}, marks={}, several=False)
    assert guided.takes(Guide("lark", grammar), text)
    reader = tool_calls.reader(kind, {"f": schema})
    places = [0, *sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=9))), len(text)]
    items = [item for at in pairwise(places) for item in reader.push(text[slice(*at)])]
    (call,) = joined([*items, *reader.finish()])
    assert (call.name, json.loads(call.arguments)) == ("f", arguments)


WRONG = [
    {"unit": "K", "count": 1},
    {"unit": "C"},
    {"unit": "C", "count": "one"},
    {"unit": "C", "count": 1, "more": "x"},
]


@pytest.mark.parametrize("family", FORMS)
@pytest.mark.parametrize("arguments", WRONG)
def test_arguments_that_break_the_schema_are_not_let_through(guided, family, arguments):
    kind, properties = FORMS[family], {name: VALUES[name][0] for name in ("unit", "count")}
    schema = {"type": "object", "properties": properties, "required": ["unit", "count"]}
    grammar = forced_calls(kind.form, {"f": schema}, marks={}, several=False)
    assert not guided.takes(Guide("lark", grammar), _written(kind, "f", arguments))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "pattern": "^x+$"}}},
        {"properties": {"a": {"type": "string", "maxLength": 3}}},
        {"properties": {"a": {"anyOf": [{"enum": ["x"]}, INTEGER]}}},
        {"properties": {"a": {"enum": ["x\n</parameter>"]}}},
        {"properties": {"a": {"anyOf": [TEXT, {"type": "null"}], "not": {"const": "x"}}}},
        {"properties": {"a>": TEXT}},
        {"properties": {"a": TEXT}, "additionalProperties": INTEGER},
        {"properties": {"a": TEXT}, "minProperties": 1},
        {"properties": {"a": TEXT}, "required": ["b"]},
        {"anyOf": [{"properties": {"a": TEXT}}]},
    ],
)
def test_schemas_that_text_cannot_keep_are_guided_as_json(schema):
    form = Qwen3CoderParser.form
    assert parameter_rules(form.parameters, "r", {"type": "object", **schema}, {}) is None


def test_a_pattern_is_kept_in_json(guided):
    schema = {"properties": {"a": {"type": "string", "pattern": "^x+$"}}, "required": ["a"]}
    form = Qwen3CoderParser.form
    guide = Guide("lark", forced_calls(form, {"f": schema}, marks={}, several=False))
    whole = form.before.replace("NAME", "f") + '{"a": "%s"}' + form.after
    assert guided.takes(guide, whole % "xx")
    assert not guided.takes(guide, whole % "y")


def test_arguments_grow_while_they_are_written():
    schema = {"properties": {"n": INTEGER, "text": TEXT}}
    text = _written(Qwen3CoderParser, "f", {"n": 5, "text": "a line\nand </b> more"})
    reader = tool_calls.reader(Qwen3CoderParser, {"f": schema})
    items = [item for letter in text for item in reader.push(letter)]
    parts = [item.arguments for item in items if isinstance(item, CallPart)]
    assert parts[:3] == ['{"n": ', "5", ', "text": "a']
    assert len(parts) > 15
    assert "".join(parts) == items[-1].arguments


# As Qwen3.5's, but that it does not show the tools: a letter is a token here.
TAGGED = (
    "{%- if tools %}<tool_call><function=name><parameter=key>{%- endif %}"
    "{%- for m in messages %} {{ m.role }}: {{ m.content }}{%- endfor %}"
)
TURNS = [{"role": "user", "content": "Hi"}]
SHORT = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Oslo"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
}
ASK = {"model": "tiny", "max_tokens": 300}
ONE = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def server(roomy_engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tagged") / "engine"
    engine = with_letters(roomy_engine, folder, chat_template=TAGGED)
    with serving(engine, "--modelName", "tiny") as process:
        yield process


def _chat(client):
    tool = {"type": "function", "function": {"name": "f", "parameters": SHORT}}
    ask = {**ASK, "messages": TURNS, "tools": [tool], "tool_choice": ONE, "temperature": 0}
    whole = client.chat.completions.create(**ask).choices[0].message.tool_calls
    chunks = list(client.chat.completions.create(**ask, stream=True))
    deltas = [call for one in chunks for call in one.choices[0].delta.tool_calls or ()]
    assert {call.index for call in deltas} == {*range(len(whole))}
    assert [bool(call.id) for call in deltas].count(True) == len(whole)
    texts = [(call.index, call.function.arguments) for call in deltas]
    written = ["".join(text for at, text in texts if at == index) for index in range(len(whole))]
    return [call.function.arguments for call in whole], written, len(deltas)


def _responses(client):
    tool = {"type": "function", "name": "f", "parameters": SHORT}
    ask = {"model": "tiny", "max_output_tokens": 300, "input": "Hi", "temperature": 0}
    ask |= {"tools": [tool], "tool_choice": {"type": "function", "name": "f"}}
    whole = [one.arguments for one in client.responses.create(**ask).output]
    events = list(client.responses.create(**ask, stream=True))
    deltas = [e for e in events if e.type == "response.function_call_arguments.delta"]
    written = ["".join(e.delta for e in deltas if e.output_index == at) for at in range(len(whole))]
    assert [one.arguments for one in events[-1].response.output] == whole
    return whole, written, len(deltas)


def _messages(client):
    tool = {"name": "f", "input_schema": SHORT}
    ask = {**ASK, "messages": TURNS, "tools": [tool], "tool_choice": {"type": "tool", "name": "f"}}
    ask |= {"extra_body": {"temperature": 0}}
    whole = [one.input for one in client.messages.create(**ask).content]
    with client.messages.stream(**ask) as stream:
        events = list(stream)
        assert [one.input for one in stream.get_final_message().content] == whole
    deltas = [e for e in events if e.type == "input_json"]
    written = [e.content_block.input for e in events if e.type == "content_block_stop"]
    return [*map(json.dumps, whole)], [*map(json.dumps, written)], len(deltas)


@pytest.mark.parametrize("protocol", [_chat, _responses, _messages])
def test_clients_join_the_arguments_of_a_stream(server, protocol):
    if protocol is _messages:
        client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    else:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    whole, written, deltas = protocol(client)
    assert whole
    assert written == whole
    assert all(json.loads(arguments)["city"] in ("Bonn", "Oslo") for arguments in whole)
    assert deltas > 4

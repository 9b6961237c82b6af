"""Calls whose arguments stand one by one: typed by the schema, guided in the model's own form."""

from __future__ import annotations

import json

import pytest
from guided_texts import Guided
from hypothesis import given
from hypothesis import strategies as st

from edgellm.device_runtime.sampling.params import Guide
from edgellm.tools.serve import tool_calls
from edgellm.tools.serve.tool_calls.formats.glm45 import Glm45Parser
from edgellm.tools.serve.tool_calls.formats.qwen3_coder import Qwen3CoderParser
from edgellm.tools.serve.tool_calls.grammar import forced_calls
from edgellm.tools.serve.tool_calls.parameter_rules import parameter_rules
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
    (call,) = [*reader.push(text), *reader.finish()]
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

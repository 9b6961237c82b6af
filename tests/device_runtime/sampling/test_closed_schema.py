"""Objects have only declared keys: jsonschema_rs and pydantic are the references."""

from __future__ import annotations

import json
from enum import Enum
from itertools import permutations
from typing import Annotated, Any, Literal

import jsonschema_rs
import pytest
from guided_texts import Guided
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from edgellm.core.errors import RequestError
from edgellm.device_runtime.sampling.closed_schema import closed
from edgellm.device_runtime.sampling.guidance import Guide

WHOLE = {"type": "integer", "minimum": 0, "maximum": 9}
A = {"type": "object", "properties": {"a": WHOLE}, "required": ["a"]}
B = {"type": "object", "properties": {"b": WHOLE}, "required": ["b"]}
OPEN_A = {"type": "object", "properties": {"a": WHOLE}}
EMPTY = {"type": "object"}


@pytest.fixture(scope="module")
def guided(tmp_path_factory) -> Guided:
    return Guided(tmp_path_factory.mktemp("bytes"))


# Schemas; outputs that must be possible; outputs with invented keys, which the schema allows.
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "top": (A, [{"a": 1}], [{"a": 1, "x": 1}]),
    "no type": ({"properties": {"a": WHOLE}}, [{"a": 1}, {}, 5], [{"x": 1}]),
    "null or object": ({**A, "type": ["object", "null"]}, [None, {"a": 1}], [{"a": 1, "x": 1}]),
    "nested": (
        {"type": "object", "properties": {"in": A}},
        [{"in": {"a": 1}}, {}],
        [{"in": {"a": 1, "x": 1}}, {"x": 1}],
    ),
    "items": ({"type": "array", "items": A}, [[{"a": 1}]], [[{"a": 1, "x": 1}]]),
    "prefix": (
        {"type": "array", "prefixItems": [A], "items": B, "minItems": 2},
        [[{"a": 1}, {"b": 1}]],
        [[{"a": 1, "x": 1}, {"b": 1}]],
    ),
    "values": (
        {"type": "object", "additionalProperties": A},
        [{"k": {"a": 1}}, {}],
        [{"k": {"a": 1, "x": 1}}],
    ),
    "definitions": ({"$ref": "#/$defs/A", "$defs": {"A": A}}, [{"a": 1}], [{"a": 1, "x": 1}]),
    "elsewhere": (
        {"$ref": "#/components/A~1", "components": {"A/": A}},
        [{"a": 1}],
        [{"a": 1, "x": 1}],
    ),
    "anchor": (
        {"$ref": "#A", "$defs": {"A": {"$anchor": "A", **A}}},
        [{"a": 1}],
        [{"a": 1, "x": 1}],
    ),
    "anchor with siblings": (
        {"$ref": "#A", **B, "$defs": {"A": {"$anchor": "A", **A}}},
        [{"b": 1, "a": 1}],
        [{"b": 1, "a": 1, "x": 1}],
    ),
    "recursive": (
        {"properties": {"next": {"$ref": "#"}}, "type": "object"},
        [{}, {"next": {"next": {}}}],
        [{"next": {"x": 1}}],
    ),
    "any": ({"anyOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"a": 1, "b": 1}, {"a": 1, "x": 1}]),
    "optional": (
        {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "$defs": {"A": A}},
        [{"a": 1}, None],
        [{"a": 1, "x": 1}],
    ),
    "one": ({"oneOf": [A, B]}, [{"a": 1}, {"b": 1}], [{"a": 1, "x": 1}]),
    "all": ({"allOf": [A, B]}, [{"a": 1, "b": 1}], [{"a": 1, "b": 1, "x": 1}]),
    "one of all": (
        {
            "allOf": [{"$ref": "#/$defs/A"}],
            "description": "as pydantic 1 writes it",
            "$defs": {"A": A},
        },
        [{"a": 1}],
        [{"a": 1, "x": 1}],
    ),
    "all by reference": (
        {"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}},
        [{"a": 1, "b": 1}],
        [{"a": 1, "b": 1, "x": 1}],
    ),
    "all and own": ({"allOf": [A], **B}, [{"b": 1, "a": 1}], [{"b": 1, "a": 1, "x": 1}]),
    "all in all": (
        {
            "allOf": [{"allOf": [A, {"$ref": "#/$defs/B"}]}, {"properties": {"c": WHOLE}}],
            "$defs": {"B": B},
        },
        [{"a": 1, "b": 1, "c": 1}],
        [{"a": 1, "b": 1, "x": 1}],
    ),
    "base and heir": (
        {
            "$ref": "#/$defs/Heir",
            "$defs": {"Base": A, "Heir": {"allOf": [{"$ref": "#/$defs/Base"}, B]}},
        },
        [{"a": 1, "b": 1}],
        [{"a": 1, "b": 1, "x": 1}],
    ),
    "reference with siblings": (
        {"$ref": "#/$defs/A", **B, "$defs": {"A": A}},
        [{"b": 1, "a": 1}],
        [{"b": 1, "a": 1, "x": 1}],
    ),
    "any with siblings": (
        {**OPEN_A, "anyOf": [B, {"properties": {"c": WHOLE}}]},
        [{"a": 1, "b": 1}, {"a": 1, "c": 1}, {}],
        [{"a": 1, "x": 1}],
    ),
    "any by reference with siblings": (
        {
            **OPEN_A,
            "anyOf": [{"$ref": "#/$defs/B"}, {"$ref": "#/$defs/C"}],
            "$defs": {"B": B, "C": {"properties": {"c": WHOLE}}},
        },
        [{"a": 1, "b": 1}, {"a": 1, "c": 1}],
        [{"a": 1, "x": 1}],
    ),
    "any that requires": (
        {
            "type": "object",
            "properties": {"a": WHOLE, "b": WHOLE},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
        [{"a": 1, "x": 1}],
    ),
    "any and one": (
        {**OPEN_A, "anyOf": [B], "oneOf": [{"properties": {"c": WHOLE}}]},
        [{"a": 1, "b": 1, "c": 1}],
        [{"b": 1, "x": 1}],
    ),
    "any in all": (
        {"allOf": [{"anyOf": [A, B]}, {"properties": {"c": WHOLE}}]},
        [{"a": 1, "c": 1}, {"b": 1}],
        [{"a": 1, "x": 1}],
    ),
    "required and not declared": (
        {**OPEN_A, "required": ["z"]},
        [{"a": 1, "z": [True]}, {"z": 1}],
        [{"z": 1, "x": 1}],
    ),
}
# Unchanged schemas.
OPEN: dict[str, tuple[Any, list[Any]]] = {
    "any JSON": (True, [1, {"x": 1}]),
    "any object": (EMPTY, [{}, {"x": {"y": 1}}]),
    "any object inside": ({"properties": {"a": EMPTY}}, [{"a": {"x": 1}}]),
    "explicit": ({**A, "additionalProperties": True}, [{"a": 1, "x": 1}]),
    "explicit by a schema": ({**A, "additionalProperties": B}, [{"a": 1, "x": {"b": 1}}]),
    "explicit by patterns": ({**A, "patternProperties": {"^x": WHOLE}}, [{"a": 1, "x1": 1}]),
    "explicit in a part": (
        {"allOf": [A, {**B, "additionalProperties": True}]},
        [{"a": 1, "b": 1, "x": 1}],
    ),
    "explicit by the base": (
        {**OPEN_A, "additionalProperties": True, "anyOf": [B, EMPTY]},
        [{"a": 1, "b": 1, "x": 1}],
    ),
    "more are required": ({**A, "minProperties": 2}, [{"a": 1, "x": 1}]),
    "required alone": ({**EMPTY, "required": ["a"]}, [{"a": 1}]),
    "data": ({"enum": [{"properties": {"a": 1}}]}, [{"properties": {"a": 1}}]),
    "a property of that name": ({"properties": {"properties": EMPTY}}, [{"properties": {"x": 1}}]),
}


def _takes_in_any_order(guided: Guided, guide: Guide, value: Any) -> bool:
    if not isinstance(value, dict):
        return guided.takes(guide, json.dumps(value))
    texts = (json.dumps(dict(order)) for order in permutations(value.items()))
    return any(guided.takes(guide, text) for text in texts)


@pytest.mark.parametrize("name", CASES)
def test_objects_are_closed(guided, name):
    schema, possible, invented = CASES[name]
    validator, guide = jsonschema_rs.validator_for(schema), Guide.of_schema(schema)
    for value in possible:
        assert validator.is_valid(value)
        assert _takes_in_any_order(guided, guide, value), value
    for value in invented:
        assert validator.is_valid(value)
        assert not _takes_in_any_order(guided, guide, value), value
    for seed in range(5 if name != "values" else 0):  # names may be as long as they like
        answer = guided.answer(guide, seed)
        assert answer is not None, "a random answer comes to an end"
        assert validator.is_valid(json.loads(answer)), answer


@pytest.mark.parametrize("name", OPEN)
def test_explicit_additional_properties_are_kept(guided, name):
    schema, possible = OPEN[name]
    validator = jsonschema_rs.validator_for(schema)
    for value in possible:
        assert validator.is_valid(value)
        assert guided.takes(Guide.of_schema(schema), json.dumps(value)), value


def test_the_schema_itself_is_not_changed():
    schema = {"allOf": [A, {"$ref": "#/$defs/B"}], "$defs": {"B": B}}
    before = json.dumps(schema)
    assert closed(schema) != schema
    assert json.dumps(schema) == before
    for value in (True, None, 5, [], "x", {"properties": 5, "allOf": 7, "$ref": 5, "required": 3}):
        closed(value)  # llguidance rejects faulty schemas


class Colour(Enum):
    RED, GREEN = "red", "green"


class Part(BaseModel):
    name: Literal["wheel", "door"]
    colour: Colour | None = None


class Special(Part):
    price: int = Field(ge=0, le=99)
    inner: list[Part] = Field(default_factory=list, max_length=1)


class Order(BaseModel):
    """As written by instructor and users of Ollama."""

    part: Part | Special
    more: dict[str, int] = Field(default_factory=dict)
    notes: list[Literal["x", "yy"]] = Field(min_length=1, max_length=2)
    next: Order | None = None


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Literal[7, 9] = 9


class Dog(BaseModel):
    kind: Literal["dog", "puppy"] = "dog"  # pydantic requires the tag of a union all the same
    barks: bool = True


class Pets(BaseModel):
    """A discriminated union, which pydantic writes as oneOf."""

    first: Cat | Dog = Field(discriminator="kind")
    other: list[Annotated[Cat | Dog, Field(discriminator="kind")]] = Field(max_length=2)


@pytest.mark.parametrize("kind", [Part, Special, Order, Pets])
def test_pydantic_models_get_only_their_fields(guided, kind):
    guide = Guide.of_schema(kind.model_json_schema())
    for seed in range(20):
        answer = guided.answer(guide, seed, longest=2000)
        if answer is None and kind is Order:
            continue  # orders in orders, without an end
        assert answer is not None
        kind.model_validate_json(answer, strict=True)
        assert jsonschema_rs.is_valid(kind.model_json_schema(), json.loads(answer)), answer
        assert set(json.loads(answer)) <= set(kind.model_fields)


def test_disjoint_union_parts_are_allowed(guided):
    """By different values of a required property; otherwise llguidance rejects the schema."""
    cat = {"properties": {"kind": {"const": "cat"}, "a": WHOLE}, "required": ["kind"]}
    dog = {"properties": {"kind": {"enum": ["dog", 5]}}, "required": ["kind"]}
    schema = {"type": "object", "oneOf": [cat, {"$ref": "#/$defs/Dog"}], "$defs": {"Dog": dog}}
    guide, validator = Guide.of_schema(schema), jsonschema_rs.validator_for(schema)
    for value in ({"kind": "cat", "a": 1}, {"kind": "dog"}, {"kind": 5}):
        assert validator.is_valid(value)
        assert guided.takes(guide, json.dumps(value)), value
    for value in ({"kind": "dog", "a": 1}, {"kind": "cat", "x": 1}, {}):
        assert not guided.takes(guide, json.dumps(value)), value
    for parts in ([cat, cat], [OPEN_A, {"properties": {"b": WHOLE}}]):
        with pytest.raises(RequestError, match="oneOf constraints are not supported"):
            guided.guidance.start(Guide.of_schema({"oneOf": parts}))
    for parts in ([], [5], [{"required": 5}], [{"required": [[]], "properties": 3}], [{"$ref": 5}]):
        closed({"oneOf": parts, "discriminator": 5})  # llguidance rejects faulty ones


NAMES = st.sampled_from("abc")
OBJECTS = st.fixed_dictionaries(
    {},
    optional={
        "properties": st.dictionaries(NAMES, st.just(WHOLE), max_size=2),
        "required": st.lists(NAMES, max_size=1),
        "$ref": st.sampled_from(["#/$defs/A", "#/$defs/B"]),
    },
)
SCHEMAS = st.recursive(
    OBJECTS,
    lambda inner: st.builds(
        lambda own, kind, parts: {**own, kind: parts},
        OBJECTS,
        st.sampled_from(["allOf", "anyOf"]),
        st.lists(inner, min_size=1, max_size=2),
    ),
    max_leaves=4,
)


@settings(max_examples=60)
@given(SCHEMAS)
def test_closed_schemas_are_stricter_and_satisfiable(guided, schema):
    """Every output is valid by the schema; declared and required properties are possible."""
    schema = {"type": "object", **schema, "$defs": {"A": A, "B": OPEN_A}}
    validator, guide = jsonschema_rs.validator_for(schema), Guide.of_schema(schema)
    everything = {"a": 1, "b": 2, "c": 3}
    values = [{n: everything[n] for n in names} for names in ("", "a", "b", "c", "ab", "abc")]
    accepted = [value for value in values if _takes_in_any_order(guided, guide, value)]
    assert all(validator.is_valid(value) for value in accepted)
    declared = [value for value in values if validator.is_valid(value)]
    assert bool(accepted) >= bool(declared and "properties" in json.dumps(schema))
    answer = guided.answer(guide, 0)
    assert answer is None or validator.is_valid(json.loads(answer))


def test_huge_and_deep_schemas_are_rejected():
    deep: Any = {}
    for _ in range(100_000):
        deep = {"allOf": [deep]}
    with pytest.raises(RequestError, match="nested too deeply"):
        closed(deep)
    names = {f"name{at}": True for at in range(5_000)}
    wide = {"properties": names, "anyOf": [{} for _ in range(5_000)]}
    with pytest.raises(RequestError, match="too many properties in too many alternatives"):
        closed(wide)
    assert closed({**wide, "additionalProperties": False})
    assert len(closed({"properties": names})["properties"]) == len(names)

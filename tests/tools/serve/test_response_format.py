"""Structured output over HTTP with draft trees; the model alone would never match it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import openai
import pytest
from lettered_engine import with_letters
from serve_process import serving

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "Hi"}]
TREES = ("--eagle", "--eagleTree", "fixed", "--eagleDraftTopK", 4, "--eagleVerifyTreeSize", 12)


@pytest.fixture(scope="module")
def client(eagle_pair, tmp_path_factory) -> Iterator[openai.OpenAI]:
    engine = with_letters(eagle_pair.engine, tmp_path_factory.mktemp("serve") / "engine")
    with serving(engine, *TREES, "--modelName", "tiny") as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def _ask(client, **options) -> str:
    found = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=40, temperature=2, **options
    )
    assert found.choices[0].finish_reason == "stop"
    return found.choices[0].message.content


@pytest.mark.parametrize("seed", range(3))
def test_a_schema_and_an_expression(client, seed):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    assert set(json.loads(_ask(client, response_format=form, seed=seed))) == {"a"}
    form = {"type": "regex", "regex": "[a-c]{3,5}#"}
    assert re.fullmatch("[a-c]{3,5}#", _ask(client, response_format=form, seed=seed))


def test_biases_and_penalties(client):
    """A token with bias 100 is sampled, unless a penalty prevents it."""
    letter = 4 + ord("k") - 34
    form = {"type": "regex", "regex": "[k-z]{4}"}
    assert _ask(client, response_format=form, logit_bias={str(letter): 100}) == "kkkk"
    found = _ask(
        client,
        response_format=form,
        logit_bias={str(letter): 3},
        presence_penalty=2,
        frequency_penalty=2,
        extra_body={"min_p": 0.1, "repetition_penalty": 2.0},
    )
    assert re.fullmatch("[k-z]{4}", found)
    assert found != "kkkk"


@pytest.mark.parametrize(
    ("form", "fragment"),
    [
        ({"type": "regex", "regex": "(a"}, "the regex of the answer is faulty"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "fruit"}}}, "is faulty"),
        ({"type": "json_schema"}, "json_schema"),
    ],
)
def test_invalid_response_formats_are_rejected(client, form, fragment):
    with pytest.raises(openai.BadRequestError, match=fragment):
        _ask(client, response_format=form)

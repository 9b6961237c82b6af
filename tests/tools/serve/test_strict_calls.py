"""`strict` tools that the model may call: a call is guided once its opening tag is written."""

from __future__ import annotations

import json

import openai
import pytest
from guided_texts import Guided
from lettered_engine import with_letters

from edgellm.device_runtime import LLM
from edgellm.device_runtime.sampling.params import Guide
from edgellm.tools.serve import tool_calls
from edgellm.tools.serve.schemas.openai import ChatRequest
from edgellm.tools.serve.tool_calls.formats.hermes import HermesParser
from edgellm.tools.serve.tool_calls.grammar import calls_in_text

CITY = {"type": "object", "properties": {"city": {"enum": ["Bonn"]}}, "required": ["city"]}
SCHEMAS = {"weather": CITY, "free": {"type": "object"}}
TAGGED = [parser for parser in tool_calls.PARSERS if parser.form.tag]
UNTAGGED = {"HarmonyParser", "Llama3Parser", "Glm4Parser", "GemmaParser"}
TURNS = [{"role": "user", "content": "Bonn?"}]


def _tool(name, schema, **more):
    function = {"name": name, "parameters": schema, **more}
    return {"type": "function", "function": function}


STRICT = [_tool("weather", CITY, strict=True), _tool("free", None)]


@pytest.fixture(scope="module")
def guided(tmp_path_factory):
    return Guided(tmp_path_factory.mktemp("guided"))


def _texts(form, *calls):
    return form.between.join(_text(form, *call) for call in calls).join(
        (form.opening, form.closing)
    )


def _text(form, name, arguments):
    """A call in the format of the family: JSON, or arguments one by one."""
    if (one := form.parameters) is None:
        return form.before.replace("NAME", name) + arguments + form.after
    values = [
        one.opening.replace("KEY", key)
        + (value if isinstance(value, str) else json.dumps(value))
        + one.closing
        + one.between
        for key, value in json.loads(arguments).items()
    ]
    return one.before.replace("NAME", name) + "".join(values) + one.after


def _guide(parser):
    grammar = calls_in_text(parser.form, SCHEMAS, marks={}, other_marks=())
    return Guide("lark_with_thinking", grammar)


@pytest.mark.parametrize("parser", TAGGED)
def test_text_is_free_and_calls_have_the_form_of_their_schema(guided, parser):
    form, guide = parser.form, _guide(parser)
    free = '{"x": [1, "a"]}' if form.parameters is None else '{"x": "1", "y": "<b>\\n"}'
    right = ("weather", '{"city": "Bonn"}'), ("free", free)
    for text in ("", "Well.", f"Well, {form.tag[:-1]}", "I look.\n" + _texts(form, *right)):
        assert guided.takes(guide, text), text
    read = tool_calls.reader(parser, SCHEMAS)
    items = [*read.push(_texts(form, *right)), *read.finish()]
    found = [(one.name, one.arguments) for one in items if not isinstance(one, str)]
    assert found == [*right]
    wrong = ("weather", '{"city": "Rome"}'), ("weather", "{}"), ("other", "{}")
    for call in wrong:
        assert not guided.takes(guide, _texts(form, call)), call
        assert not guided.takes(guide, _texts(form, right[0], call)), call


def test_formats_without_a_tag_ignore_strict_and_say_so():
    class Tokenizer:
        chat_template = ""

        def template_variables(self):
            return frozenset()

    named = {parser for parser in tool_calls.PARSERS if not parser.form.tag}
    assert {parser.__name__ for parser in named} == UNTAGGED
    body = ChatRequest.model_validate({"messages": TURNS, "tools": STRICT})
    llama = Tokenizer()
    llama.chat_template = '"parameters" ipython tools'
    assert body.ignored(llama) == ["strict"]
    qwen = Tokenizer()
    qwen.chat_template = '<tool_call> "arguments" tools'
    assert body.ignored(qwen) == []
    formed = body.model_copy(update={"guided_regex": "[0-9]+"})
    assert formed.ignored(qwen) == ["strict"]
    assert body.model_copy(update={"tool_choice": "required"}).ignored(llama) == []


BODIES = {
    "/v1/chat/completions": {"messages": TURNS, "tools": STRICT, "max_tokens": 8},
    "/v1/messages": {
        "messages": TURNS,
        "tools": [{"name": "weather", "input_schema": CITY, "strict": True}],
        "max_tokens": 8,
    },
    "/v1/responses": {
        "input": "Bonn?",
        "tools": [{"type": "function", "name": "weather", "parameters": CITY, "strict": True}],
        "max_output_tokens": 8,
    },
    "/api/chat": {
        "model": "tiny",
        "messages": TURNS,
        "tools": STRICT[:1],
        "options": {"num_predict": 8},
        "stream": False,
    },
}


@pytest.mark.parametrize("path", BODIES)
def test_strict_tools_are_taken_in_every_protocol(lettered_server, path):
    status, response, content = lettered_server.send(path, BODIES[path])
    assert status == 200, content
    assert response.headers["x-edgellm-ignored"] is None
    faulty = json.loads(json.dumps(BODIES[path]).replace('"object"', '"array"'))
    status, _, content = lettered_server.send(path, faulty)
    assert (status, b"must be an object" in content) == (400, True)


@pytest.mark.parametrize("tokens", [(), ("<tool_call>", "</tool_call>")])
def test_a_call_of_the_model_is_guided_whether_its_tag_is_a_token_or_text(
    roomy_engine, tmp_path, tokens
):
    """A continued message has the tag's beginning: the model has no choice but to end it."""
    llm = LLM(with_letters(roomy_engine, tmp_path / "engine", tokens=tokens))
    form = HermesParser.form
    marks = llm.tokenizer.added_ids(form.marks)
    grammar = calls_in_text(form, SCHEMAS, marks=marks, other_marks=())
    constraint = llm._guidance.start(Guide("lark_with_thinking", grammar))
    for text in ("Well, ", "<tool_call>"):
        constraint.take(llm.tokenizer.encode(text, add_special_tokens=False))
    allowed = constraint._allowed(()).nonzero()[0]
    assert llm.tokenizer.decode([*allowed]) == "\n"


def test_openais_strict_tools_work_as_they_come(lettered_server):
    client = openai.OpenAI(base_url=f"{lettered_server.url}/v1", api_key="none", max_retries=0)
    found = client.chat.completions.create(model="tiny", messages=TURNS, tools=STRICT, max_tokens=8)
    assert found.choices[0].finish_reason in ("length", "stop")

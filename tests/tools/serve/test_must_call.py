"""Forced tool calls: guided by the family's grammar, parsed by its parser."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import downloaded
import openai
import pytest
from lettered_engine import with_letters

from edgellm.core.errors import RequestError
from edgellm.device_runtime import LLM, SamplingParams
from edgellm.device_runtime.api.generation_request import GenerationRequest
from edgellm.device_runtime.sampling.guidance import Guide
from edgellm.tools.serve import tool_calls
from edgellm.tools.serve.tool_calls.formats.hermes import HermesParser
from edgellm.tools.serve.tool_calls.formats.ministral import MinistralParser
from edgellm.tools.serve.tool_calls.formats.mistral import MistralParser
from edgellm.tools.serve.tool_calls.grammar import forced_calls

# No text may stand for these where they are tokens: of Qwen and Hermes, and of Mistral.
TAGS, MARK = ("<tool_call>", "</tool_call>"), ("[TOOL_CALLS]",)
NAMED = ("[TOOL_CALLS]", "[ARGS]")  # special, and shown to Ministral's parser
EATEN = {
    "type": "object",
    "properties": {
        "fruit": {"$ref": "#/$defs/Fruit"},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["fruit", "count"],
    "$defs": {"Fruit": {"enum": ["apple", "pear"]}},
}
SCHEMAS = {"eaten": EATEN, "stop.it-now": None}


@pytest.fixture(scope="module")
def llm(request, roomy_engine, tmp_path_factory) -> LLM:
    folder = tmp_path_factory.mktemp("marked") / "engine"
    return LLM(with_letters(roomy_engine, folder, tokens=request.param))


def _is_whole(call) -> bool:
    arguments = json.loads(call.arguments)
    if call.name == "stop.it-now":
        return arguments == {}
    return (
        arguments["fruit"] in ("apple", "pear")
        and 0 <= arguments["count"] <= 9
        and len(arguments) == 2
    )


PAIRS = [((), kind) for kind in tool_calls.PARSERS]
PAIRS += [(TAGS, HermesParser), (MARK, MistralParser), (NAMED, MinistralParser)]


@pytest.mark.each_change("True-*")
@pytest.mark.parametrize(("llm", "kind"), PAIRS, indirect=["llm"])
@pytest.mark.parametrize("several", [False, True])
def test_every_family_reads_what_its_grammar_lets_through(llm, kind, several):
    counts, marks = set(), llm.tokenizer.added_ids(kind.form.marks)
    assert len(marks) == len(llm.tokenizer.added_ids([*TAGS, *NAMED]))
    grammar = forced_calls(kind.form, SCHEMAS, marks=marks, several=several)
    for seed in range(8):
        sampling = SamplingParams(
            temperature=4.0, top_p=1.0, top_k=0, seed=seed, guide=Guide("lark", grammar)
        )
        answer = llm.generate_text(
            GenerationRequest(
                text="Hi",
                sampling=sampling,
                max_generate_length=900,
                stop=(),
                add_special_tokens=True,
                shown_tokens=kind.shown,
            )
        )
        list(answer)
        assert answer.finish_reason == "stop", answer.text
        assert set(marks.values()) <= set(answer.token_ids)
        parser = tool_calls.reader(kind, SCHEMAS)
        found = [*parser.push(answer.text), *parser.finish()]
        assert found
        assert all(not isinstance(item, str) and _is_whole(item) for item in found)
        counts.add(len(found))
        if seed >= 3 and len(counts) > 1:
            break
    assert (counts == {1}) == (not several or kind.form.between is None)


@pytest.mark.parametrize("llm", [()], indirect=True)
def test_arguments_are_objects(llm):
    form = tool_calls.PARSERS[0].form
    with pytest.raises(RequestError, match="parameters of f must be an object"):
        forced_calls(form, {"f": {"type": "array"}}, marks={}, several=False)
    grammar = forced_calls(form, {"f": {"type": "object", "required": 5}}, marks={}, several=False)
    with pytest.raises(RequestError, match="the grammar of the answer is faulty"):
        llm.generate("Hi", sampling=SamplingParams(guide=Guide("lark", grammar)))


@pytest.fixture(scope="module")
def client(lettered_server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{lettered_server.url}/v1", api_key="none", max_retries=0)


def _tool(name, schema, **more):
    function = {"name": name, "parameters": schema, **more}
    return {"type": "function", "function": function}


TOOLS = [_tool("eaten", EATEN), _tool("stop.it-now", None)]
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 900}
ONE = {"type": "function", "function": {"name": "eaten"}}


@pytest.mark.parametrize("stream", [False, True])
def test_named_and_required_tool_choice_give_exactly_one_call(client, stream):
    for choice, more in ((ONE, {}), ("required", {"parallel_tool_calls": False})):
        found = client.chat.completions.create(
            **ASK, tools=TOOLS, tool_choice=choice, temperature=2, seed=1, stream=stream, **more
        )
        if stream:
            chunks = list(found)
            assert not any(chunk.choices[0].delta.content for chunk in chunks)
            calls = [call for c in chunks for call in c.choices[0].delta.tool_calls or ()]
            reason = chunks[-1].choices[0].finish_reason
        else:
            calls, reason = found.choices[0].message.tool_calls, found.choices[0].finish_reason
            assert found.choices[0].message.content is None
        (call,) = calls
        assert reason == "tool_calls"
        assert choice == "required" or call.function.name == "eaten"
        assert _is_whole(call.function)


def test_strict_is_a_promise_that_is_kept_where_calls_are_guided(client):
    tools = [_tool("eaten", EATEN, strict=True)]
    found = client.chat.completions.create(**ASK, tools=tools, tool_choice=ONE)
    assert _is_whole(found.choices[0].message.tool_calls[0].function)


def test_a_forced_call_may_come_with_a_format_of_texts(client):
    form = {"type": "json_object"}
    found = client.chat.completions.create(
        **ASK, tools=TOOLS, tool_choice=ONE, response_format=form
    )
    assert _is_whole(found.choices[0].message.tool_calls[0].function)


@pytest.mark.parametrize(
    ("changed", "fragment"),
    [
        ({"tool_choice": "required"}, '"required" needs tools'),
        ({"tool_choice": ONE, "tools": TOOLS[1:]}, "no tool 'eaten' among"),
        ({"tool_choice": "always", "tools": TOOLS}, 'give "auto", "none", "required"'),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, "tool_choice"),
        (
            {"tool_choice": ONE, "tools": TOOLS, "extra_body": {"guided_regex": "a"}},
            "allows no other output format",
        ),
        ({"tool_choice": ONE, "tools": [_tool("eaten", {"type": "fruit"})]}, "an object"),
        ({"tool_choice": ONE, "tools": TOOLS, "extra_body": {"ignore_eos": True}}, "ignore_eos"),
    ],
)
def test_invalid_tool_choices_are_rejected(client, changed, fragment):
    with pytest.raises(openai.BadRequestError, match=fragment):
        client.chat.completions.create(**ASK, **changed)


CLIENTS = """
import sys
from typing import Literal
from pydantic import BaseModel, Field

class Meal(BaseModel):
    "What was eaten."
    fruit: Literal["apple", "pear"]
    count: int = Field(ge=0, le=9)

class Eaten(BaseModel):
    "All of it."
    meal: Meal
    enough: bool

url = sys.argv[1]
if sys.argv[2] == "instructor":
    import instructor, openai
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none"))
    options = {"response_model": Eaten, "max_retries": 0, "model": "tiny", "max_tokens": 900}
    options["seed"] = 1  # a random model may also write a text without an end
    messages = [{"role": "user", "content": "Hi"}]
    found = client.chat.completions.create(messages=messages, **options)
else:
    from langchain_openai import ChatOpenAI
    model = ChatOpenAI(
        base_url=url, api_key="none", model="tiny", max_tokens=900, max_retries=0, seed=1
    )
    structured = model.with_structured_output(Eaten, method=sys.argv[3])
    found = structured.invoke("Hi")
assert isinstance(found, Eaten), found
print(found.model_dump_json())
"""


@pytest.fixture(scope="session")
def structured() -> Path:
    return downloaded.packages(Path(__file__).with_name("structured.txt"))


@pytest.mark.parametrize(
    "client_of",
    [["instructor"], ["langchain", "function_calling"], ["langchain", "json_schema"]],
    ids=" ".join,
)
def test_clients_that_make_objects_of_answers(structured, lettered_server, client_of):
    result = subprocess.run(
        [sys.executable, "-c", CLIENTS, f"{lettered_server.url}/v1", *client_of],
        env={**os.environ, "PYTHONPATH": str(structured)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert set(json.loads(result.stdout)) == {"meal", "enough"}

"""Calls in answers: parsers by any cut of the text, and requests with tools against a server."""

from __future__ import annotations

import json
import shutil

import pytest
from answer_cuts import joined, read_cut
from hypothesis import example, given
from hypothesis import strategies as st

from edgellm.core.errors import RequestError
from edgellm.device_runtime.api.generation_request import GenerationDefaults
from edgellm.device_runtime.api.llm import Step
from edgellm.device_runtime.text.tokenizer import ChatTokenizer
from edgellm.tools.serve import tool_calls
from edgellm.tools.serve.engines.events import Finished, Started
from edgellm.tools.serve.protocols.openai.chat import ChatWriter, ask_of
from edgellm.tools.serve.schemas.openai import ChatRequest
from edgellm.tools.serve.settings import ImageRules
from edgellm.tools.serve.tool_calls.formats.hermes import HermesParser
from edgellm.tools.serve.tool_calls.formats.llama3 import Llama3Parser
from edgellm.tools.serve.tool_calls.formats.ministral import MinistralParser
from edgellm.tools.serve.tool_calls.formats.mistral import MistralParser
from edgellm.tools.serve.tool_calls.parser import Call

NAMES = {"weather", "add"}
TOOLS = {"weather": {"properties": {"city": {"type": "string"}}}, "add": None}
WEATHER = Call("weather", '{"city": "Köln"}')
ADD = Call("add", '{"a": 1, "b": [2]}')
_W = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
_A = '<tool_call>{"arguments": {"a": 1, "b": [2]}, "name": "add"}</tool_call>'
_LW = '{"name": "weather", "parameters": {"city": "Köln"}}'
_LA = '{"name": "add", "parameters": {"a": 1, "b": [2]}}'

HERMES = {
    "": [],
    "no call at all": ["no call at all"],
    "1 < 2 and <tool": ["1 < 2 and <tool"],
    _W: [WEATHER],
    f"Let me see.\n{_W}\n{_A}": ["Let me see.\n", WEATHER, ADD],
    f"{_A}{_A} done": [ADD, ADD, " done"],
    _W.replace("</tool_call>", ""): [WEATHER],  # the answer ended before the tag
    "<tool_call>{nonsense</tool_call> x": ["<tool_call>{nonsense</tool_call> x"],
    _W.replace("weather", "unknown"): [_W.replace("weather", "unknown")],
    '<tool_call>{"name": ["add"]}</tool_call>': ['<tool_call>{"name": ["add"]}</tool_call>'],
    '<tool_call>{"name": "add", "arguments": 5}</tool_call>': [
        '<tool_call>{"name": "add", "arguments": 5}</tool_call>'
    ],
    '<tool_call>{"name": "add"}</tool_call>': [Call("add", "{}")],
    "<tool_call>[1]</tool_call>": ["<tool_call>[1]</tool_call>"],
    '<tool_call>{"name": "add", "arguments": {"a"': [
        '<tool_call>{"name": "add", "arguments": {"a"'
    ],
}
LLAMA3 = {
    "": [],
    "no call": ["no call"],
    _LW: [WEATHER],
    f" \n{_LW}; {_LA}": [WEATHER, ADD],
    '{"name": "add"}': [Call("add", "{}")],
    '{"answer": 5}': ['{"answer": 5}'],
    '{"name": "weather", "param': ['{"name": "weather", "param'],
    _LW.replace("weather", "unknown"): [_LW.replace("weather", "unknown")],
    f"text before {_LW}": [f"text before {_LW}"],
}
_MW = '{"name": "weather", "arguments": {"city": "Köln"}}'
_MA = '{"arguments": {"a": 1, "b": [2]}, "name": "add"}'
MISTRAL = {
    "": [],
    "no call": ["no call"],
    "[1] a source": ["[1] a source"],
    "[TOOL": ["[TOOL"],
    f"[TOOL_CALLS] [{_MW}]": [WEATHER],
    f" [{_MW}, {_MA}]\n": [WEATHER, ADD],  # the mark was a special token
    f"[ \n{_MA}]": [ADD],
    '[{"name": "add"}]': [Call("add", "{}")],
    f"[{_MW}, {_MA}": [f"[{_MW}, {_MA}"],
    f"[{_MW}, 5]": [f"[{_MW}, 5]"],
    f"[{_MW}] and": [f"[{_MW}] and"],
    f"[{_MW}]".replace("weather", "unknown"): [f"[{_MW}]".replace("weather", "unknown")],
    '[{"name": "add", "arguments": "x"}]': ['[{"name": "add", "arguments": "x"}]'],
    "[TOOL_CALLS] 5": ["[TOOL_CALLS] 5"],
    f"text before [{_MW}]": [f"text before [{_MW}]"],
}
CASES = [(HermesParser, *case) for case in HERMES.items()]
CASES += [(Llama3Parser, *case) for case in LLAMA3.items()]
CASES += [(MistralParser, *case) for case in MISTRAL.items()]


@pytest.mark.parametrize(("kind", "text", "expected"), CASES)
@given(cuts=st.sets(st.integers(0, 150), max_size=8))
@example(cuts=set(range(150)))
@example(cuts=set(range(0, 150, 11)))
def test_tool_calls_are_parsed_wherever_the_stream_is_cut(kind, text, expected, cuts):
    assert read_cut(kind(NAMES), text, cuts) == expected


@given(st.text('<tool_cal>/{}[]":name add;\nTOLCS', max_size=60))
def test_no_text_is_lost_or_breaks_a_parser(text):
    for kind in tool_calls.PARSERS:
        parser = kind(NAMES)
        found = [*parser.push(text), *parser.finish()]
        if all(isinstance(item, str) for item in found):
            assert "".join(found) == text or text.isspace()


HALVES = {
    "HermesParser": ("Let me see.\n", _W),
    "Llama3Parser": ("", _LW),
    "MistralParser": ("", f"[TOOL_CALLS] [{_MW}]"),
    "MinistralParser": ("So: ", '[TOOL_CALLS]weather[ARGS]{"city": "Köln"}'),
    "GraniteParser": ("So: ", f"<|tool_call|>[{_MW}]"),
    "Phi4Parser": ("So: ", f"<|tool_call|>[{_MW}]<|/tool_call|>"),
    "HunyuanParser": ("So: ", f"<tool_calls>[{_MW}]</tool_calls>"),
    "CommandParser": (
        "So: ",
        '<|START_ACTION|>[{"tool_name": "weather", "parameters": {"city": "Köln"}}]<|END_ACTION|>',
    ),
    "Glm45Parser": (
        "So: ",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n</tool_call>",
    ),
    "Qwen3CoderParser": (
        "So: ",
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n</function>\n"
        "</tool_call>",
    ),
    "Gemma4Parser": ("So: ", '<|tool_call>call:weather{city:<|"|>Köln<|"|>}<tool_call|>'),
    "Lfm2Parser": ("So: ", "<|tool_call_start|>[weather(city='Köln')]<|tool_call_end|>"),
    "Glm4Parser": ("Let me see.\n", 'weather\n{"city": "Köln"}'),
    "Olmo3Parser": ("So: ", "<function_calls>\nweather(city='Köln')\n</function_calls>"),
    "GemmaParser": ("So: ", '```tool_code\nweather(city="Köln")\n```'),
    "HarmonyParser": (
        "<|channel|>final<|message|>So: <|end|><|start|>assistant",
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Köln"}',
    ),
}


@pytest.mark.parametrize("kind", tool_calls.PARSERS)
def test_half_a_call_at_the_maximum_length_is_no_text(kind):
    """From the second character on: one alone may be any text's."""
    before, call = HALVES[kind.__name__]
    text = "So: " if kind.__name__ == "HarmonyParser" else before
    for size in range(2, len(call) + 1):
        reader = tool_calls.reader(kind, TOOLS)
        items = [*reader.push(before + call[:size]), *reader.finish(is_cut=True)]
        items = joined(items, is_cut=True)
        assert [item for item in items if item != WEATHER] == [text] * bool(text), size
    assert WEATHER in items


@pytest.mark.parametrize(
    ("kind", "text", "whole"),
    [
        (HermesParser, f"{_W}\n{_A[:30]}", WEATHER),
        (Llama3Parser, f"{_LW}; {_LA[:20]}", WEATHER),
        (MistralParser, f"[TOOL_CALLS] [{_MW}, {_MW[:30]}", WEATHER),
        (tool_calls.GraniteParser, f"<|tool_call|>[{_MW}, {_MW[:30]}", WEATHER),
        (HermesParser, f"```json\n{_MW[:40]}", None),
        (HermesParser, _MW[:40], None),
    ],
)
def test_whole_calls_before_half_a_call_stay(kind, text, whole):
    reader = tool_calls.reader(kind, TOOLS)
    found = [*reader.push(text), *reader.finish(is_cut=True)]
    assert joined(found) == ([whole] if whole else [])


@pytest.mark.parametrize("kind", tool_calls.PARSERS)
@pytest.mark.parametrize(
    "text", ["1 < 2 and", "a list: [1, 2", '{"answer": [5', "plain `code", "x <"]
)
def test_other_text_stays_at_the_maximum_length(kind, text):
    reader = tool_calls.reader(kind, TOOLS)
    assert joined([*reader.push(text), *reader.finish(is_cut=True)]) == [text]


QWEN = (
    "{%- if tools %}# Tools\n{%- for tool in tools %}{{ tool | tojson }}{%- endfor %}"
    'Answer with <tool_call>{"name": <name>, "arguments": <object>}</tool_call>{%- endif %}'
    "{%- for m in messages %} {{ m.role }} : {{ m.content }}{%- for c in m.tool_calls or [] %}"
    "{{ c.function.name }} {{ c.function.arguments | tojson }}{%- endfor %}{%- endfor %}"
)
LLAMA = (
    '{%- if tools %}Respond with {"name": name, "parameters": object}{%- endif %}'
    "{%- for m in messages %}{%- if m.role == 'tool' %}ipython{%- endif %}{%- endfor %}"
)
# Tools stand before the last question, calls are a list, and ids have nine characters.
MISTRAL_V3 = (
    "{{- bos_token }}{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- if tools is defined and m == asked[-1] %}"
    "[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}"
    "[INST] {{ m.content }}[/INST]"
    "{%- elif m.tool_calls is defined %}[TOOL_CALLS] [{%- for c in m.tool_calls %}"
    "{%- if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{%- endif %}"
    "{{ (c.function | tojson)[:-1] }}, \"id\": \"{{ c.id }}\"}{{ '' if loop.last else ', ' }}"
    "{%- endfor %}]</s>"
    "{%- elif m.role == 'tool' %}{%- if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('ids have nine characters') }}{%- endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}'
    "[/TOOL_RESULTS]{%- else %} {{ m.content }}</s>{%- endif %}{%- endfor %}"
)


def test_a_call_of_mistral_goes_back_into_its_template(roomy_engine, tmp_path):
    shutil.copy(roomy_engine / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(MISTRAL_V3)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    model = _Model(tmp_path)
    asked = _body(messages=BODY["messages"][:1])
    writer = ChatWriter(body=asked, llm=model, model="m")
    writer.step(Step((9,), f" [{_MW}, {_MW}]"))
    message = writer.whole(FIGURES)["choices"][0]["message"]
    assert message["content"] is None
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    results = [{"role": "tool", "content": "sunny", "tool_call_id": one} for one in ids]
    ask = _ask(_body(messages=[*BODY["messages"][:1], message, *results]), model)
    text = model.tokenizer.render(ask.prompt, **ask.template_flags)
    assert text.startswith("<s>[AVAILABLE_TOOLS] [{")
    call = '{"name": "weather", "arguments": {"city": "Köln"}, "id": "%s"}'
    assert f"[TOOL_CALLS] [{call % ids[0]}, {call % ids[1]}]</s>" in text
    assert text.endswith(f'"call_id": "{ids[1]}"}}[/TOOL_RESULTS]')


def test_parsers_are_found_by_the_template():
    assert tool_calls.find(QWEN) is HermesParser
    in_a_string = '{{- "\\n<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <object>}" }}'
    assert '"arguments"' not in in_a_string
    assert tool_calls.find(f"{{%- if tools %}}{in_a_string}{{%- endif %}}") is HermesParser
    assert tool_calls.find(LLAMA) is Llama3Parser
    assert tool_calls.find(MISTRAL_V3) is MistralParser
    assert tool_calls.find(MISTRAL_V3 + "[ARGS]") is MinistralParser  # names before arguments
    assert tool_calls.find("{{ messages }}") is None
    assert tool_calls.find("") is None


class _Model:
    """As much of an `LLM` as a chat needs to know."""

    def __init__(self, folder):
        self.tokenizer, self.manifest = ChatTokenizer(folder), self
        self.images = self.audio = None
        self.eos_token_ids = (2,)
        self.defaults = GenerationDefaults()


@pytest.fixture
def model(roomy_engine, tmp_path):
    shutil.copy(roomy_engine / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(QWEN)
    return _Model(tmp_path)


BODY = {
    "messages": [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Bonn"}'},
                }
            ],
        },
        {"role": "tool", "content": "sunny", "tool_call_id": "call_1"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
        }
    ],
}


def _body(**changed):
    return ChatRequest.model_validate(json.loads(json.dumps({**BODY, **changed})))


def _ask(body, model):
    import anyio

    return anyio.run(ask_of, body, model, ImageRules())


def test_tools_and_earlier_calls_reach_the_template(model):
    ask = _ask(_body(), model)
    text = model.tokenizer.render(ask.prompt, **ask.template_flags)
    assert '{"type": "function", "function": {"name": "weather"' in text
    assert 'weather {"city": "Bonn"}' in text  # an object, not a string of JSON
    assert "tool : sunny" in text


def test_tool_choice_none_shows_the_template_no_tools(model):
    body = _body(tool_choice="none")
    ask = _ask(body, model)
    assert "# Tools" not in model.tokenizer.render(ask.prompt, **ask.template_flags)
    writer = ChatWriter(body=body, llm=model, model="m")
    assert writer.step(Step((5,), _W))[0]["choices"][0]["delta"]["content"] == _W


FIGURES = Finished(
    finish_reason="stop",
    prompt_tokens=5,
    cached_tokens=0,
    completion_tokens=9,
    rounds=(),
    queue_ms=0.0,
    first_token_ms=0.0,
    generation_ms=0.0,
)


def test_calls_of_a_stream_and_of_a_whole_answer(model):
    text = f"I look.\n{_W}"
    writer = ChatWriter(body=_body(), llm=model, model="m")
    events = [*writer.begin(Started(5))]
    for index, character in enumerate(text):
        events += writer.step(Step((index + 9,), character))
    events += writer.end(FIGURES)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look.\n"
    (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["index"] == 0
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Köln"}
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    whole = writer.whole(FIGURES)["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == "I look.\n"
    assert whole["message"]["tool_calls"][0]["id"] == calls[0]["id"]
    assert "index" not in whole["message"]["tool_calls"][0]


def test_an_output_without_calls_has_the_usual_finish_reason(model):
    writer = ChatWriter(body=_body(), llm=model, model="m")
    writer.step(Step((9,), "no <tool"))
    whole = writer.whole(FIGURES)["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"]) == ("no <tool", "stop")


def test_arguments_that_are_no_json_are_refused(model):
    messages = json.loads(json.dumps(BODY["messages"]))
    messages[1]["tool_calls"][0]["function"]["arguments"] = "{city"
    with pytest.raises(Exception, match=r"messages\.1\.tool_calls: arguments must be JSON"):
        _ask(_body(messages=messages), model)


def test_a_template_that_fails_on_arguments_is_a_faulty_request(model):
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(RequestError, match="chat template refuses"):
        model.tokenizer.render(messages, tools=[{"a": object()}])

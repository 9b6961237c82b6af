"""Calls and channels as the families write them, however the text is cut."""

from __future__ import annotations

import json

import pytest
from answer_cuts import joined, require_read
from hypothesis import given
from hypothesis import strategies as st

from edgellm.tools.serve import tool_calls
from edgellm.tools.serve.tool_calls.formats.command import CommandParser
from edgellm.tools.serve.tool_calls.formats.gemma import GemmaParser
from edgellm.tools.serve.tool_calls.formats.gemma4 import Gemma4Parser
from edgellm.tools.serve.tool_calls.formats.glm4 import Glm4Parser
from edgellm.tools.serve.tool_calls.formats.glm45 import Glm45Parser
from edgellm.tools.serve.tool_calls.formats.granite import GraniteParser
from edgellm.tools.serve.tool_calls.formats.harmony import HarmonyParser
from edgellm.tools.serve.tool_calls.formats.hermes import HermesParser
from edgellm.tools.serve.tool_calls.formats.hunyuan import HunyuanParser
from edgellm.tools.serve.tool_calls.formats.lfm2 import Lfm2Parser
from edgellm.tools.serve.tool_calls.formats.ministral import MinistralParser
from edgellm.tools.serve.tool_calls.formats.olmo3 import Olmo3Parser
from edgellm.tools.serve.tool_calls.formats.phi4 import Phi4Parser
from edgellm.tools.serve.tool_calls.formats.qwen3_coder import Qwen3CoderParser
from edgellm.tools.serve.tool_calls.parser import Call, ReasoningText

TOOLS = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}}},
    "add": {"properties": {"a": {"type": "integer"}, "b": {"type": "array"}}},
    "now": None,
}
WEATHER, ADD = Call("weather", '{"city": "Köln"}'), Call("add", '{"a": 1, "b": [2]}')
W, A = '{"name": "weather", "arguments": {"city": "Köln"}}', '{"name": "add", "arguments": '
A += '{"a": 1, "b": [2]}}'
GRANITE, PHI, PHI_END = "<|tool_call|>", "<|tool_call|>", "<|/tool_call|>"
ACTION, ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"
R7B = [
    '{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Köln"}}',
    '{"tool_call_id": "1", "tool_name": "add", "parameters": {"a": 1, "b": [2]}}',
]
GLM_W = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n</tool_call>"
GLM_A = (
    "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>"
    "<arg_key>b</arg_key><arg_value>[2]</arg_value></tool_call>"
)


def _qwen(name, **arguments):
    """A call of Qwen3-Coder."""
    pairs = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(pairs)}</function>\n</tool_call>"


QWEN_W, QWEN_A = _qwen("weather", city="Köln"), _qwen("add", a="1", b="[2]")
LFM, LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"


def _gemma(*calls):
    """Calls of Gemma 4."""
    return "".join(f"<|tool_call>call:{call}<tool_call|>" for call in calls)


GEMMA_W, GEMMA_A = 'weather{city:<|"|>Köln<|"|>}', "add{a:1,b:[2]}"
CODE, OLMO, OLMO_END = "```tool_code\n", "<function_calls>\n", "\n</function_calls>"


def _same(*texts):
    """Texts in which there are no calls."""
    return {text: [text] for text in texts}


CASES = {
    GraniteParser: {
        f"{GRANITE}[{W}]": [WEATHER],
        f"I look. {GRANITE} [{W}, {A}]\n": ["I look. ", WEATHER, ADD],
        f"{GRANITE}[{W}] Wait.": [WEATHER, "Wait."],
        f"{GRANITE}[]": [],
        **_same(
            "no <|tool", f"{GRANITE}[{W}, 5]", f"{GRANITE}[{W}",
            f"{GRANITE}[{W}]".replace("weather", "unknown"), f"{GRANITE}{'[' * 5000}",
        ),
    },
    Phi4Parser: {
        f"{PHI}[{W}, {A}]{PHI_END}": [WEATHER, ADD],
        f"Well: {PHI}{A}{PHI_END}": ["Well: ", ADD],
        f"functools[{W}, {A}]": [WEATHER, ADD],
        f"functools[{W}]\n": [WEATHER],
        f"{PHI}[{W}]{PHI_END}{PHI}[{A}]{PHI_END}": [WEATHER, ADD],
        **_same("import functools", "functools[0]", f"{PHI}[{W}, {PHI_END}"),
    },
    HunyuanParser: {
        f"<tool_calls>[{W}, {A}]</tool_calls>": [WEATHER, ADD],
        f"a <tool_calls>[{W}]</tool_calls>\n b": ["a ", WEATHER, "b"],
        f"<tool_calls>[{W}]": [WEATHER],
        **_same("<tool_calls>x</tool_calls> y", "<tool_calls"),
    },
    CommandParser: {
        f"{ACTION}[\n    {R7B[0]},\n    {R7B[1]}\n]{ACTION_END}": [WEATHER, ADD],
        f"Plan. {ACTION}[{R7B[0]}]{ACTION_END} Then.": ["Plan. ", WEATHER, "Then."],
        **_same(f"{ACTION}[{W}]{ACTION_END}", f"{ACTION}[{R7B[0]}, {{}}"),
    },
    MinistralParser: {
        '[TOOL_CALLS]weather[ARGS]{"city": "Köln"}': [WEATHER],
        'Hm.[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 1, "b": [2]} so': [
            "Hm.", Call("now", "{}"), ADD, "so",
        ],
        **_same("[TOOL_CALLS]weather", '[TOOL_CALLS]weather[ARGS]{"city"', "[TOOL", "[1] a source"),
    },
    Glm45Parser: {
        GLM_W: [WEATHER],
        f"I look.\n{GLM_W}\n{GLM_A}": ["I look.\n", WEATHER, ADD],
        "<tool_call>now\n</tool_call> done": [Call("now", "{}"), "done"],
        f"<tool_call>{W}</tool_call>": [WEATHER],
        GLM_W.replace("Köln", '"1"'): [Call("weather", '{"city": "\\"1\\""}')],  # a string as it is
        "<tool_call>now<arg_key>x</arg_key><arg_value>y</arg_value></tool_call>": [
            Call("now", '{"x": "y"}')
        ],
        **_same(
            GLM_W.replace("weather", "unknown"), "<tool_call>now<arg_key>x</arg_key></tool_call>",
            GLM_W.replace("</arg_value>", ""),
        ),
    },
    Qwen3CoderParser: {
        QWEN_W: [WEATHER],
        f"I look.{QWEN_W}\n{QWEN_A}\n": ["I look.", WEATHER, ADD],
        f"{QWEN_A} Wait.": [ADD, "Wait."],
        _qwen("now"): [Call("now", "{}")],
        _qwen("now", x="1"): [Call("now", '{"x": "1"}')],  # no schema: a string
        QWEN_W.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"): [WEATHER],
        QWEN_W.removesuffix("</function>\n</tool_call>"): [WEATHER],
        QWEN_W.replace("\n", ""): [WEATHER],
        QWEN_W.replace("</function>\n", f"</function>\n{QWEN_A[12:-13]}"): [WEATHER, ADD],
        f"<tool_call>\n{W}\n</tool_call>": [WEATHER],
        _qwen("weather", city="\n a\n\n"): [Call("weather", '{"city": "\\n a\\n\\n"}')],
        _qwen("weather", city='"</b>" </parameter> x </function></tool_call> {'): [
            Call("weather", json.dumps({"city": '"</b>" </parameter> x </function></tool_call> {'}))
        ],
        _qwen("add", a="1\n<parameter=b>\n[2]"): [ADD],  # a closing tag is missing
        **_same(
            QWEN_W.replace("weather", "unknown"), "<tool_call>x</tool_call> y", "<tool",
            "<function", "<tool_call>\n<function=weather>", "x <function=a b>",
        ),
    },
    Lfm2Parser: {
        f"{LFM}[weather(city='Köln'), add(a=1, b=[2])]{LFM_END}": [WEATHER, ADD],
        f"So: {LFM} [weather(city=\"Köln\")]{LFM_END}\nI look.": ["So: ", WEATHER, "I look."],
        f"{LFM}[{W}, {A}]{LFM_END}": [WEATHER, ADD],
        f"{LFM}weather(city='a]b'){LFM_END}": [Call("weather", '{"city": "a]b"}')],
        f"{LFM}[]{LFM_END}": [],
        **_same(f"{LFM}[unknown()]{LFM_END}", f"{LFM}[weather(city='a", "<|tool"),
    },
    Gemma4Parser: {
        _gemma(GEMMA_W): [WEATHER],
        f"I look. {_gemma(GEMMA_W, GEMMA_A)}": ["I look. ", WEATHER, ADD],
        _gemma("now{}"): [Call("now", "{}")],
        _gemma('now{a: {<|"|>3<|"|>:[true, null,3.5],b:{}}, c:[], d:<|"|>,]}<|"|>}'): [
            Call("now", '{"a": {"3": [true, null, 3.5], "b": {}}, "c": [], "d": ",]}"}')
        ],
        _gemma('weather{city:<|"|>a<tool_call|>b<|"|>}'): [
            Call("weather", '{"city": "a<tool_call|>b"}')
        ],
        f"<|tool_call>{W}<tool_call|>": [WEATHER],
        **_same(
            _gemma("unknown{}"), _gemma("now{a}"), _gemma("now"), _gemma(f"now{'{a:' * 500}"),
            _gemma(f"now{{a:{'[' * 500}"), _gemma("now{[}"), _gemma(GEMMA_W)[:-2],
        ),
    },
    Glm4Parser: {
        'weather\n{"city": "Köln"}': [WEATHER],
        'I look.\nweather\n{"city": "Köln"}\nadd\n{"a": 1, "b": [2]}': ["I look.\n", WEATHER, ADD],
        'now \n\n{}\n then': [Call("now", "{}"), "then"],
        **_same(
            "weather", "the weather\n{}", "weather\nis fine\n", 'weather\n{"city": ', "now\n[]",
            "wea\nther\n",
        ),
    },
    Olmo3Parser: {
        f"{OLMO}weather(city='Köln')\nadd(a=1, b=[2]){OLMO_END}": [WEATHER, ADD],
        f"So: {OLMO}now(){OLMO_END} ok": ["So: ", Call("now", "{}"), "ok"],
        f"{OLMO}add(a=-1, b=[true, null]){OLMO_END}": [Call("add", '{"a": -1, "b": [true, null]}')],
        f"{OLMO}[{W}]{OLMO_END}": [WEATHER],
        **_same(
            f"{OLMO}weather(city={OLMO_END}", f"{OLMO}weather(city=open('x')){OLMO_END}",
            f"{OLMO}unknown(){OLMO_END}", f"{OLMO}add(**{{}}){OLMO_END}", "<function_calls",
            f"{OLMO}now(x={'(' * 300}{OLMO_END}", f"{OLMO}{OLMO_END}",
            f"{OLMO}add(1, 2, 3){OLMO_END}",
        ),
    },
    GemmaParser: {
        f"{CODE}weather(city='Köln')\n```": [WEATHER],
        f"I look.\n{CODE}print(add(1, [2]))\n```\n": ["I look.\n", ADD],
        f"{CODE}[{W}]\n```{CODE}now()": [WEATHER, Call("now", "{}")],
        '[weather(city="Köln"), add(a=1, b=[2])]': [WEATHER, ADD],
        W.replace("arguments", "parameters"): [WEATHER],
        f"```json\n{W}\n```": [WEATHER],
        **_same(
            "```python\nprint(1)\n```", f"{CODE}import os\n```", "[1] a source", "[weather]",
            f"{CODE}x = now()\n```",
        ),
    },
    HarmonyParser: {
        "<|channel|>final<|message|>Hi<|return|>": ["Hi"],
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi": [
            ReasoningText("Hm."), "Hi",
        ],
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.weather <|constrain|>json<|message|>{"city": "Köln"}<|call|>': [
            ReasoningText("Hm."), WEATHER,
        ],
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": [2]}<|call|>'
        "<|start|>assistant<|channel|>commentary to=functions.now<|message|>": [
            ADD, Call("now", "{}"),
        ],
        "<|channel|>analysis<|message|>a<|end|><|channel|>analysis<|message|>b": [
            ReasoningText("a\nb")
        ],
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final"
        "<|message|>So.": ["I look.\nSo."],
        "<|channel|>commentary to=functions.weather<|message|>{city<|call|>": ["{city"],
        "<|channel|>commentary to=python<|message|>1<|call|>": ["1"],
        "<|channel|>final<|message|>1 <| 2 <|e": ["1 <| 2 <|e"],
        "<|channel|>analysis": [],
        "": [],
        **_same('{"a": 1}', "to be", "<b>", "to"),  # without channels, as guided answers are
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_calls_are_parsed_wherever_the_stream_is_cut(kind):
    for text, expected in CASES[kind].items():
        require_read(lambda: tool_calls.reader(kind, TOOLS), text, expected)


@pytest.mark.parametrize("kind", CASES)
def test_text_is_passed_on_as_it_comes(kind):
    reader = tool_calls.reader(kind, TOOLS)
    begun = "<|channel|>final<|message|>" if kind is HarmonyParser else ""
    assert reader.push(f"{begun}Well, ") == ["Well, "]
    assert reader.push("then") == ["then"]


TEMPLATES = {
    GraniteParser: "<|start_of_role|>tools {{ tools }} respond with <|tool_call|>",
    Phi4Parser: "{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}",
    HunyuanParser: '{% if tools %}<tool_calls>[{"name": n, "arguments": a}]</tool_calls>',
    CommandParser: "{% if tools %}<|START_ACTION|>",
    MinistralParser: "[AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}",
    Qwen3CoderParser: "{% if tools %}<tool_call>\n<function=f>\n<parameter=p>\nvalue",
    Lfm2Parser: "List of tools: {{ tools }}<|im_start|>{{ message.role }}",
    Gemma4Parser: '<|turn>{{ tools }}<|tool_call>call:<|"|>',
    Glm45Parser: "[gMASK]{% if tools %}<tool_call>{name}\n<arg_key><|observation|>",
    Glm4Parser: "[gMASK]<sop>{% if tools %}{% endif %}<|observation|>",
    Olmo3Parser: "<functions>{{ message['functions'] }}</functions><function_calls>",
    GemmaParser: "<start_of_turn>{{ message.content }}<end_of_turn>",
    HarmonyParser: "{% if tools %}<|start|>assistant<|channel|>final<|message|>",
    # Granite 4, EXAONE 4, SmolLM3 and ERNIE 4.5 write Hermes' form.
    HermesParser: '<|start_of_role|>{{ tools }}<tool_call>\n{"name": n, "arguments": a}',
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_families_are_known_by_their_templates(kind):
    assert tool_calls.find(TEMPLATES[kind]) is kind
    assert tool_calls.find("<start_of_turn>{{ tools }}<start_function_call>") is None


TAGS = ["<function=weather>", "<parameter=city>", "</parameter>", "</function>"]
_MARKS = sorted({mark for kind in CASES for mark in (*kind.shown, *getattr(kind, "openings", ()))})


@given(
    st.lists(
        st.sampled_from([*_MARKS, *TAGS, W, R7B[0], "now", "now()", "{", "}", "[", "\n", " ", "<"])
    )
)
def test_no_text_is_lost_or_breaks_a_parser(pieces):
    text = "".join(pieces)
    for kind in CASES:
        reader = tool_calls.reader(kind, TOOLS)
        found = [item for piece in pieces for item in reader.push(piece)] + reader.finish()
        joined(found)
        if kind is not HarmonyParser and all(isinstance(item, str) for item in found):
            assert "".join(found) == text

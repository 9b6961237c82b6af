"""Reasoning apart from text and calls: parsed by any cut, streamed, and back into templates."""

from __future__ import annotations

import dataclasses
import re
import shutil

import anyio
import pytest
from answer_cuts import require_read
from lettered_engine import with_letters
from serve_process import serving

from edgellm.core.errors import RequestError
from edgellm.device_runtime import LLM, SamplingParams
from edgellm.device_runtime.api.generation_request import GenerationDefaults
from edgellm.device_runtime.api.llm import Step
from edgellm.device_runtime.engine.chat_template import Formatter
from edgellm.device_runtime.sampling.params import Guide
from edgellm.device_runtime.text.tokenizer import ChatTokenizer
from edgellm.tools.serve.engines.events import Finished
from edgellm.tools.serve.output.chat_output import ChatOutput
from edgellm.tools.serve.protocols.openai.chat import ChatWriter, ask_of, prompt_end
from edgellm.tools.serve.schemas.openai import ChatRequest
from edgellm.tools.serve.settings import ImageRules
from edgellm.tools.serve.tool_calls.formats.hermes import HermesParser
from edgellm.tools.serve.tool_calls.output_format import OutputFormat
from edgellm.tools.serve.tool_calls.parser import Call, ReasoningText

TOOLS = {"weather": None}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
WEATHER = Call("weather", '{"city": "Bonn"}')
HM = ReasoningText("Hm.\nWell.")
QWEN = '<think></think>{% if tools %}<tool_call>"arguments"'
TAGS = {
    "<think>\nHm.\nWell.\n</think>\n\nHi\n": [HM, "Hi\n"],
    f"<think>Hm.\nWell.</think>{CALL}": [HM, WEATHER],
    f"\n<think>\nHm.\nWell.\n</think>\n\nI look.\n{CALL}": [HM, "I look.\n", WEATHER],
    f"<think>{CALL}</think>": [ReasoningText(CALL)],  # it only considers it
    "<think>\n\n</think>\n\nHi": ["Hi"],
    "<think>Hm.\nWell.": [HM],
    "<think>Hm.\nWell. </thin": [ReasoningText("Hm.\nWell. </thin")],
    " no <think>Hm.</think>": [" no <think>Hm.</think>"],
    "a </think> b": ["a </think> b"],
    "": [],
    "\n <thi": ["\n <thi"],
}
INSIDE = {
    "Hm.\nWell.\n</think>\n\nHi": [HM, "Hi"],
    "<think>\nHm.\nWell.</think>Hi": [HM, "Hi"],  # some write the mark again
    "</think>Hi": ["Hi"],
    "< 5": [ReasoningText("< 5")],
    "Hm.\nWell.\n": [HM],
}
WRAPPED = {
    "<think>\nHm.\nWell.\n</think>\n<answer>\nHi\n you\n</answer>\n": [HM, "Hi\n you"],
    "<answer>\nHi\n</answer>": ["Hi"],
    "<think>Hm.\nWell.</think>\n<ans": [HM, "<ans"],
    "<think>Hm.\nWell.</think> Hi </answer>": [HM, "Hi </answer>"],
    "<answer>Hi</answer>\n more": ["Hi\n more"],
}
COMMAND = {
    "<|START_THINKING|>Hm.\nWell.<|END_THINKING|><|START_RESPONSE|>Hi<|END_RESPONSE|>": [HM, "Hi"],
    '<|START_THINKING|>Hm.\nWell.<|END_THINKING|><|START_ACTION|>[{"tool_name": "weather", '
    '"parameters": {"city": "Bonn"}}]<|END_ACTION|>': [HM, WEATHER],
}
MINISTRAL = {
    '[THINK]Hm.\nWell.[/THINK]Hi[TOOL_CALLS]weather[ARGS]{"city": "Bonn"}': [HM, "Hi", WEATHER]
}
GEMMA4_MARKS = '<|tool_call><|"|>tools<|channel>thought\n'
GEMMA4_CALL = '<|tool_call>call:weather{city:<|"|>Bonn<|"|>}<tool_call|>'
CHANNELS = {
    "<|channel>thought\nHm.\nWell.\n<channel|>Hi": [HM, "Hi"],
    f"<|channel>thought\nHm.\nWell.<channel|>{GEMMA4_CALL}": [HM, WEATHER],
    "<|channel>thought\n<channel|>Hi": ["Hi"],
    "<|channel>th": ["<|channel>th"],
    "Hi <channel|>": ["Hi <channel|>"],
}
HUNYUAN = "{% if tools %}<tool_calls>{% endif %}<think></think><answer></answer>"
R7B = "<|START_THINKING|><|START_ACTION|>tools<|START_RESPONSE|>"
CASES = [
    (QWEN, "", TAGS),
    (QWEN, "<|im_start|>assistant\n<think>\n", INSIDE),
    (HUNYUAN, "", WRAPPED),
    (R7B, "", COMMAND),
    ("tools[TOOL_CALLS][ARGS][THINK]", "", MINISTRAL),
    (GEMMA4_MARKS, "<|turn>model\n", CHANNELS),
    (GEMMA4_MARKS, "<tool_response|><|channel>thought\n", {"Hm.\nWell.\n<channel|>Hi": [HM, "Hi"]}),
]


@pytest.mark.parametrize(("template", "end", "cases"), CASES)
def test_reasoning_is_separated_wherever_the_stream_is_cut(template, end, cases):
    form = OutputFormat.of(template, has_tools=True)
    for text, expected in cases.items():
        require_read(lambda: form.reader(TOOLS, end), text, expected)


def test_answers_that_hold_none_are_read_as_before():
    assert OutputFormat.of("{{ messages }}", has_tools=False).reader({}, "") is None
    form = OutputFormat.of(QWEN, has_tools=False)
    assert form.parser is None
    assert OutputFormat.of(QWEN, has_tools=True).parser is HermesParser
    assert OutputFormat.of("{% if tools %}<tool_call>", has_tools=False).shown_tokens == ()


# Each as its family documents it, as short as can be.
HARMONY = (
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}<|start|>functions.{{ ns }} to=assistant<|channel|>commentary"
    "<|message|>{{ m.content | tojson }}<|end|>"
    "{%- elif m.tool_calls %}{%- if m.content and m.thinking %}{{ raise_exception('both') }}"
    "{%- endif %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{%- set f = m.tool_calls[0].function %}<|start|>assistant to=functions.{{ f.name }}<|channel|>"
    "commentary json<|message|>{{ f.arguments | tojson }}<|call|>"
    "{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{%- endif %}{%- endfor %}"
    "{%- if tools %}{%- endif %}<|start|>assistant"
)
QWEN3 = (
    '{%- if tools %}<tool_call>"arguments"{%- endif %}{%- for m in messages %}{{ m.role }}:'
    "{%- if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}"
    "{%- endif %}{{ m.content }}{%- for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function | tojson }}</tool_call>{%- endfor %};{%- endfor %}assistant:"
    "{%- if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}"
)
MINISTRAL3 = (
    "{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{%- elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{%- else %}"
    "{%- for block in m.content %}{%- if block.type == 'thinking' %}[THINK]{{ block.thinking }}"
    "[/THINK]{%- else %}{{ block.text }}{%- endif %}{%- endfor %}"
    "{%- for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments | tojson(ensure_ascii=False) }}{%- endfor %}</s>{%- endif %}"
    "{%- endfor %}"
)
GEMMA4 = (
    "{%- if tools %}<|tool>declaration:{{ tools[0].function.name }}<tool|>{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'tool' %}<|tool_response>{{ m.content }}"
    "<tool_response|>{%- else %}"
    "{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}{%- if m.reasoning %}"
    "{{ '<|channel>thought\n' + m.reasoning + '\n<channel|>' }}{%- endif %}{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}{{ '<|tool_call>call:' + c.function.name + '{' }}"
    "{%- for key, value in c.function.arguments | dictsort %}"
    "{{ key + ':<|\"|>' + value + '<|\"|>' }}{%- endfor %}{{ '}<tool_call|>' }}{%- endfor %}"
    "{%- if not m.tool_calls %}{{ '<turn|>\n' }}{%- endif %}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{%- if messages[-1].role != 'tool' %}{{ '<|turn>model\n' }}"
    "{%- if enable_thinking is false %}{{ '<|channel>thought\n<channel|>' }}{%- endif %}"
    "{%- elif enable_thinking %}{{ '<|channel>thought\n' }}{%- endif %}{%- endif %}"
)
GEMMA3 = (
    "{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{%- endif %}<start_of_turn>"
    "{{ ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim }}"
    "{{ '<end_of_turn>\n' }}{%- endfor %}{{ '<start_of_turn>model\n' }}"
)
PHI4 = (
    "{%- for m in messages %}{%- if m.role == 'system' and 'tools' in m %}<|system|>{{ m.content }}"
    "<|tool|>{% set message = m %}{{ message['tools'] }}<|/tool|><|end|>{%- else %}<|{{ m.role }}|>"
    "{{ m.content }}<|end|>{%- endif %}{%- endfor %}<|assistant|>"
)
ROUNDS = {
    HARMONY: (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.weather <|constrain|>json<|message|>{"city": "Bonn"}<|call|>',
        "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant "
        'to=functions.weather<|channel|>commentary json<|message|>{"city": "Bonn"}<|call|>',
    ),
    QWEN3: (
        f"<think>\nHm.\n</think>\n\n{CALL}",
        'assistant:<think>\nHm.\n</think>\n\n<tool_call>{"name": "weather", "arguments": '
        '{"city": "Bonn"}}</tool_call>;tool:sunny;',
    ),
    MINISTRAL3: (
        '[THINK]Hm.[/THINK][TOOL_CALLS]weather[ARGS]{"city": "Bonn"}',
        '[INST]Bonn?[/INST][THINK]Hm.[/THINK][TOOL_CALLS]weather[ARGS]{"city": "Bonn"}</s>'
        "[TOOL_RESULTS]sunny[/TOOL_RESULTS]",
    ),
    GEMMA4: (
        f"<|channel>thought\nHm.\n<channel|>{GEMMA4_CALL}",
        f"<|turn>model\n<|channel>thought\nHm.\n<channel|>{GEMMA4_CALL}<|tool_response>sunny<tool_resp",
    ),
    GEMMA3: (
        "```tool_code\nweather(city='Bonn')\n```",
        "<start_of_turn>model\n```tool_code\nweather(city='Bonn')\n```<end_of_turn>\n"
        "<start_of_turn>user\n```tool_output\nsunny\n```<end_of_turn>\n",
    ),
    PHI4: (
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Bonn"}}]<|/tool_call|>',
        '<|assistant|><|tool_call|>[{"name": "weather", "arguments": {"city": "Bonn"}}]'
        "<|/tool_call|><|end|><|tool_response|>sunny<|end|>",
    ),
}
TOOL = {"name": "weather", "parameters": {"type": "object"}}
ASKED = {"tools": [{"type": "function", "function": TOOL}]}
QUESTION = {"role": "user", "content": "Bonn?"}
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


class _Model:
    """As much of an `LLM` as a chat needs to know."""

    def __init__(self, folder):
        self.tokenizer, self.manifest = ChatTokenizer(folder), self
        self.images = self.audio = None
        self.formatter, self.eos_token_ids = Formatter(self.tokenizer), (2,)
        self.defaults = GenerationDefaults()


@pytest.fixture
def model(roomy_engine, tmp_path):
    def made(template):
        shutil.copy(roomy_engine / "tokenizer.json", tmp_path)
        (tmp_path / "chat_template.jinja").write_text(template)
        return _Model(tmp_path)

    return made


def _text(model, *messages, **more):
    body = ChatRequest.model_validate({"messages": list(messages), **more})
    ask = anyio.run(ask_of, body, model, ImageRules())
    return body, model.formatter.format(ask.prompt, ask.template_flags)


@pytest.mark.parametrize("template", ROUNDS)
def test_reasoning_calls_and_results_go_back_into_the_template(model, template):
    answered, expected = ROUNDS[template]
    model = model(template)
    body, text = _text(model, QUESTION, **ASKED)
    assert "weather" in text or template in (HARMONY, QWEN3)  # these show no tools here
    writer = ChatWriter(body=body, llm=model, model="m")
    events = [event for letter in answered for event in writer.step(Step((9,), letter))]
    events += writer.end(FIGURES)
    choice = writer.whole(FIGURES)["choices"][0]
    message, deltas = choice["message"], [event["choices"][0]["delta"] for event in events]
    thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert thought == "".join(delta.get("reasoning", "") for delta in deltas)
    assert thought == message.get("reasoning_content", "")
    assert thought == ("" if template in (GEMMA3, PHI4) else "Hm.")
    assert [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert choice["finish_reason"] == "tool_calls"
    cut = ChatWriter(body=body, llm=model, model="m")
    cut.step(Step((9,), answered))
    found = cut.whole(dataclasses.replace(FIGURES, finish_reason="length"))
    assert found["choices"][0]["finish_reason"] == "length"
    result = {"role": "tool", "content": "sunny", "tool_call_id": message["tool_calls"][0]["id"]}
    _, text = _text(model, QUESTION, message, result, **ASKED)
    assert expected in text


def test_gpt_oss_takes_a_text_and_reasoning_before_a_call(model):
    call = {"id": "1", "function": {"name": "weather", "arguments": "{}"}}
    turn = {"role": "assistant", "content": "I look.", "reasoning": "Hm.", "tool_calls": [call]}
    result = {"role": "tool", "content": "sunny", "tool_call_id": "1"}
    _, text = _text(model(HARMONY), QUESTION, turn, result, **ASKED)
    assert "<|message|>Hm.\nI look.<|end|>" in text


def test_whether_reasoning_has_begun_is_read_off_the_prompt(model):
    begun = "{%- if enable_thinking %}<think>{%- else %}<think></think>{%- endif %}"
    model = model("{{ messages[0].content }}" + begun)
    ends = []
    for thinks in (True, False):
        flags = {"enable_thinking": thinks}
        body = ChatRequest.model_validate({"messages": [QUESTION], "chat_template_kwargs": flags})
        ask = anyio.run(ask_of, body, model, ImageRules())
        ends.append(anyio.run(prompt_end, ask, body, model))
        writer = ChatWriter(body=body, llm=model, model="m", prompt_end=ends[-1])
        writer.step(Step((9,), "Hm.</think>Hi"))
        message = writer.whole(FIGURES)["choices"][0]["message"]
        expected = ("Hi", "Hm.") if thinks else ("Hm.</think>Hi", None)
        assert (message["content"], message.get("reasoning_content")) == expected
    assert ends == ["Bonn?<think>", "Bonn?<think></think>"]


@pytest.mark.parametrize(
    ("begun", "answered", "reasoning", "content"),
    [
        ("<think>Hm, a", " city.</think>Bonn", " city.", "Bonn"),
        ("<think>\n", "\nA city.</think>Bonn", "A city.", "Bonn"),
        ("<think>Hm.</think>Bon", "n is", None, "n is"),
        ("Bon", "n is", None, "n is"),
    ],
)
def test_a_message_that_is_continued_may_be_inside_its_reasoning(
    model, begun, answered, reasoning, content
):
    model = model("{% for m in messages %}{{ m.content }}{% endfor %}{# <think></think> #}")
    turns = [{**QUESTION, "content": "what is <think>?"}, {"role": "assistant", "content": begun}]
    body = ChatRequest.model_validate({"messages": turns})
    ask = anyio.run(ask_of, body, model, ImageRules())
    end = anyio.run(prompt_end, ask, body, model)
    writer = ChatWriter(body=body, llm=model, model="m", prompt_end=end)
    writer.step(Step((9,), answered))
    message = writer.whole(FIGURES)["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)


def test_required_special_tokens_stay_in_the_text(model):
    tokenizer = model("{{ messages }}").tokenizer
    special = ["<s>", "</s>"]
    ids = tokenizer.added_ids(special)
    some = tokenizer.encode("a", add_special_tokens=False)
    for shown in ((), special[:1], special):
        stream = tokenizer.stream(shown)
        pieces = [stream.push(one) for one in [*some, *ids.values(), *some]]
        text = "".join(pieces) + stream.finish()
        assert [token for token in special if token in text] == list(shown)


def test_a_server_separates_reasoning(roomy_engine, tmp_path):
    template = (
        "{%- for m in messages %}{{ m.content }}{%- endfor %}"
        "{%- if enable_thinking %}<think>{%- endif %}"
    )
    engine = with_letters(roomy_engine, tmp_path / "engine", chat_template=template)
    asked = {"messages": [QUESTION], "max_tokens": 20, "temperature": 0}
    with serving(engine) as server:
        path = "/v1/chat/completions"
        plain = server.json(path, asked)[1]["choices"][0]["message"]
        assert plain["content"]
        assert "reasoning" not in plain
        asked["chat_template_kwargs"] = {"enable_thinking": True}
        thought = server.json(path, asked)[1]["choices"][0]["message"]
        assert thought["reasoning"] == thought["reasoning_content"] != ""
        assert thought["content"] == ""
        back = {**asked, "messages": [QUESTION, thought, QUESTION]}
        assert server.json(path, back)[0] == 200


CHANNELED = (
    "{# <|channel|> #}{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def test_a_form_of_gpt_oss_is_in_the_final_channel(roomy_engine, tmp_path):
    engine = with_letters(roomy_engine, tmp_path / "engine", chat_template=CHANNELED)
    turns = [{"role": "user", "content": "Bonn?"}]
    with LLM(engine) as llm:
        (final,) = llm.tokenizer.encode("f", add_special_tokens=False)  # not analysis
        sampling = SamplingParams(
            temperature=0, guide=Guide("choice", '["yes", "no"]'), logit_bias={final: 100}
        )
        answer = llm.generate(turns, sampling=sampling, max_generate_length=60)
        text = "".join(step.text for step in answer)
        assert re.fullmatch(r"<\|channel\|>final<\|message\|>(yes|no)", text)
        assert answer.finish_reason == "stop"
        body = ChatRequest.model_validate({"messages": turns})
        output = ChatOutput(body, llm)
        output.push(text)
        output.finish()
        assert output.text in ("yes", "no")
        turns.append({"role": "assistant", "content": "y"})  # is continued
        answer = llm.generate(turns, sampling=sampling, max_generate_length=60)
        assert "".join(step.text for step in answer) in ("yes", "no")


def test_gemma_reads_several_results_in_one_turn(model):
    calls = [
        {"id": "1", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}},
        {"id": "2", "function": {"name": "stop.it-now", "arguments": "{}"}},
    ]
    results = [{"role": "tool", "content": word, "tool_call_id": "1"} for word in ("sunny", "so")]
    turn = {"role": "assistant", "content": "I look.\n", "tool_calls": calls}
    parts = {"role": "user", "content": [{"type": "text", "text": "And now?"}]}
    _, text = _text(model(GEMMA3), QUESTION, turn, *results, parts)
    assert text.endswith(
        "<start_of_turn>model\nI look.\n```tool_code\nweather(city='Bonn')\n"
        '{"name": "stop.it-now", "parameters": {}}\n```<end_of_turn>\n<start_of_turn>user\n'
        "```tool_output\nsunny\n```\n```tool_output\nso\n```\nAnd now?<end_of_turn>\n"
        "<start_of_turn>model\n"
    )
    assert "These functions" not in text  # none are given now


def test_messages_without_tools_are_left_to_the_template(model):
    _, text = _text(model(GEMMA3), QUESTION, {"role": "assistant", "content": "Hi"}, QUESTION)
    assert text.count("Bonn?") == 2
    with pytest.raises(RequestError, match="roles must alternate"):
        _text(model(GEMMA3), QUESTION, QUESTION)

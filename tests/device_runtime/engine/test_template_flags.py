"""Variables that a chat template does not use: jinja2's rendering is the reference."""

from __future__ import annotations

import inspect

import pytest
from chat_templates import TEMPLATES
from conftest import write_tokenizer
from jinja2 import TemplateError

from edgellm.core.errors import RequestError
from edgellm.device_runtime import LLM, SamplingParams
from edgellm.device_runtime.engine.chat_template import Formatter
from edgellm.device_runtime.engine.template_flags import GENERATE
from edgellm.device_runtime.text.tokenizer import ChatTokenizer, _environment

SYSTEM = {"role": "system", "content": "w9"}
USER = [{"role": "user", "content": "w20"}]
MACROS = (
    "{%- macro shown(item, style='plain') %}{{ item }}{{ style }}{{ greeting }}{%- endmacro %}"
    "{%- for m in messages %}{%- set ns = namespace(seen=false) %}{{ shown(m.content) }}"
    "{%- if not inner %}{{ loop.index }}{%- endif %}{%- endfor %}"
    "{%- if bos_token is defined and (strftime_now is defined) %}{{ bos_token }}{%- endif %}"
    "{%- macro boxed() %}[{{ caller('b') }}]{%- endmacro %}"
    "{%- call(x) boxed() %}{{ x }}{%- endcall %}{%- with local = outer %}{{ local }}{%- endwith %}"
    "{%- set tone = tone | default('calm') %}{{ tone }}"
    "{%- set block %}{{ inside }}{% endset %}{{ block }}{{ 'a' if tone else other }}"
)
NAMES = (
    "greeting",
    "inner",
    "tone",
    "style",
    "ns",
    "item",
    "m",
    "date_string",
    "tools",
    "tools_in_user_message",
    "enable_thinking",
    "custom_tools",
    "loop",
    "system_message",
    "reasoning_content",
    "max_tokens",
    "role",
    "local",
    "outer",
    "block",
    "inside",
    "x",
)


READ_WITHOUT_EFFECT = (
    ("Llama 3", "tools_in_user_message"),
    ("Llama 3", "custom_tools"),
    ("macros", "other"),
)  # shortened templates


def _tokenizer(folder, template: str) -> ChatTokenizer:
    write_tokenizer(folder, 40)
    (folder / "chat_template.jinja").write_text(template)
    return ChatTokenizer(folder)


def _looked_up(template: str) -> set[str]:
    """Variables that a rendering uses: another value changes the text, or fails."""
    compiled, found = _environment().from_string(template), set[str]()
    given = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}

    def rendered(turns, **flags) -> str:
        try:
            return compiled.render(messages=turns, **given, **flags)
        except (TypeError, TemplateError):
            return "a fault"

    for turns in ([SYSTEM, *USER], USER, [*USER, {"role": "assistant", "content": "w21"}]):
        for name in NAMES:
            found |= {
                name
                for value in ("other", False)
                if rendered(turns) != rendered(turns, **{name: value})
            }
    return found


@pytest.mark.parametrize("name", [*TEMPLATES, "macros"])
def test_variables_are_accepted_if_the_template_uses_them(tmp_path, name):
    template = {**TEMPLATES, "macros": MACROS}[name]
    formatter = Formatter(_tokenizer(tmp_path, template))
    read = _looked_up(template)
    for flag in NAMES:
        if flag in read or flag in ("tools", "enable_thinking"):
            formatter.format(USER, {flag: False if flag == "enable_thinking" else "a"})
        elif (name, flag) not in READ_WITHOUT_EFFECT:
            with pytest.raises(RequestError, match=f"^{flag} is no variable of the model's chat"):
                formatter.format(USER, {flag: "a"})


def test_variables_of_transformers_are_known(tmp_path):
    formatter = Formatter(_tokenizer(tmp_path, "{{ messages[0].content }}"))
    for flags in (
        {"tools": []},
        {"documents": []},
        {"add_generation_prompt": False},
        {"enable_thinking": False},
        {"thinking": None},
        {"tools": None},
    ):
        assert formatter.format(USER, flags) == "w20"
    for name in ("enable_thinking", "thinking"):
        with pytest.raises(RequestError, match=f"{name}: the model's chat template has no switch"):
            formatter.format(USER, {name: True})
    with pytest.raises(RequestError, match="enable_thinking 'no' is not True or False"):
        formatter.format(USER, {"enable_thinking": "no"})
    with pytest.raises(RequestError, match="messages is no variable"):
        formatter.format(USER, {"messages": []})


def test_the_tokens_of_the_tokenizer_can_be_replaced_as_in_transformers(tmp_path):
    formatter = Formatter(_tokenizer(tmp_path, "{{ bos_token }}{{ messages[0].content }}"))
    assert formatter.format(USER, {"bos_token": "w9"}) == "w9w20"


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("max_tokens", "give max_generate_length=..."),
        ("max_generate_lenght", "did you mean max_generate_length=...?"),
        ("max_new_tokens", "give max_generate_length=..."),
        ("temperature", "give sampling=SamplingParams(temperature=...)"),
        ("seed", "give sampling=SamplingParams(seed=...)"),
        ("tempreature", "did you mean sampling=SamplingParams(temperature=...)?"),
        ("top-p", "did you mean sampling=SamplingParams(top_p=...)?"),
        ("response_format", "give sampling=SamplingParams(guide=...)"),
        ("stop_sequences", "give stop=..."),
        ("date_sting", "did you mean date_string?"),
        ("zzz", "it reads add_generation_prompt, bos_token, custom_tools, date_string, tools, "),
    ],
)
def test_hints_name_the_intended_option(tmp_path, flag, hint):
    formatter = Formatter(_tokenizer(tmp_path, TEMPLATES["Llama 3"]))
    with pytest.raises(RequestError, match="is no variable of the model's chat template") as caught:
        formatter.format(USER, {flag: 4})
    assert caught.value.hint.startswith(hint)


def test_hints_for_python_options(tiny_engine):
    with LLM(tiny_engine) as llm:
        for start in (llm.generate, lambda prompt, **more: llm.generate_batch([prompt], **more)):
            for prompt, fault in ((USER, "is no variable"), ("w20", "does not go with raw text")):
                with pytest.raises(RequestError, match=f"seed {fault}") as caught:
                    start(prompt, seed=99)
                assert caught.value.hint == "give sampling=SamplingParams(seed=...)"
        with pytest.raises(RequestError, match="seed is no variable"):
            llm.generate_batch([], seed=99)
        sampling = SamplingParams(temperature=0)
        llm.generate_batch([], max_generate_length=3, sampling=sampling, add_generation_prompt=True)
    own = [one for one in inspect.signature(LLM.generate).parameters.values() if one.kind == 3]
    assert tuple(one.name for one in own) == GENERATE

"""Keyword variables of chat templates: names that the template does not use are rejected."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any

from edgellm.core.errors import RequestError
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.device_runtime.text.tokenizer import ChatTokenizer

# Given by transformers to every template, and interpreted by the formatter itself.
GIVEN = ("tools", "documents", "add_generation_prompt", "continue_final_message")
THINKING = ("enable_thinking", "thinking")
# Options of `LLM.generate`.
GENERATE = ("sampling", "max_generate_length", "stop", "speculative", "priority", "lora")
_SYNONYMS = {
    "max_tokens": "max_generate_length",
    "max_new_tokens": "max_generate_length",
    "max_completion_tokens": "max_generate_length",
    "max_output_tokens": "max_generate_length",
    "max_length": "max_generate_length",
    "num_predict": "max_generate_length",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "stop_words": "stop",
    "sampling_params": "sampling",
    "lora_name": "lora",
    "lora_request": "lora",
    "adapter": "lora",
    "logprobs": "num_logprobs",
    "top_logprobs": "num_logprobs",
    "repeat_penalty": "repetition_penalty",
    "response_format": "guide",
    "guided_decoding": "guide",
    "grammar": "guide",
}
PYTHON = {
    **{name: f"{name}=..." for name in GENERATE},
    **{each.name: f"sampling=SamplingParams({each.name}=...)" for each in fields(SamplingParams)},
}


def require_known(
    flags: Mapping[str, Any],
    tokenizer: ChatTokenizer,
    own: Mapping[str, str] = PYTHON,
    *,
    fixed: Collection[str] = ("messages",),
    place: str = "",
) -> None:
    """Reject variables that the chat template does not use.

    Args:
        flags: variables for the template.
        tokenizer: with the template.
        own: options outside of the template, and how to give each.
        fixed: variables that are given in another way.
        place: prefix of variable names in errors.

    Raises:
        RequestError: a name is unused, or a switch is neither True nor False.
    """
    for name in flags:
        if name in fixed or not (
            name in (*GIVEN, *THINKING) or name in tokenizer.template_variables()
        ):
            read = tokenizer.template_variables()
            raise RequestError(
                f"{place}{name} is no variable of the model's chat template",
                hint=_suggestion(name, read, own),
            )
    for name in THINKING:
        if flags.get(name) not in (None, True, False):
            raise RequestError(f"{place}{name} {flags[name]!r} is not True or False")
        if flags.get(name) and not can_think(tokenizer):
            raise RequestError(
                f"{place}{name}: the model's chat template has no switch for thinking",
                hint=f"leave {name} out",
            )


def can_think(tokenizer: ChatTokenizer) -> bool:
    """Whether the chat template has a switch for thinking."""
    return not tokenizer.template_variables().isdisjoint(THINKING)


def refuse_flags(flags: Mapping[str, object]) -> None:
    """Raise `RequestError`, since raw text does not use a template."""
    for name in flags:
        hint = _suggestion(name, (), PYTHON)
        raise RequestError(
            f"{name} does not go with raw text",
            hint=hint or "variables of the chat template go with messages",
        )


def _suggestion(name: str, read: Iterable[str], own: Mapping[str, str]) -> str:
    """A hint with the name that was probably meant."""
    meant = name if name in own else _SYNONYMS.get(name, "")
    if meant in own:
        return f"give {own[meant]}"
    meanings = {name: own[meant] for name, meant in _SYNONYMS.items() if meant in own}
    meanings |= {**own, **{name: name for name in read}}
    if close := difflib.get_close_matches(name, meanings, n=1):
        return f"did you mean {meanings[close[0]]}?"
    known = ", ".join(sorted(set(read) - {"messages"}))
    return f"it reads {known}" if known else ""

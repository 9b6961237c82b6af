"""Running a request file: every request gets a response, the bad ones an error object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgellm.contract import RequestError
from edgellm.device_runtime.llm import LLM, Answer
from edgellm.device_runtime.profile import Profile
from edgellm.device_runtime.requests import Options, Request, parse_request
from edgellm.device_runtime.sampling import SamplingParams

OnText = Callable[[int, str], None]  # request index, new text


def run_request(
    llm: LLM, options: Options, raw: Any, index: int, profile: Profile, on_text: OnText
) -> dict[str, Any]:
    """Answer one request of a file.

    Args:
        llm: the engine.
        options: the file's.
        raw: the request as parsed JSON.
        index: its place in the file.
        profile: receives the times.
        on_text: told the text as it comes.

    Returns:
        A response object; a request that cannot be answered has `error` in it.
    """
    head: dict[str, Any] = {"request_idx": index, "batch_idx": 0}
    try:
        request = parse_request(raw, index)
        own = request.merged(options)
        messages = [
            {"role": message.role, "content": message.text(f"$.requests[{index}].messages[{at}]")}
            for at, message in enumerate(request.messages)
        ]
        system, text = _format(llm, own, messages)
        answer = llm.generate_text(
            text,
            add_special_tokens=not own.apply_chat_template,
            sampling=SamplingParams(own.temperature, own.top_p, own.top_k, own.seed),
            max_generate_length=own.max_generate_length,
            stop=[own.stop] if isinstance(own.stop, str) else own.stop,
        )
        for step in answer:
            on_text(index, step.text)
    except RequestError as error:
        detail = {"message": str(error)} | ({"hint": error.hint} if error.hint else {})
        return {"output_text": "", **head, "finish_reason": "error", "error": detail}
    _add(profile, answer)
    return {"output_text": answer.text, **head, **_response(request, answer, system, text)}


def _format(llm: LLM, options: Options, messages: list[dict[str, str]]) -> tuple[str, str]:
    """The formatted system prompt and the whole formatted request."""
    if not options.apply_chat_template:
        system = "".join(m["content"] for m in messages if m["role"] == "system")
        return system, "".join(m["content"] for m in messages)
    text = llm.tokenizer.render(
        messages,
        add_generation_prompt=options.add_generation_prompt,
        enable_thinking=options.enable_thinking,
    )
    system_messages = [m for m in messages if m["role"] == "system"]
    try:
        system = llm.tokenizer.render(system_messages) if system_messages else ""
    except RequestError:  # templates may insist on a user message
        system = ""
    return system, text


def _response(request: Request, answer: Answer, system: str, text: str) -> dict[str, Any]:
    response: dict[str, Any] = {
        "finish_reason": answer.finish_reason,
        "prompt_token_count": answer.prompt_token_count,
        "generated_token_count": len(answer.token_ids),
        "timings": answer.timings(),
        "messages": [
            {
                "role": message.role,
                "content": [{"type": "text", "text": message.text("")}],
            }
            for message in request.messages
        ],
        "formatted_system_prompt": system,
        "formatted_complete_request": text,
    }
    if answer.warnings:
        response["warnings"] = answer.warnings
    return response


def _add(profile: Profile, answer: Answer) -> None:
    profile.prompt_tokens += answer.profile.prompt_tokens
    profile.generated_tokens += answer.profile.generated_tokens
    for name, samples in answer.profile.stages_ms.items():
        profile.stages_ms.setdefault(name, []).extend(samples)

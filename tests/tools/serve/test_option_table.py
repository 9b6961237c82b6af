"""Every option of a request in every protocol: it arrives, or the request is rejected."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from pydantic import ValidationError

from edgellm.core.errors import RequestError
from edgellm.device_runtime.api.generation_request import GenerationDefaults
from edgellm.device_runtime.request_files.request_file import Options, parse_request, sampling_of
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.tools.serve.http.errors import ApiError
from edgellm.tools.serve.protocols.anthropic.messages import MessagesRequest
from edgellm.tools.serve.protocols.kserve.tensors import INPUTS, read, request_of
from edgellm.tools.serve.protocols.ollama import OllamaChat, OllamaGenerate
from edgellm.tools.serve.protocols.openai.responses import ResponsesRequest
from edgellm.tools.serve.protocols.triton.generate import GenerateRequest
from edgellm.tools.serve.schemas.openai import ChatRequest, CompletionRequest

DEFAULTS = GenerationDefaults()
MESSAGES = [{"role": "user", "content": "Hi"}]
# Of each option: a value as JSON has it, and as the sampler gets it.
VALUES = {
    "temperature": (0.5, 0.5),
    "top_p": (0.25, 0.25),
    "top_k": (7, 7),
    "seed": (9, 9),
    "min_p": (0.125, 0.125),
    "repetition_penalty": (1.25, 1.25),
    "presence_penalty": (0.5, 0.5),
    "frequency_penalty": (0.75, 0.75),
    "min_tokens": (2, 2),
    "ignore_eos": (True, True),
    "logit_bias": ({"5": 1.5}, {5: 1.5}),
    "stop_token_ids": ([7, 8], (7, 8)),
    "bad_words": (["no", "never"], ("no", "never")),
}
# A protocol's own names.
ENSEMBLE = {"min_tokens": "min_length", "seed": "random_seed"}
OLLAMA = {"repetition_penalty": "repeat_penalty"}


def _sampled(chat: ChatRequest | CompletionRequest) -> SamplingParams:
    return chat.sampling(DEFAULTS, None, None)


def _triton(**body: object) -> SamplingParams:
    return GenerateRequest.model_validate({"text_input": "Hi", **body}).ask(DEFAULTS).sampling


def _tensors(**body: object) -> SamplingParams:
    """As Triton's clients send them: an object is a text of JSON."""
    found = [read("text_input", "BYTES", [1], ["Hi"])]
    for name, value in body.items():
        values = value if isinstance(value, list) else [value]
        values = [json.dumps(one) if isinstance(one, dict) else one for one in values]
        found.append(read(name, INPUTS[name], [len(values)], values))
    return request_of(found, "").ask(DEFAULTS).sampling


def _ollama(kind: type[OllamaChat | OllamaGenerate], **options: object) -> ChatRequest:
    body = {"model": "m", "options": options, "messages": MESSAGES}
    if kind is OllamaGenerate:
        body = {"model": "m", "options": options, "prompt": "Hi"}
    return kind.model_validate(body).as_chat()


PROTOCOLS = {
    "chat": lambda **given: _sampled(ChatRequest.model_validate({"messages": MESSAGES, **given})),
    "completion": lambda **given: _sampled(
        CompletionRequest.model_validate({"prompt": "Hi", **given})
    ),
    "responses": lambda **given: _sampled(
        ResponsesRequest.model_validate({"input": "Hi", **given}).as_chat()
    ),
    "anthropic": lambda **given: _sampled(
        MessagesRequest.model_validate({"messages": MESSAGES, "max_tokens": 9, **given}).as_chat()
    ),
    "ollama chat": lambda **given: _sampled(_ollama(OllamaChat, **given)),
    "ollama generate": lambda **given: _sampled(_ollama(OllamaGenerate, **given)),
    "ollama raw": lambda **given: _sampled(
        OllamaGenerate.model_validate(
            {"model": "m", "prompt": "Hi", "raw": True, "options": given}
        ).as_completion()
    ),
    "triton ensemble": _triton,
    "triton vllm": lambda **given: _triton(parameters=given),
    "triton llmapi": lambda **given: _triton(
        **{f"sampling_param_{name}": value for name, value in given.items()}
    ),
    "kserve": _tensors,
    "file": lambda **given: sampling_of(
        parse_request({"messages": MESSAGES, **given}, 0).merged(Options())
    ),
}
NAMES = {"triton ensemble": ENSEMBLE, "kserve": ENSEMBLE} | {
    f"ollama {kind}": OLLAMA for kind in ("chat", "generate", "raw")
}


def test_the_table_has_all_options():
    all_of_them = {one.name for one in fields(SamplingParams)}
    assert set(VALUES) == all_of_them - {"guide", "num_logprobs"}


@pytest.mark.parametrize("option", VALUES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_option_arrives(protocol, option):
    given, expected = VALUES[option]
    name = NAMES.get(protocol, {}).get(option, option)
    more = {} if option in ("temperature", "top_p", "top_k") else {"temperature": 0.5}
    found = PROTOCOLS[protocol](**more, **{name: given})
    assert getattr(found, option) == expected


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_value_is_the_default(protocol):
    found = PROTOCOLS[protocol]()
    assert (found.logit_bias, found.stop_token_ids, found.bad_words) == ({}, (), ())


FAULTY = {
    "logit_bias": {"5": 101},
    "stop_token_ids": [-1],
    "bad_words": [""],
    "min_tokens": -1,
    "top_p": 2,
    "presence_penalty": 3,
}
EMPTY_IS_NONE = ("triton ensemble", "kserve")  # TensorRT-LLM's clients send one empty word


@pytest.mark.parametrize("option", FAULTY)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_faulty_value_is_rejected(protocol, option):
    name = NAMES.get(protocol, {}).get(option, option)
    if option == "bad_words" and protocol in EMPTY_IS_NONE:
        assert PROTOCOLS[protocol](**{name: FAULTY[option]}).bad_words == ()
        return
    with pytest.raises((ValidationError, RequestError, ApiError), match=name):
        PROTOCOLS[protocol](**{name: FAULTY[option]})


STOPS = {
    "chat": ("stop", lambda body: ChatRequest.model_validate({"messages": MESSAGES, **body})),
    "completion": ("stop", lambda body: CompletionRequest.model_validate({"prompt": "Hi", **body})),
    "responses": (
        "stop",
        lambda body: ResponsesRequest.model_validate({"input": "Hi", **body}).as_chat(),
    ),
    "anthropic": (
        "stop_sequences",
        lambda body: MessagesRequest.model_validate(
            {"messages": MESSAGES, "max_tokens": 9, **body}
        ).as_chat(),
    ),
    "ollama": ("stop", lambda body: _ollama(OllamaChat, **body)),
}
TRITON_STOPS = {
    "triton ensemble": lambda stop: {"stop_words": stop},
    "triton vllm": lambda stop: {"parameters": {"stop": stop}},
    "triton llmapi": lambda stop: {"sampling_param_stop": stop},
}


def test_stop_strings_arrive():
    for name, make in STOPS.values():
        assert make({name: ["a", "b"]}).stops() == ("a", "b")
    for make in TRITON_STOPS.values():
        body = GenerateRequest.model_validate({"text_input": "Hi", **make(["a", "b"])})
        assert body.ask(DEFAULTS).stop == ("a", "b")


def test_triton_joins_the_end_token_and_further_ones():
    assert _triton(end_id=3, stop_token_ids=[7]).stop_token_ids == (7, 3)
    for text in ("x", "[5]"):
        with pytest.raises(ApiError, match="logit_bias: not"):
            request_of([read("logit_bias", "BYTES", [1], [text])], "")

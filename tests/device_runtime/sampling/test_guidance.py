"""Guided decoding with random models, which would not follow the guide by themselves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jsonschema_rs
import numpy as np
import pytest
from lettered_engine import with_letters

from edgellm.core.errors import (
    EdgeLLMError,
    RequestError,
)
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.device_runtime.request_files.request_file import Options, parse_request, sampling_of
from edgellm.device_runtime.request_files.responses import run_request
from edgellm.device_runtime.sampling.guidance import Guidance, Guide
from edgellm.device_runtime.sampling.sampler import Sampler
from edgellm.device_runtime.speculate.acceptance import Typical

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 99},
        "b": {"enum": ["x", "yy"]},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
GUIDES = {
    "json_schema": Guide.of_schema(SCHEMA),
    "regex": Guide("regex", "[a-c]{3,5}-[0-9]+[#]"),
    "choice": Guide("choice", '["yes", "no", "perhaps"]'),
    "ebnf": Guide("ebnf", 'root ::= ("ab" | "cd") root | "."'),
}


def keeps_form(kind: str, text: str) -> bool:
    if kind == "json_schema":
        found = json.loads(text)
        return 0 <= found["a"] <= 99 and found["b"] in ("x", "yy") and len(found) == 2
    if kind == "regex":
        return re.fullmatch("[a-c]{3,5}-[0-9]+[#]", text) is not None
    if kind == "ebnf":
        return re.fullmatch("(ab|cd)*[.]", text) is not None
    return text in ("yes", "no", "perhaps")


@pytest.fixture(scope="module")
def lettered(eagle_pair, tmp_path_factory) -> Path:
    return with_letters(eagle_pair.engine, tmp_path_factory.mktemp("lettered") / "engine")


@pytest.fixture(scope="module")
def llm(lettered) -> LLM:
    return LLM(lettered, spec=SpecOptions(top_k=4, steps=4, verify_size=16, tree="fixed"))


@pytest.mark.parametrize("temperature", [0.0, 4.0])
@pytest.mark.parametrize("kind", GUIDES)
def test_guided_outputs_match_and_are_lossless(llm, kind, temperature):
    texts = set()
    for seed in range(4):
        sampling = SamplingParams(
            temperature=temperature, top_p=1.0, top_k=0, seed=seed, guide=GUIDES[kind]
        )
        ids = []
        for speculative in (False, True):
            answer = llm.generate(
                "Hi", sampling=sampling, max_generate_length=90, speculative=speculative
            )
            list(answer)
            assert keeps_form(kind, answer.text) or answer.finish_reason == "length"
            ids.append(answer.token_ids)
        assert ids[0] == ids[1]
        texts.add(answer.text)
        if kind in ("json_schema", "choice"):
            assert answer.finish_reason == "stop"
    assert temperature == 0 or len(texts) > 1


@pytest.mark.parametrize("count", [2500, 20_000])
def test_thousands_of_choices(llm, count):
    choices, texts = [f"{at:05} it" for at in range(count)], set()
    for seed in range(3):
        guide = Guide("choice", json.dumps(choices))
        answer = llm.generate(
            "Hi",
            sampling=SamplingParams(temperature=4.0, top_p=1.0, top_k=0, seed=seed, guide=guide),
        )
        list(answer)
        assert answer.finish_reason == "stop"
        assert answer.text in choices
        texts.add(answer.text)
    assert len(texts) > 1


def test_choices_with_a_common_prefix(llm):
    guide = Guide("choice", '["yes", "yes.", "yesno"]')
    texts = set()
    for seed in range(12):
        answer = llm.generate(
            "Hi",
            sampling=SamplingParams(temperature=4.0, top_p=1.0, top_k=0, seed=seed, guide=guide),
        )
        list(answer)
        texts.add(answer.text)
    assert texts == {"yes", "yes.", "yesno"}


def test_typical_acceptance_keeps_the_guide(lettered):
    options = SpecOptions(
        top_k=4, steps=4, verify_size=16, tree="fixed", typical=Typical(0.0)
    )  # all allowed tokens
    llm, accepted = LLM(lettered, spec=options), 0
    for seed in range(4):
        sampling = SamplingParams(
            temperature=1.0, top_p=1.0, top_k=0, seed=seed, guide=GUIDES["json_schema"]
        )
        answer = llm.generate("Hi", sampling=sampling, max_generate_length=90)
        list(answer)
        assert keeps_form("json_schema", answer.text)
        accepted += sum(counts.accepted for counts in answer.profile.rounds)
    assert accepted > 0


def test_json_objects_may_have_any_content(llm):
    sampling = SamplingParams(
        temperature=0.0, guide=Guide("json_object"), logit_bias={95: 30.0}
    )  # }
    answer = llm.generate("Hi", sampling=sampling, max_generate_length=90)
    list(answer)
    assert isinstance(json.loads(answer.text), dict)


def test_request_files_have_guides(llm):
    raw = {
        "messages": [{"role": "user", "content": "Hi"}],
        "guided_decoding": {"choice": ["yes", "no"]},
    }
    from edgellm.device_runtime.engine.profile import Profile

    options = Options(apply_chat_template=False, temperature=0)
    response = run_request(llm, options, raw, 0, Profile(), lambda *_: None)
    assert response["output_text"] in ("yes", "no")
    for form in ({}, {"regex": "a", "choice": ["b"]}):
        parsed = parse_request({**raw, "guided_decoding": form}, 0)
        with pytest.raises(RequestError, match="give exactly one of json_object"):
            sampling_of(parsed.merged(options))


@pytest.mark.parametrize(
    ("guide", "message"),
    [
        (Guide("regex", "(ab"), "the regex of the answer is faulty: .*: unclosed group$"),
        (Guide("json_schema", "{"), "the schema of the answer is not JSON"),
        (Guide("json_schema", '{"type": "fruit"}'), "the json_schema of the answer is faulty"),
        (Guide("ebnf", "root ::= missing"), "the ebnf of the answer is faulty"),
    ],
)
def test_invalid_guides_are_rejected_before_the_run(llm, guide, message):
    with pytest.raises(RequestError, match=message):
        llm.generate("Hi", sampling=SamplingParams(guide=guide))


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize(
    ("guide", "before"),
    [
        (Guide.of_schema({"$ref": "#"}), ""),
        (Guide("regex", r"[^\s\S]"), ""),
        (Guide("ebnf", "root ::= root"), ""),
        (Guide("ebnf", 'root ::= "ab" rest\nrest ::= rest'), "ab"),
        (Guide("lark", 'start: "ab" T\nT: /c/ & /d/'), "ab"),
    ],
    ids=["schema", "regex", "rule", "rule after a text", "terminals that exclude each other"],
)
def test_an_unsatisfiable_guide_is_reported(llm, guide, before, speculative):
    """An end token was taken for the end of the form: an empty JSON text, reason `stop`."""
    options = {"sampling": SamplingParams(temperature=0, guide=guide), "speculative": speculative}
    answer = llm.generate("Hi", max_generate_length=8, **options)
    with pytest.raises(RequestError, match="no text of this form goes on from here"):
        for _ in answer:
            pass
    assert answer.text == before
    assert answer.finish_reason is None


@pytest.mark.parametrize("kind", ["regex", "ebnf", "lark", "choice", "json_schema"])
def test_half_a_character_is_no_form(kind):
    with pytest.raises(RequestError, match=f"the {kind} of the answer is faulty: character 1 is"):
        Guide(kind, "a\ud800")


def test_huge_guides_and_unsupported_tokenizers_are_rejected(tiny_engine):
    with pytest.raises(RequestError, match="more than 1048576 characters"):
        Guide("regex", "a" * (1 << 21))
    with pytest.raises(EdgeLLMError, match="with this tokenizer is not possible"):
        LLM(tiny_engine).generate("w9", sampling=SamplingParams(guide=GUIDES["regex"]))


def test_disallowed_tokens_are_never_drawn(lettered):
    """Even if the model is sure of another token, and top-k would keep only that one."""
    logits = np.full(96, -50, np.float32)
    logits[40] = 50
    guidance = Guidance(lettered, 96, [2])
    for top_k in (0, 1, 3):
        params = SamplingParams(temperature=1.0, top_p=1.0, top_k=top_k, seed=42)
        sampler = Sampler(
            params=params, prompt=(), constraint=guidance.start(Guide("choice", '["y", "n"]'))
        )
        assert sampler.choose(logits, 40) in (4 + ord("y") - 34, 4 + ord("n") - 34)
        assert sampler.choose(logits, 40) == 2


SPECIAL = "<s> ends </s>"  # as text: no special token is drawn
SPELLED = {
    "regex": Guide("regex", re.escape(SPECIAL)),
    "choice": Guide("choice", json.dumps([SPECIAL])),
    "ebnf": Guide("ebnf", f"root ::= {json.dumps(SPECIAL)}"),
    "lark": Guide("lark", f"start: {json.dumps(SPECIAL)}"),
}
SPELLED_SCHEMAS = {
    "const": {"const": SPECIAL},
    "enum": {"enum": [SPECIAL, f"{SPECIAL}s"]},
    "pattern": {"type": "string", "pattern": f"^{re.escape(SPECIAL)}$"},
    "name": {"type": "object", "properties": {SPECIAL: {"const": "<s>"}}, "required": [SPECIAL]},
}


@pytest.mark.parametrize("temperature", [0.0, 4.0])
@pytest.mark.parametrize("form", [*SPELLED, *SPELLED_SCHEMAS])
def test_text_of_special_tokens_is_text_in_every_form(llm, form, temperature):
    guide = SPELLED.get(form) or Guide.of_schema(SPELLED_SCHEMAS[form])
    sampling = SamplingParams(temperature=temperature, top_p=1.0, top_k=0, seed=7, guide=guide)
    for speculative in (False, True):
        answer = llm.generate(
            "Hi", sampling=sampling, max_generate_length=90, speculative=speculative
        )
        list(answer)
        assert answer.finish_reason == "stop"
        assert not {0, 1, 2} & {*answer.token_ids[:-1]}
        if form in SPELLED:
            assert answer.text == SPECIAL
        else:
            jsonschema_rs.validate(SPELLED_SCHEMAS[form], json.loads(answer.text))

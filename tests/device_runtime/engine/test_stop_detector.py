"""Stop detection: end tokens, ignored end tokens, stop strings, minimum length."""

from __future__ import annotations

import dataclasses

import pytest

from edgellm.core.errors import RequestError
from edgellm.device_runtime import LLM, SamplingParams, SpecOptions
from edgellm.device_runtime.api.generation_request import GenerationRequest
from edgellm.device_runtime.request_files.request_file import Options, parse_request, sampling_of
from edgellm.device_runtime.sampling.guidance import Guide

END = 2
EAGER = SamplingParams(temperature=0, logit_bias={END: 100})  # would end at once
TREES = SpecOptions(top_k=4, steps=4, verify_size=16, tree="fixed")


@pytest.fixture(scope="module")
def llm(eagle_pair) -> LLM:
    return LLM(eagle_pair.engine, spec=TREES)


def _answer(llm, sampling, length=12, **options):
    """Output of a request, equal with trees and without."""
    both = []
    for speculative in (True, False):
        answer = llm.generate(
            "w20 w30", sampling=sampling, max_generate_length=length, speculative=speculative,
            **options,
        )  # fmt: skip
        list(answer)
        both.append(answer)
    assert both[0].token_ids == both[1].token_ids
    assert both[0].text == both[1].text
    return both[0]


def _with(sampling=EAGER, **changed):
    return dataclasses.replace(sampling, **changed)


def test_min_tokens_is_kept(llm):
    assert _answer(llm, EAGER).token_ids == [END]
    longer = _answer(llm, _with(min_tokens=5))
    assert len(longer.token_ids) == 6  # five others, then the end token
    assert END not in longer.token_ids[:5]
    assert (longer.token_ids[5], longer.finish_reason) == (END, "stop")


def test_an_end_token_can_be_ignored(llm):
    found = _answer(llm, _with(ignore_eos=True))
    assert found.token_ids == [END] * 12
    assert (found.text, found.finish_reason) == ("", "length")


def test_stop_tokens_end_the_output_without_text(llm):
    whole = _answer(llm, _with(ignore_eos=True, logit_bias={END: -100}))
    token = whole.token_ids[4]
    first = whole.token_ids.index(token)
    given = _with(ignore_eos=True, logit_bias={END: -100}, stop_token_ids=(95, token))
    found = _answer(llm, given)
    assert found.token_ids == whole.token_ids[: first + 1]
    assert found.finish_reason == "stop"
    assert found.text == " " + llm.tokenizer.decode(whole.token_ids[:first])
    later = _answer(llm, dataclasses.replace(given, min_tokens=8))
    assert token not in later.token_ids[:8]


def test_stop_strings_apply_after_min_tokens(llm):
    sampling = _with(ignore_eos=True, logit_bias={END: -100})
    words = _answer(llm, sampling).text.split()
    assert _answer(llm, sampling, stop=[words[2]]).finish_reason == "stop"
    found = _answer(llm, dataclasses.replace(sampling, min_tokens=12), stop=[words[2]])
    assert found.text.split() == words


def test_invalid_stops_are_rejected(llm):
    with pytest.raises(RequestError, match="min_tokens -1 is out of range"):
        SamplingParams(min_tokens=-1)
    with pytest.raises(RequestError, match=r"ignore_eos: guided decoding ends where"):
        SamplingParams(ignore_eos=True, guide=Guide("regex", "a"))
    with pytest.raises(RequestError, match="stop_token_ids names token 96, the model has 96"):
        _answer(llm, SamplingParams(stop_token_ids=(96,)))
    with pytest.raises(RequestError, match="stop_token_ids names token -1"):
        SamplingParams(stop_token_ids=(-1,))
    with pytest.raises(RequestError, match=r"min_tokens 13 is more than .* 12"):
        _answer(llm, SamplingParams(min_tokens=13))


def test_request_files_have_these_options():
    options = {"min_tokens": 3, "ignore_eos": True, "stop_token_ids": [5, 6]}
    raw = {"messages": [{"role": "user", "content": "x"}], **options}
    found = sampling_of(parse_request(raw, 0).merged(Options()))
    assert (found.min_tokens, found.ignore_eos, found.stop_token_ids) == (3, True, (5, 6))
    assert sampling_of(Options()).stop_token_ids == ()
    with pytest.raises(RequestError, match=r"requests\[0\]\.stop_token_ids"):
        parse_request({**raw, "stop_token_ids": ["a"]}, 0)


def test_token_ids_are_accepted_as_prompt(llm):
    ids = llm.tokenizer.encode("w20 w30", add_special_tokens=True)
    options = {"add_special_tokens": True, "sampling": EAGER, "max_generate_length": 4, "stop": ()}
    assert llm.generate_text(GenerationRequest(text=ids, **options)).prompt.token_ids == ids
    with pytest.raises(RequestError, match="the model has no token 96"):
        llm.generate_text(GenerationRequest(text=[5, 96], **options))

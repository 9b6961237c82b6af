"""A hybrid base with a batch over HTTP: each output equals the output alone."""

from __future__ import annotations

import http.client
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import eagle_engines
import pytest
from inside_server import Inside, serving_inside

from edgellm.device_runtime import LLM, RequestOutput, SamplingParams, SpecOptions
from edgellm.device_runtime.api.generation_request import GenerationRequest
from edgellm.tools.serve.engines.loading import Loading
from edgellm.tools.serve.engines.models import read_models
from edgellm.tools.serve.settings import Settings

GREEDY = SamplingParams(temperature=0)
LOOKUPS = ("suffix", "ngram")
SPECS = {
    "plain": None,
    "mtp": SpecOptions(network="mtp", lookups=LOOKUPS, tree="fixed", verify_size=8),
}
PROMPTS = ["w20 w21 w20 w21 w20", "w20 w21 w20 w33", "w50 w51", "w60 w61 w62 w60 w61", "w70"]


@pytest.fixture(scope="module")
def hybrid(eagle_pairs, tmp_path_factory) -> Path:
    """Qwen3.5 with its layer of multi-token prediction, for three answers at a time."""
    engine = tmp_path_factory.mktemp("hybrid") / "engine"
    return eagle_engines.for_several(eagle_pairs("mtp"), engine, 3)


@pytest.fixture(scope="module")
def alone(eagle_pairs) -> LLM:
    return LLM(eagle_pairs("mtp").engine)


def _open(server: Inside, **body: object) -> http.client.HTTPResponse:
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    content = json.dumps({"temperature": 0, "max_tokens": 12, **body})
    client.request("POST", "/v1/completions", content, {"content-type": "application/json"})
    return client.getresponse()


def _ask(server: Inside, prompt: str) -> tuple[str, int, int]:
    """Text, tokens of it and its prompt, and how many of these were not computed again."""
    answer = json.loads(_open(server, prompt=prompt).read())
    usage = answer["usage"]
    known = usage["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["text"], usage["total_tokens"], known


def _expected(alone: LLM, prompt: str) -> str:
    answer = alone.generate(prompt, max_generate_length=12, sampling=GREEDY)
    list(answer)
    return answer.text


def _all_at_once(server: Inside, prompts: list[str]) -> list[tuple[str, int, int]]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return [*pool.map(lambda prompt: _ask(server, prompt), prompts)]


@pytest.mark.parametrize("spec", SPECS)
def test_clients_at_once_get_the_answers_alone(hybrid, alone, tmp_path, spec):
    """In two turns, with clients that disconnect, and after a restart of the server."""
    models = read_models([f"tiny={hybrid}"])
    loading = Loading(spec=SPECS[spec], contexts=tmp_path / "contexts")
    settings = Settings(queue_size=9, request_timeout_s=60)
    with serving_inside(models, loading, settings) as server, ExitStack() as leaving:
        stream = leaving.enter_context(_open(server, prompt="w80", max_tokens=100, stream=True))
        assert stream.readline().startswith(b"data: ")
        stream.close()
        answers = _all_at_once(server, PROMPTS)
        assert [text for text, *_ in answers] == [_expected(alone, each) for each in PROMPTS]
        # As many as the caches have room for beside their next turns; none ends at a stop token
        prompts = [PROMPTS[0], *PROMPTS[2:4]]
        answers = _all_at_once(server, prompts)
        prompts, answers = _turn(server, alone, prompts, answers)
    with serving_inside(models, loading, settings) as server:
        _turn(server, alone, prompts, answers)


def _turn(
    server: Inside, alone: LLM, prompts: list[str], before: list[tuple[str, int, int]]
) -> tuple[list[str], list[tuple[str, int, int]]]:
    """The next of every conversation: only what is new is computed."""
    pairs = zip(prompts, before, strict=True)
    turns = [f"{each} {text} w{30 + at}" for at, (each, (text, *_)) in enumerate(pairs)]
    answers = _all_at_once(server, turns)
    assert [text for text, *_ in answers] == [_expected(alone, each) for each in turns]
    assert [known for *_, known in answers] == [total - 1 for _, total, _ in before]
    return turns, answers


@pytest.mark.parametrize("together", [True, False], ids=["together", "alone"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_message_after_a_stop_token_prefills_only_new_tokens(
    eagle_pairs, hybrid, alone, spec, together
):
    """With and without that token in the next prompt, at any place in a draft tree."""
    engine = hybrid if together else eagle_pairs("mtp").engine
    starts = ([20, 21, 20, 21, 20], [20, 21, 33])[: 1 + together]  # as many as there is room for
    with LLM(engine, spec=SPECS[spec], context_reuse=True) as model:
        for length, has_stop in itertools.product((2, 5, 8, 9), (False, True)):
            prompts = [[30 + length, 40 + has_stop, *each] for each in starts]
            whole = _tokens(model, prompts)  # which the lookups draft from
            ends = [found[at] for found, at in zip(whole, (length, 11), strict=False)]
            first = _tokens(model, prompts, ends)
            assert [found[-1] for found in first] == ends
            texts = [[*prompt, *found] for prompt, found in zip(prompts, first, strict=True)]
            turns = [[*(text if has_stop else text[:-1]), 77, 78] for text in texts]
            second = _answers(model, turns)
            assert [one.token_ids for one in second] == _tokens(alone, turns)
            known = [one.timings()["reused_tokens"] for one in second]
            assert known == [len(text) - 1 for text in texts], (length, has_stop)


def _tokens(llm: LLM, prompts: list[list[int]], ends: list[int] | None = None) -> list[list[int]]:
    return [one.token_ids for one in _answers(llm, prompts, ends)]


def _answers(
    llm: LLM, prompts: list[list[int]], ends: list[int] | None = None
) -> list[RequestOutput]:
    """Concurrently, up to twelve tokens or its end token each."""
    answers = []
    for at, prompt in enumerate(prompts):
        stops = () if ends is None else (ends[at],)
        sampling = SamplingParams(temperature=0, ignore_eos=True, stop_token_ids=stops)
        options = {"add_special_tokens": False, "max_generate_length": 12, "stop": ()}
        answers.append(
            llm.generate_text(GenerationRequest(text=prompt, sampling=sampling, **options))
        )
    for _ in llm.together(answers):
        pass
    return answers

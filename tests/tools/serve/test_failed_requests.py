"""A failed request reports its error, and other requests of the batch continue."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from lettered_engine import with_letters
from serve_process import serving

TEMPLATE = (
    "{%- set word = messages[-1].content -%}"
    "{%- if word == 'zero' -%}{{ 1 // 0 }}"
    "{%- elif word == 'value' -%}{{ [1].index(2) }}"
    "{%- endif -%}{{ word }}"
)
TURNS = {"zero": [{"role": "user", "content": "zero"}]}
PATHS = {
    "/v1/chat/completions": {"messages": TURNS["zero"]},
    "/v1/messages": {"messages": TURNS["zero"], "max_tokens": 4},
    "/v1/responses": {"input": "zero"},
    "/api/chat": {"messages": TURNS["zero"], "stream": False},
    "/tokenize": {"messages": TURNS["zero"]},
}


@pytest.fixture(scope="module")
def failing(shared_engine, tmp_path_factory):
    """A server for three answers at a time, whose template may raise."""
    folder = tmp_path_factory.mktemp("failing") / "engine"
    engine = with_letters(shared_engine, folder, chat_template=TEMPLATE)
    with serving(engine, "--modelName", "tiny") as process:
        yield process


@pytest.mark.parametrize("path", PATHS)
def test_a_template_that_raises_is_the_requests_fault(failing, path):
    status, found = failing.json(path, {"model": "tiny", **PATHS[path]})
    assert status == 400, found
    error = found["error"]
    text = error if isinstance(error, str) else error["message"]
    assert "the chat template fails on the messages: ZeroDivisionError" in text


def test_a_grammar_that_fails_leaves_the_others_of_its_passes(failing):
    client = openai.OpenAI(base_url=f"{failing.url}/v1", api_key="none", max_retries=0)

    def ask(prompt: str, **more: object) -> str:
        found = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=20, temperature=0, **more
        )
        return found.choices[0].text

    prompts = [f"{letter}b" for letter in "cdefghij"]
    alone = [ask(prompt) for prompt in prompts]
    form = {"extra_body": {"structured_outputs": {"regex": r"ab[^\s\S]"}}}  # a dead end
    with ThreadPoolExecutor(12) as pool:
        bad = [pool.submit(ask, "ab", **form) for _ in range(4)]
        good = [pool.submit(ask, prompt) for prompt in prompts]
        assert [one.result(60) for one in good] == alone
        for one in bad:
            with pytest.raises(openai.BadRequestError, match="no text of this form"):
                one.result(60)
    chunks = client.completions.create(
        model="tiny", prompt="ab", max_tokens=20, temperature=0, stream=True, **form
    )
    with pytest.raises(openai.APIError, match="no text of this form"):
        list(chunks)
    assert ask(prompts[0]) == alone[0]

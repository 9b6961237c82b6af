"""Stop strings that are special tokens, which the text does not contain."""

from __future__ import annotations

import pytest
from lettered_engine import with_letters
from serve_process import serving

from edgellm.device_runtime import LLM, SamplingParams

STOP = "[STOP]"
TURNS = [{"role": "user", "content": "Hi"}]
TEMPLATE = "{%- for m in messages %} {{ m.role }}: {{ m.content }}{%- endfor %}"


@pytest.fixture(scope="module")
def engine(roomy_engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stops") / "engine"
    return with_letters(roomy_engine, folder, tokens=(STOP,), chat_template=TEMPLATE)


def test_a_special_token_stops_as_its_text_does(engine):
    llm = LLM(engine)
    (stop_id,) = llm.tokenizer.added_ids([STOP]).values()
    sampling = SamplingParams(temperature=0, logit_bias={stop_id: 100})
    asked = {"sampling": sampling, "max_generate_length": 5}
    free = llm.generate("Hi", **asked)
    list(free)
    assert (free.finish_reason, free.token_ids, free.text) == ("length", [stop_id] * 5, "")
    stopped = llm.generate("Hi", stop=["x", STOP], **asked)
    list(stopped)
    assert (stopped.finish_reason, stopped.stop_string) == ("stop", STOP)
    assert (stopped.token_ids, stopped.text) == ([stop_id], "")


def test_a_special_token_stops_in_the_protocols(engine):
    with serving(engine, "--modelName", "tiny") as server:
        ids = server.json("/tokenize", {"prompt": STOP, "add_special_tokens": False})[1]["tokens"]
        (stop_id,) = ids
        body = {"messages": TURNS, "max_tokens": 5, "logit_bias": {str(stop_id): 100}}
        choice = server.json("/v1/chat/completions", {**body, "stop": STOP})[1]["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "")
        choice = server.json("/v1/chat/completions", body)[1]["choices"][0]
        assert choice["finish_reason"] == "length"

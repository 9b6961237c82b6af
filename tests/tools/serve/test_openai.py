"""The `openai` client with a server process: outputs equal those of the engine offline."""

from __future__ import annotations

import itertools

import openai
import pytest

from edgellm.device_runtime import SamplingParams

MESSAGES = [{"role": "system", "content": "w11 w12"}, {"role": "user", "content": "w20 w30"}]


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def _offline(llm, prompt, length, stop=(), **sampling):
    answer = llm.generate(
        prompt, sampling=SamplingParams(**sampling), max_generate_length=length, stop=stop
    )
    list(answer)
    return answer


def test_a_chat_has_the_text_and_the_counts_of_the_engine(client, offline):
    found = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=24
    )
    expected = _offline(offline, MESSAGES, 24, temperature=0)
    assert found.choices[0].message.content == expected.text
    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].finish_reason == expected.finish_reason
    assert found.usage.prompt_tokens == expected.prompt_token_count
    assert found.usage.completion_tokens == len(expected.token_ids)
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens
    assert found.id.startswith("chatcmpl-")
    assert found.model == "tiny"


def test_a_stream_has_the_same_text_in_pieces(client, offline):
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        temperature=0,
        max_completion_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    expected = _offline(offline, MESSAGES, 24, temperature=0)
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == expected.text
    assert len(pieces) > 8
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == expected.finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(expected.token_ids)
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_has_usage_only_if_requested(client):
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=3, stream=True
    )
    assert all(chunk.usage is None and chunk.choices for chunk in stream)


def test_a_seed_gives_its_answer_and_none_gives_others(client, offline):
    def ask(seed):
        found = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=12, seed=seed, temperature=1.5, top_p=0.9
        )
        return found.choices[0].message.content

    settings = {"temperature": 1.5, "top_p": 0.9, "top_k": 0}
    assert ask(5) == _offline(offline, MESSAGES, 12, seed=5, **settings).text
    assert ask(5) == ask(5)
    assert ask(-1) == _offline(offline, MESSAGES, 12, seed=2**63 - 1, **settings).text
    assert len({ask(None) for _ in range(4)}) > 1


@pytest.mark.parametrize("streams", [False, True])
def test_several_choices_have_the_seeds_from_that_of_the_request(client, offline, streams):
    how = {"model": "tiny", "max_tokens": 8, "seed": 5, "n": 3, "temperature": 1.0}
    how |= {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
    chats = client.chat.completions.create(messages=MESSAGES, **how)
    texts = client.completions.create(prompt=["w20 w30", "w21"], **how)
    for prompts, found in (([MESSAGES], chats), (["w20 w30", "w21"], texts)):
        expected = [
            _offline(offline, prompt, 8, seed=seed, temperature=1.0, top_p=1.0, top_k=0)
            for prompt in prompts
            for seed in (5, 6, 7)
        ]
        said, usage = [""] * len(expected), None
        for chunk in found if streams else [found]:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                part = getattr(choice, "delta", None) or getattr(choice, "message", None)
                said[choice.index] += (choice.text if part is None else part.content) or ""
        assert said == [answer.text for answer in expected]
        assert usage.completion_tokens == 8 * len(expected)
        assert usage.prompt_tokens == sum(one.prompt_token_count for one in expected[::3])


def test_stop_strings_end_an_answer_and_are_not_in_it(client, offline):
    whole = _offline(offline, MESSAGES, 24, temperature=0).text
    stop = whole.split()[5]
    expected = _offline(offline, MESSAGES, 24, stop=[stop], temperature=0)
    for given in (stop, ["never", stop]):
        found = client.chat.completions.create(
            model="tiny", messages=MESSAGES, temperature=0, max_tokens=24, stop=given
        )
        assert found.choices[0].message.content == expected.text
        assert found.choices[0].finish_reason == "stop"


def test_log_probabilities_of_a_chat(client, offline):
    def entries(**options):
        return client.chat.completions.create(
            model="tiny", messages=MESSAGES, temperature=0, max_tokens=10, logprobs=True, **options
        )

    found = entries(top_logprobs=3).choices[0].logprobs.content
    expected = _offline(offline, MESSAGES, 10, temperature=0, num_logprobs=3)
    words = [offline.tokenizer.token_text(token_id) for token_id in expected.token_ids]
    words[1:] = [f" {word}" for word in words[1:]]
    assert [entry.token for entry in found] == words
    assert all(len(entry.top_logprobs) == 3 for entry in found)
    assert all(entry.top_logprobs[0].token == entry.token for entry in found)  # greedy
    assert all(bytes(entry.bytes).decode() == entry.token for entry in found)
    assert all(entry.top_logprobs == [] for entry in entries().choices[0].logprobs.content)
    streamed = [
        entry
        for chunk in entries(top_logprobs=3, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == words
    for one, other in zip(found, streamed, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_completions_plain_and_streamed(client, offline):
    expected = _offline(offline, "w20 w30 w40", 12, temperature=0)
    options = {"model": "tiny", "prompt": "w20 w30 w40", "temperature": 0, "max_tokens": 12}
    found = client.completions.create(**options, logprobs=2)
    assert found.choices[0].text == expected.text
    assert found.choices[0].finish_reason == expected.finish_reason
    logprobs = found.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 12
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    chunks = list(client.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert client.completions.create(model="tiny", prompt=["w20"]).usage.completion_tokens <= 16


def test_usage_has_acceptance_and_cached_tokens(client, server):
    client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=40, temperature=0)
    found = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=40, temperature=0
    ).model_dump()
    speculation = found["usage"]["speculation"]
    drafted, accepted = (
        speculation["total_draft_tokens"],
        speculation["total_accepted_draft_tokens"],
    )
    assert 0 <= accepted <= drafted
    assert speculation["acceptance_rate"] == pytest.approx(accepted / drafted)
    record = found["metrics"]["speculative_decoding"]
    assert sum(record["acceptance_histogram"]) == record["num_spec_steps"]
    accepted_steps = enumerate(record["acceptance_histogram"])
    assert sum(length * steps for length, steps in accepted_steps) == accepted
    prompt_tokens = found["usage"]["prompt_tokens"]
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == prompt_tokens - 1
    assert server.metric("vllm:prefix_cache_hits_total") >= prompt_tokens - 1


def test_tokens_come_with_their_origin_when_asked(client):
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        temperature=0,
        max_tokens=60,
        stream=True,
        extra_body={"stream_options": {"include_tokens": True, "include_usage": True}},
    )
    chunks = [chunk.model_dump() for chunk in stream]
    tokens = [token for chunk in chunks for token in chunk.get("edgellm", {}).get("tokens", ())]
    text = "".join((c["choices"][0]["delta"]["content"] or "") for c in chunks if c["choices"])
    assert "".join(piece for piece, _ in tokens) == text
    origins = [origin for _, origin in tokens]
    assert set(origins) <= {"drafted", "bonus", "plain"}
    speculation = chunks[-1]["usage"]["speculation"]
    assert origins.count("drafted") == speculation["total_accepted_draft_tokens"]


def test_draft_trees_come_when_asked(client):
    """A tree's accepted path and bonus token are the tokens of its event."""
    options = {"include_tokens": True, "include_trees": True}
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=60, stream=True,
        extra_body={"stream_options": options},
    )  # fmt: skip
    rounds = [found for chunk in stream if (found := chunk.model_dump().get("edgellm"))]
    drafted = [found for found in rounds if found["drafted"]]
    assert all(("tree" in found) == bool(found["drafted"]) for found in rounds)
    assert len(drafted) > 5
    for found in drafted:
        tree = found["tree"]
        texts = [tree["tokens"][node].strip() for node in tree["path"][1:]] + [tree["bonus"]]
        assert [text.strip() for text, _ in found["tokens"]] == texts[: len(found["tokens"])]
        assert len(tree["tokens"]) == len(tree["parents"]) == len(tree["confidence"])
        assert len(tree["tokens"]) == 1 + found["drafted"]
        pairs = list(itertools.pairwise(tree["path"]))
        assert all(tree["parents"][node] == above for above, node in pairs)


def test_the_model_list_has_the_served_model(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "edgellm"


@pytest.mark.parametrize(
    ("changed", "fragment"),
    [
        ({"n": 17}, "send several requests with different seeds"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "w20"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "needs content"),
        ({"messages": [{"role": "tool", "content": "w20"}]}, "no tools here"),  # the template's
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"w": 1}}, "logit_bias"),
        ({"logit_bias": {"4000": 1}}, "logit_bias names token 4000"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"top_logprobs": 2}, "logprobs: true"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"messages": [{"role": "user", "content": "w20 " * 2000}]}, "the engine takes 1024"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "knows no tools"),
        (
            {"messages": [{"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]},
            "text only",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_with_the_reason(client, changed, fragment):
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, **changed}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match=fragment) as caught:
            client.chat.completions.create(**options, stream=stream)
        assert caught.value.type == "invalid_request_error"


def test_neutral_values_that_clients_send_are_taken(client):
    found = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=2, n=1, presence_penalty=0,
        frequency_penalty=0.0, logit_bias={}, user="me", response_format={"type": "text"},
        parallel_tool_calls=True, store=False, extra_body={"top_k": -1},
    )  # fmt: skip
    assert found.usage.completion_tokens <= 2


def test_other_models_are_not_found(client):
    with pytest.raises(openai.NotFoundError, match="only 'tiny'") as caught:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_later_messages_reuse_the_prefix_cache(client):
    turns = list(MESSAGES)
    first = client.chat.completions.create(
        model="tiny", messages=turns, max_tokens=6, temperature=0
    )
    turns += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "w50"},
    ]
    second = client.chat.completions.create(model="tiny", messages=turns, max_tokens=6)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens

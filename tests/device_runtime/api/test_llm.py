"""Outputs of a tiny engine, and of a scripted session with known passes."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from manifests import read_manifest, write_manifest
from portable import open_portable
from stepping import generate

from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
    LimitError,
    RequestError,
)
from edgellm.core.graph_io import LOGITS
from edgellm.device_runtime import LLM, SamplingParams
from edgellm.device_runtime.engine.profile import Profile
from edgellm.device_runtime.networks.decoder import PassResult
from edgellm.device_runtime.sampling.sampler import Sampler

GREEDY = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def llm(tiny_engine) -> LLM:
    return LLM(tiny_engine, verify=True)


class ScriptedSession:
    """Returns given tokens; fails on a pass that the cache could not serve."""

    def __init__(self, script, capacity=64, vocab_size=96):
        self.script, self.capacity, self.vocab_size = list(script), capacity, vocab_size
        self.length, self.max_batch_size = 0, 1

    def run_batch(self, parts):
        (part,) = parts
        assert part.write_index == self.length
        self.length += len(part.token_ids)
        assert self.length <= self.capacity
        logits = np.zeros((len(part.logits_index), self.vocab_size), np.float32)
        logits[:, self.script.pop(0)] = 9
        return [PassResult({LOGITS: logits[None]}, len(logits))]


@pytest.fixture
def scripted(llm, monkeypatch):
    """Script the model's next output as a list of words."""

    def script(*words):
        ids = [llm.tokenizer.encode(word, add_special_tokens=False)[0] for word in words]
        monkeypatch.setattr(llm, "base", ScriptedSession(ids))

    return script


def _reference_ids(checkpoint, prompt_ids, count):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    output = model.generate(
        torch.tensor([prompt_ids]), max_new_tokens=count, do_sample=False, eos_token_id=2
    )
    return output[0, len(prompt_ids) :].tolist()


def test_greedy_ids_equal_transformers(llm, tiny_checkpoint):
    prompt = "w20 w30 w40 w50"
    answer = llm.generate(prompt, sampling=GREEDY, max_generate_length=40)
    list(answer)
    prompt_ids = llm.tokenizer.encode(prompt, add_special_tokens=True)
    assert answer.token_ids == _reference_ids(tiny_checkpoint, prompt_ids, 40)


@pytest.mark.parametrize("rows", [1, 3, 5, 100])
def test_prefill_chunks_do_not_change_the_output(llm, rows):
    def ids(prefill_rows):
        prompt, sampler = list(range(20, 31)), Sampler(params=GREEDY)
        return list(generate(llm.base, prompt, sampler, 8, Profile(), prefill_rows=prefill_rows))

    assert ids(rows) == ids(11)


def test_requests_are_independent(llm):
    def ask(prompt):
        answer = llm.generate(prompt, sampling=GREEDY, max_generate_length=12)
        list(answer)
        return answer.token_ids

    alone = ask("w33 w34")
    ask("w20 w30 w40 w50 w60 w70")
    assert ask("w33 w34") == alone


def test_steps_carry_the_text(scripted, llm):
    scripted("w9", "w10", "</s>")
    answer = llm.generate("w20", sampling=GREEDY)
    steps = list(answer)
    assert [step.text for step in steps] == [" w9", " w10"]  # after the prompt
    assert (answer.text, answer.finish_reason) == (" w9 w10", "stop")
    assert len(answer.token_ids) == 3
    assert answer.timings()["generation_tokens_per_second"] > 0


def test_the_usage_of_the_kv_cache_is_that_of_running_sequences(llm):
    answer = llm.generate("w20 w21", sampling=GREEDY, max_generate_length=3)
    steps = iter(answer)
    next(steps)
    positions = llm.kv_cache_manager.usage * llm.kv_cache_manager.base.capacity
    assert positions == len(answer.prompt.token_ids)
    list(steps)
    assert llm.kv_cache_manager.usage == 0


def test_max_length_ends_the_output(scripted, llm):
    scripted("w9", "w10", "w11")
    answer = llm.generate("w20", sampling=GREEDY, max_generate_length=2)
    list(answer)
    assert (answer.text, answer.finish_reason) == (" w9 w10", "length")


def test_stop_strings_end_the_output(scripted, llm):
    scripted("w9", "w10", "w11", "w12")
    answer = llm.generate("w20", sampling=GREEDY, stop=["w10 w11"])
    list(answer)
    assert (answer.text, answer.finish_reason) == (" w9 ", "stop")
    assert len(answer.token_ids) == 3


def test_held_back_text_is_returned_at_the_end(scripted, llm):
    scripted("w9", "w10", "</s>")
    answer = llm.generate("w20", sampling=GREEDY, stop=["w10 w11"])
    list(answer)
    assert answer.text == " w9 w10"


def test_chat_messages_use_the_template(scripted, llm):
    scripted("</s>")
    messages = [{"role": "user", "content": "w20 w21"}]
    answer = llm.generate(messages, sampling=GREEDY)
    list(answer)
    assert answer.prompt_token_count == len(["user", ":", "w20", "w21", ".", "assistant", ":"])


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"temperature": float("nan")}, {"temperature": float("inf")},
     {"top_p": 0}, {"top_p": 5}, {"top_k": -3}, {"seed": -1}, {"seed": 2**70}],
    ids=str,
)  # fmt: skip
def test_sampling_ranges_are_validated(wrong):
    with pytest.raises(RequestError, match=f"{next(iter(wrong))} .* is out of range"):
        SamplingParams(**wrong)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "hot"), ("temperature", None), ("temperature", True), ("top_p", "1"),
     ("top_k", 1.5), ("top_k", True), ("seed", 0.5), ("seed", "7"), ("num_logprobs", 0.5),
     ("min_p", []), ("logit_bias", [1]), ("logit_bias", {"a": 1}), ("logit_bias", {3: None}),
     ("guide", "json")],
    ids=str,
)  # fmt: skip
def test_sampling_types_are_validated(name, value):
    with pytest.raises(RequestError, match=f"^{name} .* (is not|is no) "):
        SamplingParams(**{name: value})


def test_numpy_scalars_are_accepted(llm):
    sampling = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.int32(1))
    answer = llm.generate("w20", sampling=sampling, max_generate_length=np.int64(2))
    list(answer)
    assert answer.finish_reason == "length"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"max_generate_length": 1.5}, "max_generate_length 1.5 is not a whole number"),
     ({"max_generate_length": "3"}, "max_generate_length '3' is not a whole number"),
     ({"max_generate_length": 0}, "max_generate_length 0 is less than 1"),
     ({"max_generate_length": True}, "max_generate_length True is not"),
     ({"sampling": {"temperature": 0}}, "is not a SamplingParams"),
     ({"sampling": 0}, "sampling 0 is not a SamplingParams"),
     ({"stop": 5}, "stop 5 is not a list of texts"), ({"stop": [b"x"]}, "is not a list of texts"),
     ({"speculative": "no"}, "speculative 'no' is not True or False"),
     ({"temperature": 0}, "temperature does not go with raw text")],
    ids=str,
)  # fmt: skip
def test_argument_types_are_validated(llm, arguments, message):
    with pytest.raises(RequestError, match=message):
        llm.generate("w20", **arguments)


USER = {"role": "user", "content": "w20"}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [(None, "the prompt None is neither a text nor a list"), ([], "the prompt \\[\\] is neither"),
     (USER, "is neither a text nor a list of messages"), (b"w20", "is neither"),
     (["w20"], r"messages\[0\] 'w20' is not an object"),
     ([USER, {"content": "w20"}], r"messages\[1\] has no `role`"),
     ([USER, {"role": "user"}], r"messages\[1\].content None is not a text or a list"),
     ([{"role": "user", "content": 5}], r"messages\[0\].content 5 is not"),
     ([{"role": "user", "content": ["w20"]}], r"content\[0\] 'w20' is not an object"),
     ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text None is not a text"),
     ([{"role": "user", "content": [{"type": "image"}]}], r"content\[0\].image None is not a"),
     ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}],
      "'image_url' is none of 'text', 'image', 'video' and 'audio'")],
    ids=str,
)  # fmt: skip
def test_messages_are_validated(llm, prompt, message):
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt)


@pytest.mark.parametrize(
    "arguments", [{"context_reuse": "x"}, {"verify": 1}, {"spec": "eagle"},
                  {"multimodal_engine_dir": 5}, {"engine_dir": None}], ids=str
)  # fmt: skip
def test_loading_arguments_are_validated(tiny_engine, arguments):
    with pytest.raises(RequestError, match=f"^{next(iter(arguments))} .* is not "):
        LLM(**{"engine_dir": tiny_engine, **arguments})


def test_a_single_stop_string_is_accepted(scripted, llm):
    scripted("w9", "w10", "w11")
    answer = llm.generate("w20", sampling=GREEDY, stop="w10")
    list(answer)
    assert (answer.text, answer.finish_reason) == (" w9 ", "stop")


def test_finish_reason_is_none_until_the_end(scripted, llm):
    scripted("w9", "w10")
    answer = llm.generate("w20", sampling=GREEDY, max_generate_length=2)
    seen = [answer.finish_reason, *(answer.finish_reason for _ in answer)]
    assert seen == [None, None, "length"]


def test_an_output_is_iterated_over_only_once(llm):
    answer = llm.generate("w20", sampling=GREEDY, max_generate_length=2)
    list(answer)
    with pytest.raises(EdgeLLMError, match="iterated over only once"):
        list(answer)


def test_lone_surrogates_are_rejected(llm):
    with pytest.raises(RequestError, match="surrogate"):
        llm.generate("\ud800")


def test_lengths_out_of_range_are_rejected_or_clamped(llm):
    with pytest.raises(RequestError, match="max_generate_length 0"):
        llm.generate("w20", max_generate_length=0)
    with pytest.raises(RequestError, match="has 49 tokens, the engine takes 48"):
        llm.generate("w20 " * 49)
    with pytest.raises(RequestError, match="prompt is empty"):
        llm.generate("")
    answer = llm.generate("w20 " * 40, sampling=GREEDY, max_generate_length=100)
    assert "cut to 24" in answer.warnings[0]
    list(answer)
    assert len(answer.token_ids) <= 24


def test_tokens_beyond_the_capacity_are_rejected(llm):
    with pytest.raises(LimitError, match=r"60 \+ 5 tokens exceed the KV capacity of 64"):
        llm.base.run(np.arange(5), 60, np.array([4]))


def test_first_positions_must_start_at_zero(tiny_bundle):
    """GroupQueryAttention would silently ignore such positions."""
    session = open_portable(tiny_bundle, 64)
    with pytest.raises(ValueError, match="positions 0, 1, 2"):
        session.run(np.arange(3), 0, np.array([2]), position_ids=np.array([0, 1, 1]))


def test_nan_logits_end_the_request(llm, monkeypatch):
    session = ScriptedSession([9])
    nan = PassResult({LOGITS: np.full((1, 1, 96), np.nan, np.float32)}, 1)
    monkeypatch.setattr(session, "run_batch", lambda _: [nan])
    monkeypatch.setattr(llm, "base", session)
    with pytest.raises(EdgeLLMError, match="computed nan"):
        list(llm.generate("w20"))


@pytest.mark.parametrize("threads", ["many", -1, None, True])
def test_a_manifest_with_another_number_of_threads_is_damaged(tiny_engine, tmp_path, threads):
    raw = read_manifest(tiny_engine)
    shutil.copytree(tiny_engine, tmp_path / "engine")
    options = {**raw["options"], "threads": threads}
    write_manifest(tmp_path / "engine", {**raw, "options": options})
    with pytest.raises(BrokenArtifactError, match="not a number of threads"):
        LLM(tmp_path / "engine")


def test_an_engine_without_a_number_of_threads_takes_all_cores(tiny_engine, tmp_path):
    raw = read_manifest(tiny_engine)
    shutil.copytree(tiny_engine, tmp_path / "engine")
    del raw["options"]["threads"]
    write_manifest(tmp_path / "engine", raw)
    with LLM(tmp_path / "engine") as llm:
        assert llm.manifest.threads == 0

"""Prompts that a base writes itself (`edgellm-train-draft --self_prompts`)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from conftest import write_tokenizer
from transformers import AutoTokenizer

from edgellm.core.errors import EdgeLLMError
from edgellm.tools.train_draft.base import Base, Prompt
from edgellm.tools.train_draft.data import corpus
from edgellm.tools.train_draft.data.corpus import Generation, write_prompts

HOW = Generation(max_new_tokens=12, sampled_share=0.5, temperature=0.8, batch=4, seed=7)
USER, COLON, END = 6, 3, 4  # the template's "user : ... ."


@pytest.fixture
def base(tmp_path) -> Base:
    """A base with a tokenizer; `generate` is replaced."""
    write_tokenizer(tmp_path, 96)
    model: Any = torch.nn.Identity()
    return Base(
        model=model, tokenizer=AutoTokenizer.from_pretrained(tmp_path), stop_ids=frozenset([END])
    )


@pytest.fixture
def calls(monkeypatch):
    """Outputs of three words from a seed; some contain <s>, some lack an end token."""
    seen = []

    def generate(_, prompts, *, stop_ids, max_new_tokens, temperature, batch, seed):
        seen.append((prompts[0], stop_ids, max_new_tokens, temperature, batch, seed))
        words = np.random.default_rng(seed).integers(8, 40, (len(prompts), 3))
        words[words == 8] = 1
        return [(at, [*ids, END if at % 5 else 30]) for at, ids in enumerate(words.tolist())]

    monkeypatch.setattr(corpus, "generate", generate)
    monkeypatch.setattr(corpus, "_CHUNK", 16)
    return seen


def test_prompts_are_complete_distinct_and_without_special_tokens(base, calls, tmp_path):
    store = tmp_path / "prompts.jsonl"
    assert list(write_prompts(base, store, 30, HOW))[-1] == 30
    lines = [json.loads(line) for line in store.read_text().splitlines()]
    texts = [line["messages"][0]["content"] for line in lines]
    assert len(set(texts)) == len(texts) == 30
    assert all(len(text.split()) == 3 and "<" not in text for text in texts)
    assert calls[0] == (Prompt((USER, COLON)), frozenset([END]), corpus._PROMPT_TOKENS, 1.0, 4, 7)
    assert len({call[-1] for call in calls}) == len(calls)  # every batch has its own seed


@pytest.mark.usefixtures("calls")
def test_interrupts_do_not_change_the_prompts(base, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    list(write_prompts(base, whole, 40, HOW))
    for count in write_prompts(base, cut, 40, HOW):
        if count:
            break
    with cut.open("a") as stream:
        stream.write('{"messages": [{"role": "us')  # a last line that was cut
    list(write_prompts(base, cut, 40, HOW))
    assert cut.read_text() == whole.read_text()


def test_a_base_that_repeats_itself_is_an_error(base, monkeypatch, tmp_path):
    monkeypatch.setattr(corpus, "generate", lambda *_, **__: [(0, [10, END])])
    with pytest.raises(EdgeLLMError, match="wrote only 1 different prompts") as found:
        list(write_prompts(base, tmp_path / "store", 40, HOW))
    assert found.value.hint == "give prompts with --data, and fewer --self_prompts"


@pytest.mark.parametrize(
    "template",
    ["no place for a question", "{{ messages[0].content }} .", "user : {{ messages[0].content }}"],
)
def test_a_template_without_a_user_turn_is_rejected(base, calls, tmp_path, template):
    base.tokenizer.chat_template = template
    with pytest.raises(EdgeLLMError, match="does not delimit a user's turn"):
        list(write_prompts(base, tmp_path / "store", 40, HOW))
    assert not calls

"""Conversations as token ids: JSONL files read, missing answers written by the base itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from edgellm.contract import EdgeLLMError
from edgellm.tools.train_draft.generate import generate

_CHUNK = 1024  # prompts between two writes: what an interrupt can lose


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation: the ids of the prompt and of the answer that the draft learns from."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """How the base answers prompts that come without an answer."""

    max_new_tokens: int
    sampled_share: float  # of the prompts, answered at `temperature`; the others greedily
    temperature: float
    batch: int
    seed: int


def read_conversations(
    paths: Sequence[Path], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Sample], list[list[int]]]:
    """The samples and the prompts without an answer in JSONL files of {"messages": [...]}.

    Raises:
        EdgeLLMError: a file is missing or a line is not such a conversation.
    """
    samples, prompts = [], []
    for path in paths:
        if not path.is_file():
            raise EdgeLLMError(f"no such data file: {path}")
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            try:
                messages = json.loads(line)["messages"]
                answered = messages[-1]["role"] == "assistant"
                prompt = _template(tokenizer, messages[:-1] if answered else messages, True)
                whole = _template(tokenizer, messages, False) if answered else prompt
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise EdgeLLMError(
                    f"{path} line {number} is no conversation: {error!r}",
                    hint='each line is {"messages": [{"role": "user", "content": "..."}]}',
                ) from None
            if answered:
                samples.append(Sample(tuple(prompt), tuple(whole[len(prompt) :])))
            else:
                prompts.append(prompt)
    return samples, prompts


def _template(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], answer_next: bool
) -> list[int]:
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=answer_next
    )
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def answer_prompts(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    store: Path,
    stop_ids: frozenset[int],
    how: Generation,
) -> Iterator[int]:
    """Let the base answer `prompts` into the JSONL file `store`; yields how many are answered.

    Prompts that `store` already answers are not answered again.
    """
    done = {tuple(sample.prompt) for sample in stored_answers(store)}
    yield len(done)
    waiting = [prompt for prompt in prompts if tuple(prompt) not in done]
    for start in range(0, len(waiting), _CHUNK):
        chunk = waiting[start : start + _CHUNK]
        sampled = round(len(chunk) * how.sampled_share)
        for part, temperature in ((chunk[sampled:], 0.0), (chunk[:sampled], how.temperature)):
            rows = generate(
                model, part, stop_ids=stop_ids, max_new_tokens=how.max_new_tokens,
                temperature=temperature, batch=how.batch, seed=how.seed + start,
            )  # fmt: skip
            lines = [json.dumps({"prompt": prompt, "answer": ids}) for _, prompt, ids in rows]
            with store.open("a", encoding="utf-8") as stream:
                stream.write("".join(line + "\n" for line in lines))
        yield min(start + _CHUNK, len(waiting)) + len(done)


def stored_answers(store: Path) -> list[Sample]:
    """The answers written so far; lines that an interrupt cut are left out."""
    if not store.exists():
        return []
    samples = []
    for line in store.read_text("utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        samples.append(Sample(tuple(record["prompt"]), tuple(record["answer"])))
    return samples


def draft_vocabulary(samples: Sequence[Sample], vocab_size: int, size: int) -> np.ndarray:
    """Ids of the `size` tokens most frequent in the answers, ascending, int64 [size]."""
    counts = np.zeros(vocab_size, np.int64)
    for sample in samples:
        np.add.at(counts, np.asarray(sample.answer, np.int64), 1)
    return np.sort(np.argsort(-counts, kind="stable")[:size])

"""Prompts whose greedy answers are compared, and what the float model answered."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from edgellm.core.errors import EdgeLLMError
from edgellm.export.checkpoints.hf import Checkpoint
from edgellm.export.graph.architecture import end_ids
from edgellm.quantize.calibration.hidden_states import write_text
from edgellm.quantize.calibration.text import DEFAULT, kind_of, read_lines, text_file
from edgellm.quantize.metrics.divergence import Ids, Questioned

_OWN = Path(__file__).with_name("questions.jsonl")
_STORED = "answers.json"
_TOKENS = 32  # of an answer, at most


@dataclass(frozen=True, slots=True)
class Questions:
    """Prompts as ids, with their kinds."""

    prompts: tuple[tuple[int, ...], ...]
    kinds: tuple[str, ...]
    ends: frozenset[int]  # tokens that end an answer
    name: str

    @property
    def sha256(self) -> str:
        """Of all that decides what is asked."""
        facts = json.dumps([self.prompts, self.kinds, sorted(self.ends), _TOKENS])
        return hashlib.sha256(facts.encode()).hexdigest()

    def is_answered(self, answer: Sequence[int]) -> bool:
        """Whether that is a whole answer."""
        return len(answer) == _TOKENS or (bool(answer) and answer[-1] in self.ends)


def read_questions(
    file: str, tokenizer: PreTrainedTokenizerBase, checkpoint: Checkpoint, positions: int
) -> Questions:
    """Prompts of a .jsonl or .txt file, or "default": a dozen of the project's own.

    Of a conversation the last answer is left out, if it ends with one.

    Args:
        file: its name.
        tokenizer: of the model.
        checkpoint: what says which tokens end an answer.
        positions: of the model.

    Raises:
        EdgeLLMError: missing, empty, not in a known form, or longer than the model reads.
    """
    path = _OWN if file == DEFAULT else text_file(file)
    found = [*read_lines(path, lambda entry: (_prompt(entry, tokenizer), kind_of(entry)))]
    if not found:
        raise EdgeLLMError(f"{path} holds no prompts", hint="give one in each line")
    longest = max(len(ids) for ids, _ in found)
    if longest + _TOKENS > positions:
        raise EdgeLLMError(
            f"a prompt of {path} has {longest} tokens, an answer {_TOKENS}, the model {positions} "
            "positions",
            hint="leave out the longest prompts",
        )
    ends = end_ids(checkpoint)
    name = DEFAULT if file == DEFAULT else path.name
    prompts, kinds = zip(*found, strict=True)
    return Questions(prompts, kinds, frozenset(ends), name)


def _prompt(entry: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    if "messages" not in entry:
        ids = tokenizer(entry["text"].strip())["input_ids"]
    else:
        messages = entry["messages"]
        messages = messages[: -1 if messages and messages[-1]["role"] == "assistant" else None]
        if not messages:
            raise ValueError("a conversation without a question")
        if getattr(tokenizer, "chat_template", None):
            shown = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            ids = tokenizer(str(shown), add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer("".join(f"{each['content'].strip()}\n\n" for each in messages))[
                "input_ids"
            ]
    if not len(ids):
        raise ValueError("an empty prompt")
    return tuple(int(token) for token in ids)


def stored_answers(questions: Questions, folder: Path) -> list[list[int]]:
    """What the float model has answered so far."""
    path = folder / _STORED
    return json.loads(path.read_text("utf-8")) if path.exists() else [[] for _ in questions.prompts]


def store_answers(answers: list[list[int]], folder: Path) -> None:
    """Keep them for a run that goes on."""
    write_text(folder / _STORED, json.dumps(answers))


def read_asked(questions: Questions, folder: Path) -> list[Questioned]:
    """Prompts and answers."""
    answers = stored_answers(questions, folder)
    parts = zip(questions.kinds, questions.prompts, answers, strict=True)
    return [Questioned(kind, prompt, tuple(answer)) for kind, prompt, answer in parts]


def rows_of(asked: Sequence[Questioned]) -> Ids:
    """What is read to say the answers [questions, S]; zeros after the shorter ones."""
    found = np.zeros((len(asked), max(len(each.said) for each in asked)), np.int64)
    for row, each in zip(found, asked, strict=True):
        row[: len(each.said)] = each.said
    return found

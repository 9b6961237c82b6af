"""Prompts of greedy agreement, and the float model's outputs."""

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
from edgellm.export.checkpoints.checkpoint import Checkpoint
from edgellm.export.graph.architecture import end_ids
from edgellm.quantize.calibration.hidden_states import write_text
from edgellm.quantize.calibration.text import DEFAULT, kind_of, read_lines, templated, text_file
from edgellm.quantize.metrics.divergence import GreedyOutput, Ids

_OWN = Path(__file__).with_name("questions.jsonl")
_STORED = "answers.json"
_MAX_TOKENS = 32  # of an output


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """Tokenized prompts with their kinds."""

    prompts: tuple[tuple[int, ...], ...]
    kinds: tuple[str, ...]
    ends: frozenset[int]  # tokens that end an output
    name: str

    @property
    def sha256(self) -> str:
        """Hash of everything that affects the outputs."""
        facts = json.dumps([self.prompts, self.kinds, sorted(self.ends), _MAX_TOKENS])
        return hashlib.sha256(facts.encode()).hexdigest()

    def is_finished(self, output: Sequence[int]) -> bool:
        """Return whether an output is finished."""
        return len(output) == _MAX_TOKENS or (bool(output) and output[-1] in self.ends)


def read_questions(
    file: str, tokenizer: PreTrainedTokenizerBase, checkpoint: Checkpoint, positions: int
) -> Questions:
    """Read prompts of a .jsonl or .txt file, or "default": a dozen prompts of edgellm.

    The last assistant message of a conversation is dropped.

    Args:
        file: name of the file.
        tokenizer: of the model.
        checkpoint: names the tokens that end an output.
        positions: of the model.

    Raises:
        EdgeLLMError: missing, empty, of unknown form, or longer than the model's positions.
    """
    path = _OWN if file == DEFAULT else text_file(file)
    found = [*read_lines(path, lambda entry: (_prompt(entry, tokenizer), kind_of(entry)))]
    if not found:
        raise EdgeLLMError(f"{path} holds no prompts", hint="give one in each line")
    longest = max(len(ids) for ids, _ in found)
    if longest + _MAX_TOKENS > positions:
        raise EdgeLLMError(
            f"a prompt of {path} has {longest} tokens, an output {_MAX_TOKENS}, the model "
            f"{positions} positions",
            hint="leave out the longest prompts",
        )
    ends = end_ids(checkpoint)
    name = DEFAULT if file == DEFAULT else path.name
    prompts, kinds = zip(*found, strict=True)
    return Questions(prompts=prompts, kinds=kinds, ends=frozenset(ends), name=name)


def _prompt(entry: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    if "messages" not in entry:
        ids = tokenizer(entry["text"].strip())["input_ids"]
    else:
        messages = entry["messages"]
        messages = messages[: -1 if messages and messages[-1]["role"] == "assistant" else None]
        if not messages:
            raise ValueError("a conversation without a question")
        if getattr(tokenizer, "chat_template", None):
            shown = templated(messages, tokenizer, add_generation_prompt=True)
            ids = tokenizer(shown, add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer("".join(f"{each['content'].strip()}\n\n" for each in messages))[
                "input_ids"
            ]
    if not len(ids):
        raise ValueError("an empty prompt")
    return tuple(int(token) for token in ids)


def stored_outputs(questions: Questions, folder: Path) -> list[list[int]]:
    """Read the float model's outputs so far."""
    path = folder / _STORED
    return json.loads(path.read_text("utf-8")) if path.exists() else [[] for _ in questions.prompts]


def store_outputs(outputs: list[list[int]], folder: Path) -> None:
    """Store the outputs, so that an interrupted run resumes."""
    write_text(folder / _STORED, json.dumps(outputs))


def read_outputs(questions: Questions, folder: Path) -> list[GreedyOutput]:
    """Read the prompts with their outputs."""
    outputs = stored_outputs(questions, folder)
    parts = zip(questions.kinds, questions.prompts, outputs, strict=True)
    return [GreedyOutput(kind, prompt, tuple(output)) for kind, prompt, output in parts]


def padded_inputs(outputs: Sequence[GreedyOutput]) -> Ids:
    """Return `input_ids` of all outputs [outputs, S], padded with zeros."""
    found = np.zeros((len(outputs), max(len(each.input_ids) for each in outputs)), np.int64)
    for padded, each in zip(found, outputs, strict=True):
        padded[: len(each.input_ids)] = each.input_ids
    return found

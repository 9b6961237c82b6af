"""Draft trees of a run as JSON (`edgellm-trees` draws them)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgellm.device_runtime.api.llm import Step
from edgellm.device_runtime.request_files.request_file import OutputIndex
from edgellm.device_runtime.speculate.acceptance import Round
from edgellm.device_runtime.text.tokenizer import ChatTokenizer


@dataclass(slots=True)
class TreeLog:
    """The rounds of one output, if it was speculated."""

    tokenizer: ChatTokenizer
    rounds: list[dict[str, Any]] = field(default_factory=list)

    def add(self, step: Step) -> None:
        """Record the tree of a step."""
        found = step.round
        if found is None:
            return
        entry: dict[str, Any] = {"emitted": [self._text(token) for token in step.token_ids]}
        if found.tree is not None:
            entry |= tree_as_json(found, self.tokenizer)
            # of the path, by the policy
            entry["expected"] = [round(value, 4) for value in found.tree.probabilities.tolist()]
        self.rounds.append(entry)

    def _text(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id])


def tree_as_json(found: Round, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """The draft tree of a round: nodes in topological order, accepted path, bonus token."""
    tree = found.tree
    assert tree is not None
    return {
        "tokens": [tokenizer.decode([token]) for token in tree.token_ids.tolist()],
        "parents": tree.parents.tolist(),
        "confidence": [round(value, 4) for value in found.confidences],  # of the node, by the draft
        "path": list(found.path),
        "bonus": tokenizer.decode([found.token_ids[-1]]),
    }


def trees_as_json(
    input_file: str, rounds: Mapping[OutputIndex, list[dict[str, Any]]]
) -> dict[str, Any]:
    """Content of the file; `rounds` holds those of every output in order."""
    return {
        "input_file": input_file,
        "requests": [{**place.head(), "rounds": found} for place, found in rounds.items() if found],
    }

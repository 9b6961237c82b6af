"""The trees of a run as JSON, for people to look at (`edgellm-trees` draws them)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from edgellm.device_runtime.engine.llm import Step
from edgellm.device_runtime.tokenizer import ChatTokenizer


@dataclass(slots=True)
class TreeLog:
    """Rounds by request; only requests that were speculated have any."""

    tokenizer: ChatTokenizer
    requests: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, index: int, step: Step) -> None:
        """Keep the tree that gave a step."""
        found = step.round
        if found is None:
            return
        rounds = self.requests.setdefault(index, [])
        entry: dict[str, Any] = {"emitted": [self._text(token) for token in step.token_ids]}
        if found.tree is not None:
            tree = found.tree
            entry |= {
                "tokens": [self._text(token) for token in tree.token_ids.tolist()],
                "parents": tree.parents.tolist(),
                # Of the node and all above it, as the policy expected; of the node, by the draft.
                "expected": [round(value, 4) for value in tree.probabilities.tolist()],
                "confidence": [round(value, 4) for value in found.confidences],
                "path": list(found.path),
                "bonus": self._text(found.token_ids[-1]),
            }
        rounds.append(entry)

    def as_json(self, input_file: str) -> dict[str, Any]:
        """The content of the file."""
        return {
            "input_file": input_file,
            "requests": [
                {"request_idx": index, "rounds": rounds} for index, rounds in self.requests.items()
            ],
        }

    def _text(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id])

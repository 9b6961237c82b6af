"""Where each token of a step comes from, for those who draw it."""

from __future__ import annotations

from typing import Any

from edgellm.device_runtime.api.llm import Step


def origins(step: Step) -> dict[str, Any]:
    """The tokens' texts and origins, and the size of the tree that gave them.

    "drafted": the draft proposed it and the base accepted it; "bonus": the base's own token at
    the end of a verified tree; "plain": a pass of its own, nothing was drafted.
    """
    found = step.round
    is_drafted = found is not None and found.tree is not None and len(found.tree) > 1
    accepted = len(found.path) - 1 if is_drafted and found is not None else 0
    own = "bonus" if is_drafted else "plain"
    tokens = [
        [piece, "drafted" if index < accepted else own] for index, piece in enumerate(step.pieces)
    ]
    if not step.token_ids and step.text:
        tokens = [[step.text, own]]  # what was held back as a possible stop string
    size = len(found.tree) - 1 if found is not None and found.tree is not None else 0
    return {"tokens": tokens, "drafted": size, "accepted": accepted}

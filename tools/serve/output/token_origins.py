"""Origin of each token of a step, for displays."""

from __future__ import annotations

from typing import Any

from edgellm.device_runtime.api.llm import Step
from edgellm.device_runtime.request_files.tree_log import tree_as_json
from edgellm.device_runtime.text.tokenizer import ChatTokenizer


def origins(step: Step) -> dict[str, Any]:
    """Texts and origins of a step's tokens, and the size of its draft tree.

    "drafted": proposed by the draft and accepted by the base; "bonus": the base's own token after
    the accepted path; "plain": decoded in a forward pass without drafted tokens.
    """
    found = step.round
    is_drafted = found is not None and found.tree is not None and len(found.tree) > 1
    accepted = len(found.path) - 1 if is_drafted and found is not None else 0
    own = "bonus" if is_drafted else "plain"
    tokens = [
        [piece, "drafted" if index < accepted else own] for index, piece in enumerate(step.pieces)
    ]
    if not step.token_ids and step.text:
        tokens = [[step.text, own]]  # held back as a possible stop string
    size = len(found.tree) - 1 if found is not None and found.tree is not None else 0
    return {"tokens": tokens, "drafted": size, "accepted": accepted}


def draft_tree(step: Step, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """The draft tree of a step as `tree`; {} if nothing was drafted."""
    found = step.round
    if found is None or found.tree is None or len(found.tree) == 1:
        return {}
    return {"tree": tree_as_json(found, tokenizer)}

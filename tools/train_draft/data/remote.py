"""Answers to a draft's prompts by servers of its base, spread by Ray."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from edgellm.core.errors import EdgeLLMError
from edgellm.tools.remote.ray_map import Work, spread
from edgellm.tools.remote.servers import RejectedError, Servers, places
from edgellm.tools.train_draft.base import Prompt
from edgellm.tools.train_draft.data.corpus import (
    Generation,
    Sample,
    add_answers,
    begin_answers,
    sampled_places,
)

Spread = Callable[[Sequence[dict[str, Any]], Work, int], Any]


def answer_prompts_remotely(
    servers: Servers,
    prompts: Sequence[Prompt],
    stop_ids: frozenset[int],
    store: Path,
    how: Generation,
    spread: Spread = spread,
) -> Iterator[int]:
    """As `corpus.answer_prompts`, by servers; yields how many are answered.

    Answers are stored as they come. A greedy one is what the base says; a sampled one depends on
    its server, too, but is never made twice.

    Raises:
        EdgeLLMError: prompts with pictures, servers without token ids, or none that answers.
    """
    if any(prompt.pictures for prompt in prompts):
        raise EdgeLLMError("--ray answers text only", hint="leave out --ray for pictures")
    done = begin_answers(store)
    count = sum(prompt in done for prompt in prompts)
    yield count
    model, sampled = servers.model(), sampled_places(prompts, how)
    missing = [place for place, prompt in enumerate(prompts) if prompt not in done]
    rows = [
        {
            "prompt": prompts[place].ids,
            "first": first,
            "temperature": how.temperature if place in sampled else 0.0,
            "seed": how.seed + place,
        }
        for place, first in zip(missing, places(len(missing), servers), strict=True)
    ]
    work = functools.partial(
        answer_row, servers=servers, model=model, stop_ids=sorted(stop_ids),
        max_new_tokens=how.max_new_tokens,
    )  # fmt: skip
    for row in spread(rows, work, len(servers.urls)):
        sample = Sample(Prompt(tuple(row["prompt"])), tuple(row["answer"]))
        if sample.prompt not in done and sample.answer:
            done.add(sample.prompt)
            add_answers(store, [sample])
        count += 1
        yield count


def answer_row(
    row: dict[str, Any], *, servers: Servers, model: str, stop_ids: list[int], max_new_tokens: int
) -> dict[str, Any]:
    """The prompt of a row with its answer; without one where the servers refuse it."""
    body = {
        "model": model, "prompt": row["prompt"], "max_tokens": max_new_tokens,
        "temperature": row["temperature"], "seed": row["seed"], "stop_token_ids": stop_ids,
        "return_token_ids": True,
    }  # fmt: skip
    try:
        (choice,) = servers.post("/v1/completions", body, row["first"])["choices"]
    except RejectedError:  # it is longer than they take
        return {"prompt": row["prompt"], "answer": []}
    if "token_ids" not in choice:
        raise EdgeLLMError(
            "the servers do not give token ids",
            hint="edgellm-serve and vLLM of 2026 give them (return_token_ids)",
        )
    return {"prompt": row["prompt"], "answer": choice["token_ids"]}

"""Completes training prompts with servers of the base, distributed by Ray."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from edgellm.core.errors import EdgeLLMError
from edgellm.tools.distributed.ray_map import Work, spread
from edgellm.tools.distributed.servers import RejectedError, Servers, places
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
    """Complete prompts as `corpus.answer_prompts` does, with servers; yield the number of answers.

    Answers are stored as they arrive. Sampled answers depend on the server, but are generated only
    once.

    Raises:
        EdgeLLMError: prompts have images, servers return no token ids, or no server responds.
    """
    if any(prompt.pictures for prompt in prompts):
        raise EdgeLLMError("--ray supports text only", hint="leave out --ray for images")
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
    """Complete the prompt of a row; the answer is empty if the servers reject it."""
    body = {
        "model": model, "prompt": row["prompt"], "max_tokens": max_new_tokens,
        "temperature": row["temperature"], "seed": row["seed"], "stop_token_ids": stop_ids,
        "return_token_ids": True,
    }  # fmt: skip
    try:
        (choice,) = servers.post("/v1/completions", body, row["first"])["choices"]
    except RejectedError:  # the prompt is too long
        return {"prompt": row["prompt"], "answer": []}
    if "token_ids" not in choice:
        raise EdgeLLMError(
            "the servers do not return token ids",
            hint="use edgellm-serve, or vLLM of 2026 (return_token_ids)",
        )
    return {"prompt": row["prompt"], "answer": choice["token_ids"]}

"""Usage, acceptance of drafted tokens and timing of a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

from edgellm.tools.serve.engines.events import Finished


def together(figures: Sequence[Finished], *, of_one: int = 1) -> Finished:
    """Merge the statistics of a request's sequences into one.

    Args:
        figures: statistics of each sequence, in order.
        of_one: number of sequences for each prompt, whose tokens count once.
    """
    first_ms = min(one.first_token_ms for one in figures)
    last_ms = max(one.first_token_ms + one.generation_ms for one in figures)
    return Finished(
        finish_reason=figures[-1].finish_reason,
        prompt_tokens=sum(one.prompt_tokens for one in figures[::of_one]),
        cached_tokens=sum(one.cached_tokens for one in figures[::of_one]),
        completion_tokens=sum(one.completion_tokens for one in figures),
        rounds=tuple(chain.from_iterable(one.rounds for one in figures)),
        queue_ms=figures[0].queue_ms,
        seed=figures[0].seed,
        first_token_ms=first_ms,
        generation_ms=last_ms - first_ms,
    )


def usage(figures: Finished) -> dict[str, Any]:
    """OpenAI's usage, with acceptance figures if tokens were drafted."""
    counts: dict[str, Any] = {
        "prompt_tokens": figures.prompt_tokens,
        "completion_tokens": figures.completion_tokens,
        "total_tokens": figures.prompt_tokens + figures.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": figures.cached_tokens},
    }
    if figures.rounds:
        counts["speculation"] = acceptance(figures)
    return counts


def acceptance(figures: Finished) -> dict[str, Any]:
    """Drafted and accepted tokens; the root of a tree is not a drafted token."""
    drafted = sum(counts.tree_size - 1 for counts in figures.rounds)
    accepted = sum(counts.accepted for counts in figures.rounds)
    return {
        "acceptance_rate": accepted / drafted if drafted else 0.0,
        "total_accepted_draft_tokens": accepted,
        "total_draft_tokens": drafted,
        "acceptance_length": 1 + accepted / len(figures.rounds) if figures.rounds else 1.0,
    }


def timing(figures: Finished) -> dict[str, Any]:
    """Times in ms, the first sequence's seed, and vLLM's record of speculation for AIPerf."""
    decoded = figures.completion_tokens - 1
    seconds = figures.generation_ms / 1e3
    times: dict[str, Any] = {
        "queue_time_ms": figures.queue_ms,
        "time_to_first_token_ms": figures.first_token_ms,
        "generation_time_ms": figures.generation_ms,
        "tokens_per_second": decoded / seconds if decoded > 0 and seconds else None,
    }
    if figures.seed is not None:
        times["seed"] = figures.seed
    if figures.rounds:
        times["speculative_decoding"] = _record(figures)
    return times


def _record(figures: Finished) -> dict[str, Any]:
    found = acceptance(figures)
    deepest = max(counts.tree_depth for counts in figures.rounds)
    steps = Counter(counts.accepted for counts in figures.rounds)
    return {
        "mean_acceptance_length": found["acceptance_length"],
        "draft_acceptance_rate": found["acceptance_rate"],
        "acceptance_histogram": [steps[length] for length in range(deepest + 1)],
        "num_spec_steps": len(figures.rounds),
        "num_accepted_draft_tokens": found["total_accepted_draft_tokens"],
        "num_draft_tokens": found["total_draft_tokens"],
        "num_spec_tokens": deepest,
    }

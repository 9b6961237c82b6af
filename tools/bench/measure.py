"""One sample of each test, by the runtime's own loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from edgellm.core.errors import (
    LimitError,
    RequestError,
)
from edgellm.core.manifest import Engine
from edgellm.device_runtime.api.llm import LLM, RequestOutput
from edgellm.device_runtime.engine.profile import GENERATION, PREFILL, Profile
from edgellm.device_runtime.engine.prompt import Prompt
from edgellm.device_runtime.engine.sequence import Sequence as Request
from edgellm.device_runtime.engine.step import step
from edgellm.device_runtime.requests.request_file import Options
from edgellm.device_runtime.requests.responses import start_request
from edgellm.device_runtime.sampling.sampler import Sampler, SamplingParams
from edgellm.tools.bench.results import Pair

_GREEDY = SamplingParams(temperature=0)
# What an earlier turn is made of.
_FILLER = (
    "The harbour lies between two hills, and the boats come home with the evening wind. Nets dry "
    "on the wall while the cook counts plates, cups and guests. A letter has come from the north; "
    "nobody has opened it yet, for the lamp needs oil and the children want their story. "
)


def check_sizes(
    manifest: Engine, prompts: Sequence[int], depths: Sequence[int], generated: int
) -> None:
    """Refuse what the engine was not built for.

    Raises:
        LimitError: says which length, and what the engine takes.
    """
    for flag, lengths in (("--prompt", prompts), ("--depth", depths)):
        if min(lengths, default=0) < 0:
            raise LimitError(f"{flag} {min(lengths)}: a cache holds no negative number of tokens")
    for length in prompts:
        if length > manifest.max_input_len:
            raise LimitError(
                f"--prompt {length}: the engine takes prompts of {manifest.max_input_len} tokens",
                hint=f"give less, or build with --maxInputLen {length}",
            )
    for depth in depths:
        needed = max(depth, 1) + generated
        if needed > manifest.max_kv_cache_capacity:
            raise LimitError(
                f"--depth {depth} with --generate {generated}: the KV cache holds "
                f"{manifest.max_kv_cache_capacity} tokens",
                hint=f"give less, or build with --maxKVCacheCapacity {needed}",
            )


def prefill_rate(llm: LLM, tokens: int) -> float:
    """Tokens per second of reading a prompt of random tokens."""
    profile = _run(llm, tokens, 1)
    return tokens / profile.total_ms(PREFILL) * 1e3


def decode_rate(llm: LLM, depth: int, tokens: int) -> float:
    """Tokens per second of plain decoding after `depth` random tokens (at least one)."""
    profile = _run(llm, max(depth, 1), tokens + 1)  # the prefill gives the first
    return tokens / profile.total_ms(GENERATION) * 1e3


def _run(llm: LLM, prompt_tokens: int, tokens: int) -> Profile:
    """Read random tokens and go on for so many; an end token does not end it."""
    random = np.random.default_rng(0)
    ids = random.integers(llm.manifest.decoder.vocab_size, size=prompt_tokens).tolist()
    request = Request(Prompt(ids), Sampler(_GREEDY), tokens)
    while not request.is_over:
        step(llm.slot, [request])
    return request.profile


def behind(llm: LLM, raw: Any, depth: int) -> Any:
    """A request with an earlier turn of about `depth` tokens before its last message."""
    if not depth or not isinstance(raw, dict) or not isinstance(raw.get("messages"), list):
        return raw  # what is malformed is refused where it runs
    length = len(llm.tokenizer.encode(_FILLER, add_special_tokens=False))
    text = _FILLER * (depth // length + 1)
    turn = [
        {"role": "user", "content": text[: len(_FILLER) * depth // length]},
        {"role": "assistant", "content": "I see."},
    ]
    return {**raw, "messages": [*raw["messages"][:-1], *turn, *raw["messages"][-1:]]}


def answer_both_ways(
    llm: LLM, options: Options, raw: Any, index: int, pair: Pair, *, eagle_first: bool
) -> None:
    """Answer a request plainly and with the draft, and add a sample to each of a pair.

    Raises:
        RequestError: the request is malformed, does not fit, or has an answer of one token.
    """
    answers: dict[bool, RequestOutput] = {}
    for speculative in (eagle_first, not eagle_first):
        answer = start_request(llm, options, raw, index, speculative=speculative).answer
        for _ in answer:
            pass
        if len(answer.token_ids) < 2:
            raise RequestError(
                f"$.requests[{index}] has an answer of one token, out of the prefill",
                hint="give a request with a longer answer, or a larger --maxGenerateLength",
            )
        answers[speculative] = answer
    for series, answer in ((pair.plain, answers[False]), (pair.eagle, answers[True])):
        decoded = len(answer.token_ids) - 1
        series.tokens, series.depth = decoded, answer.prompt_token_count
        series.samples.append(decoded / answer.profile.decode_ms() * 1e3)
    rounds = answers[True].profile.rounds
    pair.rounds += len(rounds)
    pair.emitted += sum(counts.emitted for counts in rounds)
    pair.nodes += sum(counts.tree_size for counts in rounds)
    pair.same_answers += answers[True].token_ids == answers[False].token_ids

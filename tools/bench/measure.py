"""Takes one sample of a test with the runtime's own loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from edgellm.device_runtime.request_files.request_file import Options
from edgellm.device_runtime.request_files.responses import start_request
from edgellm.device_runtime.sampling.params import SamplingParams
from edgellm.device_runtime.sampling.sampler import Sampler
from edgellm.tools.bench.results import Pair
from edgellm.tools.energy import Energy

_GREEDY = SamplingParams(temperature=0)
# Text of earlier turns.
_FILLER = (
    "The harbour lies between two hills, and the boats come home with the evening wind. Nets dry "
    "on the wall while the cook counts plates, cups and guests. A letter has come from the north; "
    "nobody has opened it yet, for the lamp needs oil and the children want their story. "
)


def check_sizes(
    manifest: Engine, prompts: Sequence[int], depths: Sequence[int], generated: int
) -> None:
    """Check lengths against the engine's limits.

    Raises:
        LimitError: names the length and the limit.
    """
    for flag, lengths in (("--prompt", prompts), ("--depth", depths)):
        if min(lengths, default=0) < 0:
            raise LimitError(f"{flag} {min(lengths)}: a number of tokens cannot be negative")
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


Window = Callable[[Energy], AbstractContextManager[None]]  # adds what its block needs


def no_energy(_: Energy) -> AbstractContextManager[None]:
    """A window that measures no energy."""
    return nullcontext()


def prefill_rate(
    llm: LLM, tokens: int, into: Energy | None = None, window: Window = no_energy
) -> float:
    """Return the prefill speed of random tokens, tokens/s; add their energy."""
    profile = _run(llm, tokens, 1, (into, None), window)
    return tokens / profile.total_ms(PREFILL) * 1e3


def decode_rate(
    llm: LLM, depth: int, tokens: int, into: Energy | None = None, window: Window = no_energy
) -> float:
    """Return the speed of plain decoding after `depth` random tokens (at least one), tokens/s.

    The energy that is added is that of decoding alone.
    """
    # The first token comes from the prefill.
    profile = _run(llm, max(depth, 1), tokens + 1, (None, into), window)
    return tokens / profile.total_ms(GENERATION) * 1e3


def _run(
    llm: LLM,
    prompt_tokens: int,
    tokens: int,
    into: tuple[Energy | None, Energy | None],
    window: Window,
) -> Profile:
    """Prefill random tokens, then decode `tokens` tokens, also after an end token.

    `into`: energies of prefill and decoding.
    """
    random = np.random.default_rng(0)
    ids = random.integers(llm.manifest.decoder.vocab_size, size=prompt_tokens).tolist()
    request = Request(prompt=Prompt(ids), sampler=Sampler(params=_GREEDY), max_tokens=tokens)
    for energy, until in zip(into, (1, tokens), strict=True):
        with window(energy or Energy()):
            while not request.is_over and len(request.token_ids) < until:
                step(llm.kv_cache_manager, [request])
    return request.profile


def with_depth(llm: LLM, raw: Any, depth: int) -> Any:
    """Return a request with an earlier turn of about `depth` tokens before its last message."""
    if not depth or not isinstance(raw, dict) or not isinstance(raw.get("messages"), list):
        return raw  # malformed requests are rejected when they run
    length = len(llm.tokenizer.encode(_FILLER, add_special_tokens=False))
    text = _FILLER * (depth // length + 1)
    turn = [
        {"role": "user", "content": text[: len(_FILLER) * depth // length]},
        {"role": "assistant", "content": "I see."},
    ]
    return {**raw, "messages": [*raw["messages"][:-1], *turn, *raw["messages"][-1:]]}


def run_both_modes(
    llm: LLM,
    options: Options,
    raw: Any,
    index: int,
    pair: Pair,
    *,
    eagle_first: bool,
    window: Window = no_energy,
) -> None:
    """Run a request with and without speculation, and add a sample to each series of a pair.

    Raises:
        RequestError: the request is malformed, too long, or its output has one token only.
    """
    outputs: dict[bool, RequestOutput] = {}
    for speculative in (eagle_first, not eagle_first):
        output = start_request(llm, options, raw, index, speculative=speculative).answer
        steps = iter(output)
        next(steps, None)  # the prefill
        with window((pair.eagle if speculative else pair.plain).energy):
            for _ in steps:
                pass
        if len(output.token_ids) < 2:
            raise RequestError(
                f"$.requests[{index}] has an output of one token, from the prefill",
                hint="give a request with a longer output, or a larger --maxGenerateLength",
            )
        outputs[speculative] = output
    for series, output in ((pair.plain, outputs[False]), (pair.eagle, outputs[True])):
        decoded = len(output.token_ids) - 1
        series.tokens, series.depth = decoded, output.prompt_token_count
        series.samples.append(decoded / output.profile.decode_ms() * 1e3)
    rounds = outputs[True].profile.rounds
    pair.rounds += len(rounds)
    pair.emitted += sum(counts.emitted for counts in rounds)
    pair.nodes += sum(counts.tree_size for counts in rounds)
    pair.same_answers += outputs[True].token_ids == outputs[False].token_ids

"""`llm_inference --prove`: compares decoding with and without speculation, token by token."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.engine.prompt import Prompt
from edgellm.device_runtime.engine.step import prefill_chunk
from edgellm.device_runtime.networks.decoder import DecoderNetwork, PassResult, SequencePart
from edgellm.device_runtime.request_faults import Confined
from edgellm.device_runtime.request_files.request_file import Options, parse_request, sampling_of
from edgellm.device_runtime.request_files.responses import start_request
from edgellm.device_runtime.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Result for one prompt; `divergence` is the index of the first token that differs."""

    index: int
    tokens: int  # of the plain output; 0 if the request forbids speculation
    has_equal_bits: bool = False  # of the logits of every token, not only of the tokens
    divergence: int | None = None
    plain_token: int | None = None
    speculated_token: int | None = None
    # Difference of the logits of the two tokens; None if one output is longer.
    margin: float | None = None
    spread: float | None = None  # standard deviation of the logits at that token
    refused: str = ""  # the error, if there is no output

    def line(self) -> str:
        """One line of text."""
        if self.refused:
            return f"request {self.index}: {self.refused}"
        if not self.tokens:
            return f"request {self.index}: not compared, disable_spec_decode is set"
        if self.divergence is None:
            bits = ", equal bits" if self.has_equal_bits else ""
            return f"request {self.index}: {self.tokens} tokens, identical{bits}"
        if self.margin is None:
            return f"request {self.index}: identical until one ends, after {self.divergence} tokens"
        return (
            f"request {self.index}: diverges at token {self.divergence} of {self.tokens}: plain "
            f"{self.plain_token}, speculated {self.speculated_token}; logit margin "
            f"{self.margin:.4g} (standard deviation of the logits {self.spread:.4g})"
        )


def prove(llm: LLM, options: Options, requests: list[Any]) -> Iterator[Comparison]:
    """Decode every request twice, greedily, and compare the token ids and their logits."""
    for index, raw in enumerate(requests):
        yield _compare_or_refuse(llm, options, raw, index)


def _compare_or_refuse(llm: LLM, options: Options, raw: Any, index: int) -> Comparison:
    failures: list[EdgeLLMError] = []
    with Confined(failures.append):
        return _compare(llm, options, raw, index)
    return Comparison(index=index, tokens=0, refused=str(failures[0]))


def _compare(llm: LLM, options: Options, raw: Any, index: int) -> Comparison:
    if parse_request(raw, index).disable_spec_decode:
        return Comparison(index=index, tokens=0)
    (plain, rows), (speculated, other_rows) = (
        _watched(llm, lambda s=s: _token_ids(llm, options, raw, index, speculative=s))
        for s in (False, True)
    )
    place = first_difference(plain, speculated)
    if plain == speculated:
        shared = rows.keys() & other_rows.keys()
        has_equal_bits = len(shared) >= len(plain) and all(
            rows[position] <= other_rows[position] for position in shared
        )
        return Comparison(index=index, tokens=len(plain), has_equal_bits=has_equal_bits)
    if place is None:
        return Comparison(
            index=index, tokens=len(plain), divergence=min(len(plain), len(speculated))
        )
    return _explained(llm, options, raw, index, place, plain, speculated)


class _Watched:
    """A network that keeps a hash of the logits of every position."""

    def __init__(self, network: DecoderNetwork) -> None:
        self._network = network
        self.rows: dict[int, set[bytes]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def run_batch(self, parts: Sequence[SequencePart]) -> list[PassResult]:
        """See `DecoderNetwork.run_batch`."""
        results = self._network.run_batch(parts)
        for part, result in zip(parts, results, strict=True):
            positions = part.position_ids
            if positions is None:
                positions = part.write_index + np.arange(len(part.token_ids))
            for row, logits in zip(part.logits_index, result.logits, strict=True):
                seen = self.rows.setdefault(int(positions[row]), set())
                seen.add(hashlib.sha256(logits.tobytes()).digest())
        return results


def _watched(llm: LLM, decode: Callable[[], list[int]]) -> tuple[list[int], dict[int, set[bytes]]]:
    """The result of `decode`, and hashes of its logits by position."""
    network = llm.base
    watched = _Watched(network)
    llm.base = cast(DecoderNetwork, watched)
    try:
        return decode(), watched.rows
    finally:
        llm.base = network


def _token_ids(llm: LLM, options: Options, raw: Any, index: int, *, speculative: bool) -> list[int]:
    answer = start_request(llm, options, raw, index, greedy=True, speculative=speculative).answer
    for _ in answer:
        pass
    return answer.token_ids


def _explained(
    llm: LLM,
    options: Options,
    raw: Any,
    index: int,
    place: int,
    plain: list[int],
    speculated: list[int],
) -> Comparison:
    """Recompute the logits at the divergence of two outputs."""
    started = start_request(llm, options, raw, index, greedy=True, speculative=False)
    own = sampling_of(parse_request(raw, index).merged(options), llm.defaults, greedy=True)
    logits = logits_behind(llm, started.answer.prompt, plain[:place], own)
    one, other = plain[place], speculated[place]
    return Comparison(
        index=index,
        tokens=len(plain),
        has_equal_bits=False,
        divergence=place,
        plain_token=one,
        speculated_token=other,
        margin=float(logits[one] - logits[other]),
        spread=float(logits.std()),
    )


def logits_behind(
    llm: LLM, prompt: Prompt, taken: Sequence[int], sampling: SamplingParams
) -> NDArray[np.float64]:
    """Logits [V] after a prompt and the first output tokens, with penalties."""
    kv_cache_manager = llm.kv_cache_manager
    text = replace(prompt, token_ids=[*prompt.token_ids, *taken])
    base, chunk = kv_cache_manager.base, kv_cache_manager.prefill_rows
    kv = base.new_kv()
    try:
        kv_cache_manager.set_up(kv, prompt)
        result, rows = prefill_chunk(base, kv, text, 0, chunk)
        while rows < len(text.token_ids):
            result, rows = prefill_chunk(base, kv, text, rows, chunk)
    finally:
        kv.free()
    sampler = llm.sampler(sampling, prompt)
    sampler.take(taken)
    return sampler.adjusted(result.logits[0]).astype(np.float64)


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which both have different tokens."""
    pairs = enumerate(zip(plain, other, strict=False))
    return next((at for at, (one, another) in pairs if one != another), None)

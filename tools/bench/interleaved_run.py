"""Runs all tests interleaved, so that a slower machine affects all of them."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.request_files.request_file import Options
from edgellm.device_runtime.request_files.responses import start_request
from edgellm.tools.bench.measure import (
    Window,
    decode_rate,
    no_energy,
    prefill_rate,
    run_both_modes,
    with_depth,
)
from edgellm.tools.bench.results import DECODE, EAGLE, PLAIN, PREFILL, TEXT, Pair, Results, Series

_SHOWN_CHARACTERS = 24  # of a prompt
Report = Callable[[str], None]  # gets the name of each test


@dataclass(frozen=True, slots=True)
class Texts:
    """Requests to run with and without speculation."""

    options: Options
    requests: list[Any]
    names: list[str]

    @classmethod
    def at(cls, llm: LLM, options: Options, requests: list[Any], depths: Sequence[int]) -> Texts:
        """Return each request after each number of tokens.

        Raises:
            RequestError: a request is malformed or too long.
        """
        names = [_name(raw) + (f" behind {n}" if n else "") for n in depths for raw in requests]
        placed = [with_depth(llm, raw, depth) for depth in depths for raw in requests]
        for index, raw in enumerate(placed):
            start_request(llm, options, raw, index)  # computes nothing
        return cls(options, placed, names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The tests of a run."""

    prompts: Sequence[int]  # lengths to prefill
    depths: Sequence[int]  # tokens in the KV cache before decoding
    generated: int  # tokens to decode
    texts: Texts | None
    window: Window = no_energy  # measures the energy of a test

    def series(self) -> list[Series]:
        """Return empty series of the tests with random tokens."""
        return [
            *(
                Series(test=PREFILL, name=f"prefill {n}", mode=PLAIN, tokens=n, depth=0)
                for n in self.prompts
            ),
            *(
                Series(
                    test=DECODE,
                    name=f"decode {self.generated} behind {n}",
                    mode=PLAIN,
                    tokens=self.generated,
                    depth=n,
                )
                for n in self.depths
            ),
        ]

    def pairs(self) -> list[Pair]:
        """Return empty pairs of the texts."""
        names = [] if self.texts is None else self.texts.names
        return [Pair(plain=_text(name, PLAIN), eagle=_text(name, EAGLE)) for name in names]


def run(llm: LLM, work: Work, results: Results, repetitions: int, report: Report) -> None:
    """Run all tests once to warm up, then `repetitions` times.

    Args:
        llm: the engine, with its draft if there are texts.
        work: the tests.
        results: gets every sample.
        repetitions: samples of each test.
        report: gets the name of each test.

    Raises:
        RequestError: a text fails.
    """
    _once(llm, work, work.series(), work.pairs(), 0, lambda what: report(f"warming up: {what}"))
    results.series, results.pairs = work.series(), work.pairs()
    for repetition in range(repetitions):
        _once(
            llm,
            work,
            results.series,
            results.pairs,
            repetition,
            lambda what, at=repetition: report(f"{at + 1} of {repetitions}: {what}"),
        )
        results.repetitions = repetition + 1
        results.peak_memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _once(
    llm: LLM, work: Work, series: list[Series], pairs: list[Pair], repetition: int, report: Report
) -> None:
    """Take a sample of each test; plain and speculative runs alternate in being first."""
    for one in series:
        report(one.name)
        rate = (
            prefill_rate(llm, one.tokens, one.energy, work.window)
            if one.test == PREFILL
            else decode_rate(llm, one.depth, one.tokens, one.energy, work.window)
        )
        one.samples.append(rate)
    for index, pair in enumerate(pairs):
        assert work.texts is not None
        report(pair.plain.name)
        run_both_modes(
            llm,
            work.texts.options,
            work.texts.requests[index],
            index,
            pair,
            eagle_first=(repetition + index) % 2 == 1,
            window=work.window,
        )


def _text(name: str, mode: str) -> Series:
    return Series(test=TEXT, name=name, mode=mode, tokens=0, depth=0)


def _name(raw: Any) -> str:
    """Return the beginning of the last message; the request is validated when it runs."""
    try:
        content = raw["messages"][-1]["content"]
        pieces = [content] if isinstance(content, str) else [item["text"] for item in content]
        text = " ".join(" ".join(pieces).split())
    except (KeyError, IndexError, TypeError):
        return "request"
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"

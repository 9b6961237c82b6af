"""All tests in turns, so that what slows the machine down meets all of them."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.requests.request_file import Options
from edgellm.device_runtime.requests.responses import start_request
from edgellm.tools.bench.measure import answer_both_ways, behind, decode_rate, prefill_rate
from edgellm.tools.bench.results import DECODE, EAGLE, PLAIN, PREFILL, TEXT, Pair, Results, Series

_SHOWN_CHARACTERS = 24  # of a prompt
Report = Callable[[str], None]  # told what is being measured


@dataclass(frozen=True, slots=True)
class Texts:
    """Requests to answer plainly and with the draft."""

    options: Options
    requests: list[Any]
    names: list[str]

    @classmethod
    def at(cls, llm: LLM, options: Options, requests: list[Any], depths: Sequence[int]) -> Texts:
        """Every request after every number of tokens.

        Raises:
            RequestError: one is malformed, or does not fit.
        """
        names = [_name(raw) + (f" behind {n}" if n else "") for n in depths for raw in requests]
        placed = [behind(llm, raw, depth) for depth in depths for raw in requests]
        for index, raw in enumerate(placed):
            start_request(llm, options, raw, index)  # computes nothing
        return cls(options, placed, names)


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be measured."""

    prompts: Sequence[int]  # lengths to read
    depths: Sequence[int]  # tokens in the cache before decoding begins
    generated: int  # tokens to decode
    texts: Texts | None

    def series(self) -> list[Series]:
        """Empty series of the tests of random tokens."""
        return [
            *(Series(PREFILL, f"prefill {n}", PLAIN, n, 0) for n in self.prompts),
            *(
                Series(DECODE, f"decode {self.generated} behind {n}", PLAIN, self.generated, n)
                for n in self.depths
            ),
        ]

    def pairs(self) -> list[Pair]:
        """Empty pairs of the texts."""
        names = [] if self.texts is None else self.texts.names
        return [Pair(_text(name, PLAIN), _text(name, EAGLE)) for name in names]


def run(llm: LLM, work: Work, results: Results, repetitions: int, report: Report) -> None:
    """Measure everything once without counting it, then `repetitions` times.

    Args:
        llm: the engine, with its draft if there are texts.
        work: what is to be measured.
        results: grows with every sample.
        repetitions: samples of every test.
        report: told what is being measured.

    Raises:
        RequestError: one of the texts cannot be answered.
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
    """A sample of everything; of the two ways to answer a text, each is first in turn."""
    for one in series:
        report(one.name)
        rate = (
            prefill_rate(llm, one.tokens)
            if one.test == PREFILL
            else decode_rate(llm, one.depth, one.tokens)
        )
        one.samples.append(rate)
    for index, pair in enumerate(pairs):
        assert work.texts is not None
        report(pair.plain.name)
        answer_both_ways(
            llm,
            work.texts.options,
            work.texts.requests[index],
            index,
            pair,
            eagle_first=(repetition + index) % 2 == 1,
        )


def _text(name: str, mode: str) -> Series:
    return Series(TEXT, name, mode, 0, 0)


def _name(raw: Any) -> str:
    """The beginning of the last message; the request itself is checked where it runs."""
    try:
        content = raw["messages"][-1]["content"]
        pieces = [content] if isinstance(content, str) else [item["text"] for item in content]
        text = " ".join(" ".join(pieces).split())
    except (KeyError, IndexError, TypeError):
        return "request"
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"

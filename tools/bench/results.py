"""What a benchmark gives: samples with their statistics, and what they were taken on."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

PREFILL, DECODE, TEXT = "prefill", "decode", "text"
PLAIN, EAGLE = "plain", "eagle"


@dataclass(slots=True)
class Series:
    """One test: a sample for each repetition, tokens per second."""

    test: str  # PREFILL, DECODE or TEXT
    name: str
    mode: str  # PLAIN or EAGLE
    tokens: int  # of a sample; of a text, of its last answer
    depth: int  # tokens in the cache before the first counted one
    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Of the samples; 0 without."""
        return statistics.median(self.samples) if self.samples else 0.0

    @property
    def mean(self) -> float:
        """Of the samples; 0 without."""
        return statistics.fmean(self.samples) if self.samples else 0.0

    @property
    def deviation(self) -> float:
        """Standard deviation of the samples (n - 1); 0 with fewer than two."""
        return statistics.stdev(self.samples) if len(self.samples) > 1 else 0.0


@dataclass(slots=True)
class Pair:
    """One prompt answered plainly and with the draft, turn by turn."""

    plain: Series
    eagle: Series
    rounds: int = 0  # verifications, of all repetitions
    emitted: int = 0  # tokens that they gave
    nodes: int = 0  # that they verified, roots included
    same_answers: int = 0  # repetitions in which both answers were token by token the same

    @property
    def ratios(self) -> list[float]:
        """Speculation over plain decoding, repetition by repetition."""
        both = zip(self.eagle.samples, self.plain.samples, strict=False)
        return [eagle / plain for eagle, plain in both]

    @property
    def acceptance_length(self) -> float:
        """Tokens of a round."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def tree_size(self) -> float:
        """Verified nodes of a round."""
        return self.nodes / self.rounds if self.rounds else 0.0


@dataclass(slots=True)
class Results:
    """Everything of one run."""

    engine: dict[str, str]
    machine: dict[str, str]
    settings: dict[str, str]
    series: list[Series] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    repetitions: int = 0  # that are complete
    peak_memory_bytes: int = 0  # of the process

    @property
    def facts(self) -> dict[str, str]:
        """What it was taken on."""
        return {**self.engine, **self.settings, **self.machine}

    @property
    def ratios(self) -> list[float]:
        """Speculation over plain decoding, of all prompts and repetitions."""
        return [ratio for pair in self.pairs for ratio in pair.ratios]

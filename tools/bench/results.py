"""Results of a benchmark: samples, statistics, engine and machine."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from edgellm.tools.energy import Energy

PREFILL, DECODE, TEXT = "prefill", "decode", "text"
PLAIN, EAGLE = "plain", "eagle"


@dataclass(slots=True, kw_only=True)
class Series:
    """Samples of one test, one per repetition, tokens/s."""

    test: str  # PREFILL, DECODE or TEXT
    name: str
    mode: str  # PLAIN or EAGLE
    tokens: int  # of a sample; for texts, of the last output
    depth: int  # tokens in the KV cache before the first counted one
    samples: list[float] = field(default_factory=list)
    energy: Energy = field(default_factory=Energy)  # of all samples, if it is measured

    @property
    def joules_per_token(self) -> float:
        """Mean over all samples; 0 if no energy was measured."""
        counted = self.tokens * len(self.samples)
        return self.energy.joules / counted if counted else 0.0

    @property
    def median(self) -> float:
        """Median of the samples; 0 without samples."""
        return statistics.median(self.samples) if self.samples else 0.0

    @property
    def mean(self) -> float:
        """Mean of the samples; 0 without samples."""
        return statistics.fmean(self.samples) if self.samples else 0.0

    @property
    def deviation(self) -> float:
        """Standard deviation of the samples (n - 1); 0 with fewer than two."""
        return statistics.stdev(self.samples) if len(self.samples) > 1 else 0.0


@dataclass(slots=True, kw_only=True)
class Pair:
    """One prompt with plain and with speculative decoding, in turn."""

    plain: Series
    eagle: Series
    rounds: int = 0  # of speculation, over all repetitions
    emitted: int = 0  # tokens from rounds
    nodes: int = 0  # verified in rounds, roots included
    same_answers: int = 0  # repetitions with equal tokens of both outputs

    @property
    def ratios(self) -> list[float]:
        """Speed of speculative over plain decoding, per repetition."""
        both = zip(self.eagle.samples, self.plain.samples, strict=False)
        return [eagle / plain for eagle, plain in both]

    @property
    def acceptance_length(self) -> float:
        """Tokens per round."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def tree_size(self) -> float:
        """Verified nodes per round."""
        return self.nodes / self.rounds if self.rounds else 0.0


@dataclass(slots=True, kw_only=True)
class Results:
    """Results of one run."""

    engine: dict[str, str]
    machine: dict[str, str]
    settings: dict[str, str]
    series: list[Series] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    repetitions: int = 0  # complete ones
    peak_memory_bytes: int = 0  # of the process
    measures_energy: bool = False

    @property
    def facts(self) -> dict[str, str]:
        """Engine, settings and machine."""
        return {**self.engine, **self.settings, **self.machine}

    @property
    def ratios(self) -> list[float]:
        """Speed of speculative over plain decoding, of all prompts and repetitions."""
        return [ratio for pair in self.pairs for ratio in pair.ratios]

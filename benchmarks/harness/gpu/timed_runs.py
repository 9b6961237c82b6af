"""Timed runs of an engine, and the speed-up of an oracle's acceptance lengths."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.api.llm import LLM
from edgellm.device_runtime.sampling.params import SamplingParams
from harness.gpu.clock import Clocks
from harness.gpu.oracle import predicting

GREEDY = SamplingParams(temperature=0.0)
_UNCOUNTED = 2  # steps: prefill of the base and of the draft


@dataclass(frozen=True, slots=True)
class Run:
    """The counted steps of an output; times are sums in milliseconds."""

    token_ids: tuple[int, ...]  # of the whole output
    prompt_ids: tuple[int, ...]
    tokens: int
    steps: int
    wall_ms: float
    cpu_ms: float  # of this process, all threads
    base_ms: float  # host time of forward passes: launch, kernels, wait
    draft_ms: float
    kernels_ms: dict[str, float]  # GPU time: base, draft, compaction; may be empty

    @property
    def token_ms(self) -> float:
        return self.wall_ms / self.tokens

    @property
    def outside(self) -> float:
        """The share of time outside kernels; without a GPU, outside forward passes."""
        inside = sum(self.kernels_ms.values()) or self.base_ms + self.draft_ms
        return 1 - inside / self.wall_ms

    def as_json(self) -> dict[str, Any]:
        found = {key: value for key, value in asdict(self).items() if not key.endswith("_ids")}
        per_step = {"cpu_ms_per_step": self.cpu_ms / self.steps}
        return {
            **found,
            **per_step,
            "tokens_per_s": 1e3 / self.token_ms,
            "tokens_per_step": self.tokens / self.steps,
            "outside_kernels": self.outside,
        }


@dataclass(frozen=True, slots=True)
class OracleCheck:
    """The speed-up of an acceptance length."""

    wanted: float
    acceptance_length: float
    draft: float  # time of the draft's forward passes in a round, in plain steps
    verification: float  # time of the base's forward pass over the tree, in plain ones
    speed_up: float
    expected: float
    is_plain: bool  # the output is the plain one

    @property
    def deviation(self) -> float:
        return self.speed_up / self.expected - 1


def run(
    llm: LLM, clocks: Clocks, tokens: int, *, speculative: bool, prompt: str, repeats: int = 3
) -> Run:
    """Return the fastest of several runs, after one that records the graphs."""
    runs = [_run(llm, clocks, tokens, prompt, speculative) for _ in range(1 + repeats)]
    return min(runs[1:], key=lambda found: found.token_ms)


def _run(llm: LLM, clocks: Clocks, tokens: int, prompt: str, speculative: bool) -> Run:
    answer = llm.generate(
        prompt, sampling=GREEDY, max_generate_length=tokens, speculative=speculative
    )
    steps = iter(answer)
    before = sum(len(step.token_ids) for step in itertools.islice(steps, _UNCOUNTED))
    clocks.reset()
    wall, cpu, count = time.perf_counter(), time.process_time(), sum(1 for _ in steps)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if not count:
        raise EdgeLLMError(
            f"the answer has {len(answer.token_ids)} tokens", hint="give another --prompt"
        )
    return Run(
        tuple(answer.token_ids), tuple(answer.prompt.token_ids), len(answer.token_ids) - before,
        count, wall * 1e3, cpu * 1e3, clocks.passes_ms(0), clocks.passes_ms(1),
        clocks.kernels_ms(),
    )  # fmt: skip


def check_oracle(
    llm: LLM, clocks: Clocks, plain: Run, lengths: Sequence[float], *, prompt: str, repeats: int = 3
) -> list[OracleCheck]:
    """Measure `llm` with an oracle as its draft, for as many tokens as `plain`.

    Args:
        llm: opened with its draft and `tree="fixed"`.
        clocks: of its engines.
        plain: its plain output for `prompt`.
        lengths: acceptance lengths, at most the options' steps + 1.
        prompt: the request.
        repeats: see `run`.
    """
    checks = []
    for length in lengths:
        with predicting(llm, (*plain.prompt_ids, *plain.token_ids), length):
            found = run(
                llm, clocks, len(plain.token_ids), speculative=True, prompt=prompt, repeats=repeats
            )
        accepted = found.tokens / found.steps
        draft = found.draft_ms / found.steps / plain.token_ms
        verification = found.base_ms / found.steps / (plain.base_ms / plain.steps)
        checks.append(
            OracleCheck(
                length, accepted, draft, verification, plain.token_ms / found.token_ms,
                accepted / (1 + draft), found.token_ids == plain.token_ids,
            )
        )  # fmt: skip
    return checks

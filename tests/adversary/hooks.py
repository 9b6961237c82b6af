"""An exception in a random hook of one sequence, while others share its batch.

Verdict: the tokens of the others are those that they have alone, and the sequence ends at once.
"""

from __future__ import annotations

import functools
import random
import threading
from pathlib import Path
from typing import Any

from adversary.attack import require
from adversary.workshop import Workshop

from edgellm.core.errors import (
    EdgeLLMError,
    RequestError,
)
from edgellm.device_runtime.api.llm import LLM, RequestOutput
from edgellm.device_runtime.sampling.sampler import SamplingParams
from edgellm.device_runtime.speculate.options import SpecOptions

SHARE = 16
PATIENCE_S = 60.0
TOKENS = 24
HOOKS = {
    "sampler": ("choose", "take", "record", "adjusted"),
    "endings": ("take", "rest"),
    "drafter": (
        "begin",
        "remember",
        "observe",
        "catch_up",
        "propose",
        "learn",
        "confidences",
        "observe_plain",
        "drop",
    ),
    "accept": ("__call__",),
    "entry": ("before_pass",),
}
PLAIN = ("endings", "entry", "sampler")  # without a draft
CLASSES: tuple[type[BaseException], ...] = (
    EdgeLLMError,
    RequestError,
    ValueError,
    KeyError,
    ZeroDivisionError,
    IndexError,
    RuntimeError,
    MemoryError,
    OSError,
    RecursionError,
    AssertionError,
    StopIteration,
    Exception,
)


class Raiser:
    """A proxy of a part of a sequence; one of its methods fails at some call."""

    def __init__(self, real: Any, hook: str, call: int, error: BaseException) -> None:
        self._real, self._hook, self._left, self._error = real, hook, call, error

    def __getattr__(self, name: str) -> Any:
        return (
            self._fail_or(getattr(self._real, name))
            if name == self._hook
            else getattr(self._real, name)
        )

    def __call__(self, *given: Any) -> Any:
        return self._fail_or(self._real)(*given)

    def _fail_or(self, real: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                raise self._error
            return real(*given, **named)

        return call


@functools.cache
def _engines(workshop: Workshop, drafts: bool) -> LLM:
    spec = SpecOptions(tree="fixed", top_k=3, steps=3, verify_size=8) if drafts else None
    llm = LLM(workshop.batch_engine, spec=spec)
    workshop.on_close(llm.close)
    return llm


def attack(workshop: Workshop, number: int, rng: random.Random, folder: Path) -> str:
    del folder
    drafts = rng.random() < 0.6
    llm = _engines(workshop, drafts)
    part = rng.choice(sorted(HOOKS) if drafts else PLAIN)
    hook, call = rng.choice(HOOKS[part]), rng.choice([1, 1, 2, 3, 7])
    error = rng.choice(CLASSES)(f"case {number}")
    prompts = [
        f"w{rng.randrange(9, 90)} w{rng.randrange(9, 90)}" for _ in range(rng.randrange(2, 6))
    ]
    how = [_sampling(rng) for _ in prompts]
    alone = [_tokens(_begun(llm, prompt, one)) for prompt, one in zip(prompts, how, strict=True)]
    answers = [_begun(llm, prompt, one) for prompt, one in zip(prompts, how, strict=True)]
    victim = rng.randrange(len(answers))
    _arm(answers[victim], part, hook, call, error)
    found = _together(answers)
    said = f"{part}.{hook}, call {call}, {error!r}, sequence {victim} of {len(answers)}"
    for at, (tokens, expected) in enumerate(zip(found, alone, strict=True)):
        if at != victim:
            require(tokens == expected, f"{said}: sequence {at} gives {tokens}, not {expected}")
    again = _tokens(_begun(llm, prompts[victim], how[victim]))
    require(again == alone[victim], f"{said}: afterwards {again}, not {alone[victim]}")
    return f"{part}.{hook}"


def _sampling(rng: random.Random) -> SamplingParams:
    if rng.random() < 0.5:
        return SamplingParams(temperature=0)
    more: dict[str, Any] = rng.choice(
        [{}, {"num_logprobs": 2}, {"repetition_penalty": 1.2}, {"min_tokens": 4}]
    )
    return SamplingParams(temperature=0.8, seed=rng.randrange(1000), **more)


def _begun(llm: LLM, prompt: str, sampling: SamplingParams) -> RequestOutput:
    return llm.generate(prompt, sampling=sampling, max_generate_length=TOKENS, stop=["w9 w9"])


def _tokens(answer: RequestOutput) -> list[int] | str:
    """Tokens of a whole output, or the error."""
    try:
        for _ in answer:
            pass
    except Exception as error:  # noqa: BLE001 - what reaches a reader is compared
        return f"{type(error).__name__}: {error}"
    return list(answer.token_ids)


def _arm(answer: RequestOutput, part: str, hook: str, call: int, error: BaseException) -> None:
    if part == "entry":
        answer.before_pass = Raiser(lambda: None, "", call, error)
        return
    sequence = answer._sequence
    setattr(sequence, part, Raiser(getattr(sequence, part), hook, call, error))


def _together(answers: list[RequestOutput]) -> list[list[int] | str | None]:
    """Run each sequence in its own thread, as a server does."""
    found: list[list[int] | str | None] = [None] * len(answers)

    def read(at: int) -> None:
        found[at] = _tokens(answers[at])

    threads = [threading.Thread(target=read, args=(at,), daemon=True) for at in range(len(answers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    require(not any(thread.is_alive() for thread in threads), "an answer hangs")
    return found

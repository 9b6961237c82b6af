"""All state of one request, and how its answer grows."""

from __future__ import annotations

from collections.abc import Sequence as Sized
from dataclasses import dataclass, field
from typing import Any, Literal

from numpy.typing import NDArray

from edgellm.device_runtime.engine.prefix_cache import row_keys
from edgellm.device_runtime.engine.profile import Profile, RoundCounts
from edgellm.device_runtime.engine.prompt import Prompt
from edgellm.device_runtime.sampling.logprobs import TokenLogprobs
from edgellm.device_runtime.sampling.sampler import Sampler
from edgellm.device_runtime.session import RowKey
from edgellm.device_runtime.speculate.accept import Accept, Round, accept_exactly
from edgellm.device_runtime.speculate.drafter import Drafter
from edgellm.device_runtime.tokenizer import StopMatcher, TextStream

FinishReason = Literal["stop", "length"]  # "stop": end token or stop string


@dataclass(frozen=True, slots=True)
class Step:
    """What one pass added to the answer."""

    token_ids: tuple[int, ...]
    text: str  # whole characters only; may be empty
    round: Round | None = None  # the tree that gave them, when they were drafted
    pieces: tuple[str, ...] = ()  # the text that each token completed
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the tokens, if the sampling asks for them


@dataclass(frozen=True, slots=True)
class Ending:
    """What turns tokens into text, and what ends it."""

    stream: TextStream
    stops: StopMatcher
    end_ids: frozenset[int]

    def take(self, token_ids: Sized[int]) -> tuple[list[int], list[str], bool, bool]:
        """The tokens up to an end, their texts, and whether an end token or a stop string came."""
        taken: list[int] = []
        pieces: list[str] = []
        for token_id in token_ids:
            taken.append(token_id)
            if token_id in self.end_ids:
                return taken, [*pieces, ""], True, False
            text, stopped = self.stops.push(self.stream.push(token_id))
            pieces.append(text)
            if stopped:
                return taken, pieces, False, True
        return taken, pieces, False, False

    def rest(self) -> str:
        """The text that was held back."""
        shown, stopped = self.stops.push(self.stream.finish())
        return shown if stopped else shown + self.stops.finish()


@dataclass(slots=True, eq=False)
class Sequence:
    """See the module; `step` advances it."""

    prompt: Prompt
    sampler: Sampler  # with its grammar
    max_tokens: int  # of the answer; they and the prompt fit into the cache
    profile: Profile = field(default_factory=Profile)
    drafter: Drafter | None = None  # its own; None: a pass gives a token
    accept: Accept = accept_exactly
    ending: Ending | None = None  # None: its tokens alone are wanted, whichever they are
    warnings: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # of the answer
    finish_reason: FinishReason | None = None  # None until it is known
    num_rows: int = 0  # of the base's cache that are its own
    reused: int = 0  # of these, rows that were there before
    is_over: bool = False  # finished, failed or dropped: its rows are nobody's
    rows: NDArray[Any] | None = None  # a copy, while others have the cache

    @property
    def is_reading(self) -> bool:
        """Whether rows of the prompt are left."""
        return self.num_rows < len(self.prompt.token_ids)

    @property
    def newest(self) -> int:
        """The token whose row is computed next."""
        return self.token_ids[-1]

    @property
    def left(self) -> int:
        """Tokens that may follow."""
        return self.max_tokens - len(self.token_ids)

    @property
    def keys(self) -> list[RowKey]:
        """What its tokens stand for."""
        images = self.prompt.images.keys if self.prompt.images is not None else {}
        return row_keys([*self.prompt.token_ids, *self.token_ids], images)

    def take(self, found: Round | None) -> tuple[Step, ...]:
        """Add what a pass gave, up to an end; the steps of the answer."""
        if found is None:
            return ()
        taken, pieces, ended, stopped = list(found.token_ids), [], False, False
        if self.ending is not None:
            taken, pieces, ended, stopped = self.ending.take(taken)
        begin = len(self.token_ids)
        self.token_ids += taken
        if found.tree is not None:
            self.profile.rounds.append(_counts(found, len(taken)))
        if ended or stopped:
            self.finish_reason = "stop"
        elif not self.left:
            self.finish_reason = "length"
        steps = []
        if self.drafter is not None or not ended:  # a plain pass that gives the end adds nothing
            logprobs = tuple(self.sampler.logprobs[begin : begin + len(taken)])
            drafted = found if self.drafter is not None else None
            steps.append(Step(tuple(taken), "".join(pieces), drafted, tuple(pieces), logprobs))
        if self.finish_reason is not None:
            steps += self._end(with_rest=not stopped)
        return tuple(steps)

    def _end(self, *, with_rest: bool) -> list[Step]:
        profile = self.profile
        counts = profile.generated_tokens if self.drafter is None else profile.speculated_tokens
        counts.append(len(self.token_ids))
        rest = self.ending.rest() if self.ending is not None and with_rest else ""
        self.close()
        return [Step((), rest)] if rest else []

    def close(self) -> None:
        """Nobody asks on, or it failed, or it is complete; from any thread."""
        if not self.is_over:
            self.is_over = True
            if self.drafter is not None:
                self.drafter.end()


def _counts(found: Round, emitted: int) -> RoundCounts:
    assert found.tree is not None
    depths, _ = found.tree.layout()
    return RoundCounts(emitted, len(found.tree), int(depths.max()), len(found.path) - 1)

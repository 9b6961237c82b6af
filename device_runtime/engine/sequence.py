"""The state of one request, from its prompt to its last token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.arrays import RowKey
from edgellm.device_runtime.engine.profile import Profile, RoundCounts
from edgellm.device_runtime.engine.prompt import Prompt
from edgellm.device_runtime.engine.stop_detector import StopDetector, StopResult
from edgellm.device_runtime.networks.sequence_kv import SequenceKV
from edgellm.device_runtime.request_faults import Confined
from edgellm.device_runtime.sampling.logprobs import TokenLogprobs
from edgellm.device_runtime.sampling.sampler import Sampler
from edgellm.device_runtime.speculate.acceptance import Accept, Round, accept_exactly
from edgellm.device_runtime.speculate.drafter import Drafter

FinishReason = Literal["stop", "length"]  # "stop": end token or stop string
ANY_ROWS = 1 << 30
_PLAIN, _ENDED = (
    RoundCounts(emitted=1, tree_size=1, tree_depth=0, accepted=0),
    RoundCounts(emitted=0, tree_size=1, tree_depth=0, accepted=0),
)  # rounds of the root alone


class Step(NamedTuple):
    """The tokens and text that one pass added to the output."""

    token_ids: tuple[int, ...]
    text: str  # whole characters only; may be empty
    round: Round | None = None  # the round that gave them, when they were drafted
    pieces: tuple[str, ...] = ()  # the text that each token completed
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the tokens, if sampling requests them
    begins: bool = False  # the tokens are the first of a text


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One request; `step` advances it."""

    prompt: Prompt
    sampler: Sampler  # with its grammar
    max_tokens: int  # of the output; the cache has space for them and the prompt
    profile: Profile = field(default_factory=Profile)
    drafter: Drafter | None = None  # its own; None: plain decoding
    accept: Accept = accept_exactly
    endings: StopDetector | None = None  # None: no text and no stops, only tokens
    warnings: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # of the output
    finish_reason: FinishReason | None = None  # None until it ends
    stop_string: str | None = None  # that ended it
    num_rows: int = 0  # its positions in the base's KV cache
    reused: int = 0  # of these, positions taken from the prefix cache
    marks: tuple[int, ...] = ()  # lengths of prefixes that later prompts may share
    is_over: bool = False  # finished, failed or dropped: its KV blocks may be freed
    kv: SequenceKV | None = None  # its KV cache in the base
    max_rows: int = ANY_ROWS  # maximum tokens of its next pass: a chunk or a tree
    failure: EdgeLLMError | None = None  # that ended it

    @property
    def is_prefilling(self) -> bool:
        """Whether it is in prefill."""
        return self.num_rows < len(self.prompt.token_ids)

    @property
    def newest(self) -> int:
        """The token that is computed next."""
        return self.token_ids[-1]

    @property
    def left(self) -> int:
        """Tokens that may still be generated."""
        return self.max_tokens - len(self.token_ids)

    @property
    def keys(self) -> list[RowKey]:
        """Prefix cache keys of all its tokens."""
        return self.prompt.keys_of([*self.prompt.token_ids, *self.token_ids])

    def take(self, found: Round | None) -> tuple[Step, ...]:
        """Add the result of a pass, up to a stop; return the steps of the output."""
        if found is None:
            return ()
        begins = self.endings is not None and self.endings.stream.is_empty
        if self.endings is None:
            taken = StopResult(list(found.token_ids), [])
        else:
            taken = self.endings.take(found.token_ids)
        begin, count = len(self.token_ids), len(taken.token_ids)
        self.token_ids += taken.token_ids
        if found.tree is not None:
            self.profile.rounds.append(_counts(found, count))
        if taken.ended or taken.stop is not None:
            self.finish_reason, self.stop_string = "stop", taken.stop
        elif not self.left:
            self.finish_reason = "length"
        steps = []
        if self.drafter is not None or not taken.ended:  # a plain pass that ends adds nothing
            logprobs = tuple(self.sampler.logprobs[begin : begin + count])
            drafted = found if self.drafter is not None else None
            pieces = tuple(taken.pieces)
            ids, text = tuple(taken.token_ids), "".join(pieces)
            steps.append(Step(ids, text, drafted, pieces, logprobs, begins))
        if self.finish_reason is not None:
            steps += self._end(with_rest=taken.stop is None)
        return tuple(steps)

    def cut(self) -> tuple[Step, ...]:
        """End the output here with finish reason `length`: its time limit is reached."""
        self.finish_reason = "length"
        steps: list[Step] = []
        with Confined(self.fail):
            steps = self._end(with_rest=True)
        self.close()
        return tuple(steps)

    def _end(self, *, with_rest: bool) -> list[Step]:
        profile = self.profile
        counts = profile.generated_tokens if self.drafter is None else profile.speculated_tokens
        counts.append(len(self.token_ids))
        rest = self.endings.rest() if self.endings is not None and with_rest else ""
        self.close()
        return [Step((), rest)] if rest else []

    def fail(self, reason: EdgeLLMError) -> None:
        """End it with an error; other sequences continue."""
        self.failure = self.failure or reason
        self.close()

    def warn(self, reason: EdgeLLMError) -> None:
        """Record an error that does not affect the output."""
        self.warnings.append(str(reason))

    def close(self) -> None:
        """Mark it as over, since it is complete, failed or abandoned; from any thread."""
        if not self.is_over:
            self.is_over = True
            if self.drafter is not None:
                with Confined(self.warn):
                    self.drafter.end()


def _counts(found: Round, emitted: int) -> RoundCounts:
    assert found.tree is not None
    size = len(found.tree)
    if size == 1:
        return _PLAIN if emitted else _ENDED
    return RoundCounts(
        emitted=emitted,
        tree_size=size,
        tree_depth=max(found.tree.depths()),
        accepted=min(len(found.path) - 1, emitted),  # those after the end are not part of it
    )

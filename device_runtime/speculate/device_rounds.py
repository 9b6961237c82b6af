"""Rounds of trees that a base and its draft run on their device, with one wait for all answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgellm.core.model_spec import DraftSpec
from edgellm.device_runtime.networks.decoder import DecoderNetwork, PassResult
from edgellm.device_runtime.networks.draft import DraftNetwork, DraftPart
from edgellm.device_runtime.networks.sequence_kv import Begun, Context
from edgellm.device_runtime.runners.device_speculation import (
    Draws,
    Growth,
    RoundOrder,
    RoundOutcome,
    Rounds,
)
from edgellm.device_runtime.sampling.sampler import Sampler

_COMMITTED = (1, 2, 4, 8, 16, 24)  # rows; passes with others are padded to them
_EACH = 8  # rows of an answer, among several


@dataclass(frozen=True, slots=True)
class Size:
    """Of a tree."""

    levels: int
    nodes: int  # root included


@dataclass(frozen=True, slots=True)
class RoundPart:
    """What an answer asks of a round."""

    contexts: tuple[Context, Context]  # base's and draft's
    root: int  # the newest token
    root_row: int  # of the draft's latest pass, see `RequestedResult`
    lengths: tuple[int, int]  # rows of the base's cache and of the draft's
    size: Size  # which `growth` allows
    sampler: Sampler  # spends nothing before the round is over
    rates: NDArray[np.float64] | None  # see `RoundOrder`
    is_exact: bool  # acceptance is; else it is the host's work

    @property
    def accepts(self) -> Literal["greedy", "sampled", "host"]:
        """See `RoundOrder`."""
        if self.is_exact and self.sampler.needs_picks_only:
            return "greedy" if self.sampler.params.is_greedy else "sampled"
        return "host"


class DeviceRounds:
    """A base and a draft on one device.

    Attributes:
        base: the session of the base; rounds are its passes.
        growth: what trees may become.
    """

    def __init__(
        self, base: DecoderNetwork, draft: DraftNetwork, growth: Growth, rounds: Rounds
    ) -> None:
        self.base, self.growth = base, growth
        self._draft, self._rounds = draft, rounds
        self._asked: Sequence[RoundPart] = ()

    def prepare(self, spec: DraftSpec, max_rows: int) -> None:
        """Run the draft's passes over as many committed rows twice: they are recorded then."""
        draft, maximum = self._draft, self._draft.max_batch_size
        for answers in sorted(
            {min(1 << bits, maximum) for bits in range(maximum.bit_length() + 1)}
        ):
            own = [draft.context] if maximum == 1 else []
            contexts = own or [draft.new_context() for _ in range(answers)]
            for each in _COMMITTED if answers == 1 else range(1, 1 + _EACH):
                rows = min(each, max_rows)
                parts = [_committed(context, rows, spec, self.growth) for context in contexts]
                for _ in range(2):
                    draft.ask_many(parts)
            for context in contexts[len(own) :]:
                draft.close(context)

    def maximum(self, parts: Sequence[RoundPart]) -> int:
        """How many of these, the first ones, share a round."""
        count, nodes = 0, 1
        for part in parts:
            nodes = max(nodes, part.size.nodes)
            if count >= self._rounds.maximum(nodes):
                break
            count += 1
        return count

    def ask(self, parts: Sequence[RoundPart]) -> None:
        """Ask for a round of answers behind the draft's pass over their committed rows.

        Args:
            parts: as many as `maximum` says.

        Raises:
            LimitError: rows do not fit into a cache.
        """
        widths = self.growth.widths
        of_draft = [
            (part.contexts[1], part.lengths[1], sum(widths[: part.size.levels - 1]))
            for part in parts
        ]
        of_base = [(part.contexts[0], part.lengths[0], part.size.nodes) for part in parts]
        begun = zip(
            parts, self.base.begin_rounds(of_base), self._draft.begin_rounds(of_draft), strict=True
        )
        self._rounds.ask([self._order(part, *starts) for part, *starts in begun])
        self._asked = parts

    def _order(self, part: RoundPart, base: Begun, draft: Begun) -> RoundOrder:
        draws, params = None, part.sampler.params
        if part.accepts == "sampled":
            rules = params.temperature, params.top_k, params.top_p, params.min_p
            uniforms = part.sampler.predict(1 + self.growth.levels)
            draws = Draws(np.array(rules, np.float64), uniforms)
        return RoundOrder(
            part.root, base.start, draft.start, part.size.levels, part.size.nodes, part.rates,
            part.accepts, draws, (base.cache, draft.cache), part.root_row,
        )  # fmt: skip

    def finish(self) -> list[tuple[RoundOutcome, PassResult]]:
        """Wait for the round; what an acceptance on the device drew is spent.

        Returns:
            What each gets of it, which is to be read before the base's next pass.
        """
        results: list[tuple[RoundOutcome, PassResult]] = []
        for part, found in zip(self._asked, self._rounds.finish(), strict=True):
            result = self.base.end_round(part.contexts[0], found.token_ids, found.outputs)
            results.append((found, result))
        for part, (found, _) in zip(self._asked, results, strict=True):
            # After all that may fail: a round that is run again draws the same.
            if found.accepted is not None and part.accepts == "sampled":
                part.sampler.spend(len(found.accepted[0]))
        self._asked = ()
        return results


def _committed(context: Context, rows: int, spec: DraftSpec, growth: Growth) -> DraftPart:
    taps = np.zeros((rows, spec.taps_width), np.float32)
    ids, last = np.zeros(rows, np.int64), np.array([rows - 1])
    return DraftPart(context, ids, 0, last, growth.top_k, taps=taps)


def open_rounds(base: DecoderNetwork, draft: DraftNetwork, growth: Growth) -> DeviceRounds | None:
    """None: the backend, or the GPU, needs the host between passes."""
    rounds = draft.open_rounds(base, growth)
    return None if rounds is None else DeviceRounds(base, draft, growth, rounds)

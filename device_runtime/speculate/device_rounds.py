"""Rounds that base and draft run on their device, with one synchronization for a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgellm.core.model_spec import DraftSpec
from edgellm.device_runtime.networks.decoder import DecoderNetwork, PassResult, RoundStart
from edgellm.device_runtime.networks.draft import DraftNetwork, DraftPart
from edgellm.device_runtime.networks.sequence_kv import SequenceKV
from edgellm.device_runtime.runners.device_speculation import (
    Draws,
    Growth,
    RoundOrder,
    RoundOutcome,
    Rounds,
)
from edgellm.device_runtime.sampling.sampler import Sampler

_COMMITTED = (1, 2, 4, 8, 16, 24)  # tokens of recorded passes; other passes are padded to these
_EACH = 8  # maximum tokens of a sequence in a recorded batch


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a tree."""

    levels: int
    nodes: int  # root included


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPart:
    """One sequence's part of a round."""

    kvs: tuple[SequenceKV, SequenceKV]  # base's and draft's
    root: int  # the newest token
    root_row: int  # row in the draft's latest pass, see `RequestedResult`
    lengths: tuple[int, int]  # positions in the base's cache and in the draft's
    size: Size  # one that `growth` allows
    sampler: Sampler  # uses no random numbers before the round has finished
    rates: NDArray[np.float64] | None  # see `RoundOrder`
    is_exact: bool  # exact acceptance; otherwise the host accepts

    @property
    def accepts(self) -> Literal["greedy", "sampled", "host"]:
        """See `RoundOrder`."""
        if self.is_exact and self.sampler.needs_picks_only:
            return "greedy" if self.sampler.params.is_greedy else "sampled"
        return "host"


class DeviceRounds:
    """A base and a draft on one device.

    Attributes:
        base: the network of the base; rounds are its passes.
        growth: limits of the trees.
    """

    def __init__(
        self, *, base: DecoderNetwork, draft: DraftNetwork, growth: Growth, rounds: Rounds
    ) -> None:
        self.base, self.growth = base, growth
        self._draft, self._rounds = draft, rounds
        self._asked: Sequence[RoundPart] = ()

    def prepare(self, spec: DraftSpec, max_rows: int) -> None:
        """Run each size of the draft's passes over committed tokens twice, so it is recorded."""
        draft, maximum = self._draft, self._draft.max_batch_size
        for answers in sorted(
            {min(1 << bits, maximum) for bits in range(maximum.bit_length() + 1)}
        ):
            kvs = [draft.new_kv() for _ in range(answers)]
            for each in _COMMITTED if answers == 1 else range(1, 1 + _EACH):
                rows = min(each, max_rows)
                parts = [_committed(kv, rows, spec, self.growth) for kv in kvs]
                for _ in range(2):
                    draft.run_async(parts)
            for kv in kvs:
                kv.free()

    def maximum(self, parts: Sequence[RoundPart]) -> int:
        """How many of the first `parts` fit into one round."""
        count, nodes = 0, 1
        for part in parts:
            nodes = max(nodes, part.size.nodes)
            if count >= self._rounds.maximum(nodes):
                break
            count += 1
        return count

    def ask(self, parts: Sequence[RoundPart]) -> None:
        """Enqueue a round after the draft's pass over the committed tokens.

        Args:
            parts: at most `maximum` of them.

        Raises:
            LimitError: the positions exceed a cache.
        """
        widths = self.growth.widths
        of_draft = [
            (part.kvs[1], part.lengths[1], sum(widths[: part.size.levels - 1])) for part in parts
        ]
        of_base = [(part.kvs[0], part.lengths[0], part.size.nodes) for part in parts]
        begun = zip(
            parts, self.base.begin_rounds(of_base), self._draft.begin_rounds(of_draft), strict=True
        )
        self._rounds.ask([self._order(part, *starts) for part, *starts in begun])
        self._asked = parts

    def _order(self, part: RoundPart, base: RoundStart, draft: RoundStart) -> RoundOrder:
        draws, params = None, part.sampler.params
        if part.accepts == "sampled":
            rules = params.temperature, params.top_k, params.top_p, params.min_p
            uniforms = part.sampler.predict(1 + self.growth.levels)
            draws = Draws(np.array(rules, np.float64), uniforms)
        return RoundOrder(
            root=part.root,
            base_start=base.start,
            draft_start=draft.start,
            levels=part.size.levels,
            nodes=part.size.nodes,
            rates=part.rates,
            accepts=part.accepts,
            draws=draws,
            caches=(base.cache, draft.cache),
            root_row=part.root_row,
        )

    def finish(self) -> list[tuple[RoundOutcome, PassResult]]:
        """Wait for the round; samplers advance past random numbers that the device used.

        Returns:
            The result of each part, to be read before the base's next pass.
        """
        results: list[tuple[RoundOutcome, PassResult]] = []
        for part, found in zip(self._asked, self._rounds.finish(), strict=True):
            result = self.base.end_round(part.kvs[0], found.token_ids, found.outputs)
            results.append((found, result))
        for part, (found, _) in zip(self._asked, results, strict=True):
            # Last, after all that may fail: a repeated round must draw the same numbers.
            if found.accepted is not None and part.accepts == "sampled":
                part.sampler.spend(len(found.accepted[0]))
        self._asked = ()
        return results


def _committed(kv: SequenceKV, rows: int, spec: DraftSpec, growth: Growth) -> DraftPart:
    taps = np.zeros((rows, spec.taps_width), np.float32)
    ids, last = np.zeros(rows, np.int64), np.array([rows - 1])
    return DraftPart(
        kv=kv, token_ids=ids, write_index=0, output_rows=last, top_k=growth.top_k, taps=taps
    )


def open_rounds(base: DecoderNetwork, draft: DraftNetwork, growth: Growth) -> DeviceRounds | None:
    """Open rounds on the device; None: the backend or the GPU needs the host between passes."""
    rounds = draft.open_rounds(base, growth)
    return (
        None
        if rounds is None
        else DeviceRounds(base=base, draft=draft, growth=growth, rounds=rounds)
    )

"""Rounds of a tree that a base and its draft run on their device, with one wait."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.device_runtime.runners.rounds import Draws, Growth, RoundOrder, RoundOutcome, Rounds
from edgellm.device_runtime.sampling.sampler import Sampler
from edgellm.device_runtime.sessions.decoder import DecoderSession, PassResult
from edgellm.device_runtime.sessions.draft import DraftPart, DraftSession
from edgellm.specs import DraftSpec

_COMMITTED = (1, 2, 4, 8, 16, 24)  # rows; passes with others are padded to them


@dataclass(frozen=True, slots=True)
class Size:
    """Of a tree."""

    levels: int
    nodes: int  # root included


class RoundSession:
    """A base and a draft on one device.

    Attributes:
        base: the session of the base; rounds are its passes.
        growth: what trees may become.
    """

    def __init__(
        self, base: DecoderSession, draft: DraftSession, growth: Growth, rounds: Rounds
    ) -> None:
        self.base, self.growth = base, growth
        self._draft, self._rounds = draft, rounds
        self._sampler: Sampler | None = None  # whose random numbers the round draws with

    def prepare(self, spec: DraftSpec, most_rows: int) -> None:
        """Run the draft's passes over as many committed rows twice: they are recorded then."""
        for rows in _COMMITTED:
            count = min(rows, most_rows)
            taps = np.zeros((count, spec.taps_width), np.float32)
            for _ in range(2):
                part = DraftPart(
                    self._draft.context, np.zeros(count, np.int64), 0, np.array([count - 1]),
                    self.growth.top_k, taps=taps,
                )  # fmt: skip
                self._draft.ask(part)

    def ask(
        self,
        root: int,
        lengths: tuple[int, int],
        size: Size,
        sampler: Sampler,
        *,
        rates: NDArray[np.float64] | None = None,
        is_exact: bool,
    ) -> None:
        """Ask for a round behind the draft's pass over the committed rows.

        Args:
            root: the newest token.
            lengths: rows of the base's cache and of the draft's.
            size: of the tree, which `growth` allows.
            sampler: of the request; it spends nothing yet.
            rates: see `RoundOrder`.
            is_exact: acceptance is; else it is the host's work.

        Raises:
            LimitError: the rows do not fit into a cache.
        """
        length, draft_length = lengths
        draft_start = self._draft.start(draft_length, sum(self.growth.widths[: size.levels - 1]))
        base_start = self.base.begin_round(length, size.nodes)
        accepts, draws, params = "host", None, sampler.params
        if is_exact and sampler.needs_picks_only:
            accepts = "greedy" if params.is_greedy else "sampled"
        if accepts == "sampled":
            rules = params.temperature, params.top_k, params.top_p, params.min_p
            draws = Draws(np.array(rules, np.float64), sampler.foresee(1 + self.growth.levels))
        order = RoundOrder(
            root, base_start, draft_start, size.levels, size.nodes, rates, accepts, draws
        )
        self._rounds.ask(order)
        self._sampler = sampler if accepts == "sampled" else None

    def finish(self) -> tuple[RoundOutcome, PassResult]:
        """Wait for the round; what an acceptance on the device drew is spent."""
        found = self._rounds.finish()
        if found.accepted is not None and self._sampler is not None:
            self._sampler.spend(len(found.accepted[0]))
        return found, self.base.end_round(found.token_ids, found.outputs)


def open_rounds(base: DecoderSession, draft: DraftSession, growth: Growth) -> RoundSession | None:
    """None: the backend, or the GPU, needs the host between passes."""
    rounds = draft.open_rounds(base, growth)
    return None if rounds is None else RoundSession(base, draft, growth, rounds)

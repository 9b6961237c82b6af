"""A text that is read and not answered: what its rows stand for, or how likely it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from edgellm.core.errors import RequestError
from edgellm.device_runtime.arrays import (
    F32,
    LoadedAdapter,
)
from edgellm.device_runtime.engine.kv_cache_manager import KVCacheManager, require_loaded
from edgellm.device_runtime.networks.decoder import PassResult
from edgellm.device_runtime.networks.sequence_kv import Context
from edgellm.device_runtime.sampling.logprobs import TokenLogprobs, token_logprobs
from edgellm.device_runtime.scheduler.step_lock import StepLock

_ROWS = 64  # of a pass whose rows all get logits


class Reader:
    """Reads texts between the passes of answers, a piece at a time."""

    def __init__(
        self,
        slot: KVCacheManager,
        turns: StepLock,
        before_pass: Callable[[], object],
        adapter: LoadedAdapter | None = None,
    ) -> None:
        """`before_pass` is asked before every pass; what it raises ends the reading."""
        self._slot, self._turns, self._before_pass = slot, turns, before_pass
        self._adapter = adapter

    def logprobs(self, token_ids: Sequence[int], count: int) -> list[TokenLogprobs]:
        """How likely each token but the first was behind those before it.

        Args:
            token_ids: of a text that fits.
            count: of the likeliest tokens in its place, whose log-probabilities are wanted, too.
        """
        found: list[TokenLogprobs] = []
        for begin, result in self._pieces(token_ids, _ROWS, all_logits=True):
            followers = token_ids[begin + 1 : begin + 1 + _ROWS]
            rows = result.logits
            found += [token_logprobs(rows[at], one, count) for at, one in enumerate(followers)]
        return found

    def pooled(self, token_ids: Sequence[int], pooling: str) -> F32:
        """float32 [H] of length 1: what a text stands for.

        Args:
            token_ids: of a text that fits.
            pooling: "last" or "mean".

        Raises:
            RequestError: the text is too far from numbers: its vector has no length.
        """
        total, last = np.zeros(0), np.zeros(0)
        for begin, result in self._pieces(token_ids, self._slot.prefill_rows, all_logits=False):
            rows = result.taps[: len(token_ids) - begin].astype(np.float64)
            total, last = rows.sum(axis=0) + (total if begin else 0), rows[-1]
        vector = last if pooling == "last" else total
        length = float(np.linalg.norm(vector))
        if not np.isfinite(length) or not length:
            raise RequestError("the model's rows of this text are no numbers")
        return (vector / length).astype(np.float32)

    def _pieces(
        self, token_ids: Sequence[int], rows: int, *, all_logits: bool
    ) -> Iterator[tuple[int, PassResult]]:
        """Passes over a text, each while nobody else computes; a result is read before the next."""
        session, own = self._slot.session, Context()
        own.adapter = self._adapter
        ids, rows = np.array(token_ids, np.int64), min(rows, self._slot.prefill_rows)
        try:
            for begin in range(0, len(ids), rows):
                piece = ids[begin : begin + rows]
                wanted = np.arange(len(piece)) if all_logits else np.array([len(piece) - 1])
                self._before_pass()
                with self._turns.visiting():
                    require_loaded(own.adapter)
                    others = session.context
                    session.use(own)
                    try:
                        yield begin, session.run(piece, begin, wanted)
                    finally:
                        session.use(others)
        finally:
            with self._turns.visiting():
                session.close(own)

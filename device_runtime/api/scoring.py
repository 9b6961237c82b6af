"""Scoring and embedding of a text: log-probabilities or a pooled vector, without generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edgellm.device_runtime.arrays import LoadedAdapter
from edgellm.device_runtime.engine.kv_cache_manager import KVCacheManager, require_loaded
from edgellm.device_runtime.networks.decoder import PassResult
from edgellm.device_runtime.sampling.logprobs import TokenLogprobs, token_logprobs
from edgellm.device_runtime.scheduler.step_lock import StepLock

_ROWS = 64  # tokens of a pass with logits at every position


class Reader:
    """Computes texts in chunks, between the passes of running requests."""

    def __init__(
        self,
        *,
        kv_cache_manager: KVCacheManager,
        step_lock: StepLock,
        before_pass: Callable[[], object],
        adapter: LoadedAdapter | None = None,
        is_whole: bool = False,
    ) -> None:
        """`before_pass` is called before every pass; an exception ends the computation.

        `is_whole`: a text is one pass, since tokens of an encoder attend to later ones.
        """
        self._kv_cache_manager, self._step_lock, self._before_pass = (
            kv_cache_manager,
            step_lock,
            before_pass,
        )
        self._adapter, self._is_whole = adapter, is_whole

    def logprobs(self, token_ids: Sequence[int], count: int) -> list[TokenLogprobs]:
        """Log-probability of each token but the first, given the tokens before it.

        Args:
            token_ids: of a text that fits.
            count: number of likeliest tokens at each position to include.
        """
        found: list[TokenLogprobs] = []
        for begin, result in self._chunks(token_ids, _ROWS, all_logits=True):
            followers = token_ids[begin + 1 : begin + 1 + _ROWS]
            rows = result.logits
            found += [token_logprobs(rows[at], one, count) for at, one in enumerate(followers)]
        return found

    def pooled(self, token_ids: Sequence[int], pooling: str, first: int = 0) -> NDArray[np.float64]:
        """Pooled hidden states [H] of a text.

        Args:
            token_ids: of a text that fits.
            pooling: one of `POOLINGS`.
            first: number of first tokens that are not pooled.
        """
        total, found = np.zeros(1), np.zeros(1)
        for begin, result in self._chunks(
            token_ids, self._kv_cache_manager.prefill_rows, all_logits=False
        ):
            rows = result.taps[: len(token_ids) - begin].astype(np.float64)
            pooled = rows[max(first - begin, 0) :]
            total = total + pooled.sum(axis=0)
            if pooling == "last":
                found = rows[-1]
            elif pooling == "cls" and begin <= first < begin + len(rows):
                found = pooled[0]
        return total / (len(token_ids) - first) if pooling == "mean" else found

    def _chunks(
        self, token_ids: Sequence[int], rows: int, *, all_logits: bool
    ) -> Iterator[tuple[int, PassResult]]:
        """Passes over a text, with the engine held; a result must be used before the next pass."""
        base = self._kv_cache_manager.base
        own = base.new_kv()
        own.adapter = self._adapter
        ids, rows = np.array(token_ids, np.int64), min(rows, self._kv_cache_manager.prefill_rows)
        if self._is_whole:
            rows = len(ids)
        try:
            for begin in range(0, len(ids), rows):
                chunk = ids[begin : begin + rows]
                wanted = np.arange(len(chunk)) if all_logits else np.array([len(chunk) - 1])
                self._before_pass()
                with self._step_lock.visiting():
                    require_loaded(own.adapter)
                    yield begin, base.run(chunk, begin, wanted, kv=own)
        finally:
            with self._step_lock.visiting():
                own.free()

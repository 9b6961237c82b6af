"""Scoring and embedding of texts: log-probabilities or pooled vectors, without generation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.core.manifest import Engine
from edgellm.device_runtime.arrays import LoadedAdapter
from edgellm.device_runtime.engine.kv_cache_manager import KVCacheManager, require_loaded
from edgellm.device_runtime.networks.decoder import PassResult, SequencePart
from edgellm.device_runtime.sampling.logprobs import TokenLogprobs, token_logprobs
from edgellm.device_runtime.scheduler.step_lock import StepLock

_ROWS = 64  # tokens of a pass with logits at every position
_PACKED_TOKENS = 256  # of a pass of several texts; more are not computed faster


@dataclass(slots=True, eq=False, kw_only=True)
class Text:
    """A text to pool, and its result."""

    token_ids: Sequence[int]  # of a text that fits
    first: int = 0  # number of first tokens that are not pooled
    adapter: LoadedAdapter | None = None
    before_pass: Callable[[], object]  # called before every pass; an exception ends the text
    pooled: NDArray[np.float64] | None = None  # hidden states [H]
    failure: Exception | None = None

    @property
    def is_done(self) -> bool:
        """Whether it has a result."""
        return self.pooled is not None or self.failure is not None


class _Pooled:
    """Pools the hidden states of a text's chunks."""

    def __init__(self, text: Text, pooling: str) -> None:
        self._pooling, self._first = pooling, text.first
        self._count = len(text.token_ids)
        self._total, self._found = np.zeros(1), np.zeros(1)

    def add(self, begin: int, taps: NDArray[np.float32]) -> None:
        """Hidden states [S, H] of tokens from `begin` on."""
        rows = taps[: self._count - begin].astype(np.float64)
        pooled = rows[max(self._first - begin, 0) :]
        self._total = self._total + pooled.sum(axis=0)
        if self._pooling == "last":
            self._found = rows[-1]
        elif self._pooling == "cls" and begin <= self._first < begin + len(rows):
            self._found = pooled[0]

    @property
    def vector(self) -> NDArray[np.float64]:
        """[H], of all chunks."""
        if self._pooling == "mean":
            return self._total / (self._count - self._first)
        return self._found


class TextPooler:
    """Pools texts; short ones of all threads share passes, without padding.

    A thread that gets the engine computes its next text, and with it those that wait. Results
    have the bits of a text alone.
    """

    def __init__(self, step_lock: StepLock, engine: Engine) -> None:
        self._step_lock, self._pooling = step_lock, engine.pooling
        self._is_whole = not engine.decoder.is_causal  # see `Reader`
        self._waiting: list[Text] = []
        self._lock = threading.Lock()

    def pool(
        self, texts: Sequence[Text], kv_cache_manager: KVCacheManager
    ) -> list[NDArray[np.float64]]:
        """Pooled hidden states [H] of each text; raises the first failure of a text."""
        max_tokens = kv_cache_manager.prefill_rows
        own = [text for text in texts if self._is_whole or len(text.token_ids) <= max_tokens]
        with self._lock:
            self._waiting += own
        try:
            for text in texts:
                if text in own:
                    self._finish(text, kv_cache_manager)
                else:
                    self._read(text, kv_cache_manager)
        finally:
            with self._lock:
                self._waiting = [text for text in self._waiting if text not in own]
        return [text.pooled for text in texts if text.pooled is not None]

    def _read(self, text: Text, kv_cache_manager: KVCacheManager) -> None:
        """Compute a text of several chunks."""
        reader = Reader(
            kv_cache_manager=kv_cache_manager,
            step_lock=self._step_lock,
            before_pass=text.before_pass,
            adapter=text.adapter,
            is_whole=self._is_whole,
        )
        text.pooled = reader.pooled(text, self._pooling)

    def _finish(self, text: Text, kv_cache_manager: KVCacheManager) -> None:
        """Compute a text, or wait until another thread has; raises its failure."""
        while not text.is_done:
            with self._step_lock.visiting():
                if not text.is_done:
                    self._compute(self._pack(text, kv_cache_manager), kv_cache_manager)
        if text.failure is not None:
            raise text.failure

    def _pack(self, text: Text, kv_cache_manager: KVCacheManager) -> list[Text]:
        """The text, and others for the same pass; texts that may not continue fail here."""
        with self._lock:
            others = [each for each in self._waiting if each is not text and not each.is_done]
        room = min(_PACKED_TOKENS, kv_cache_manager.prefill_rows)
        found = list[Text]()
        for each in (text, *others):
            if found and len(each.token_ids) > room:
                break
            try:
                each.before_pass()
                require_loaded(each.adapter)
            except Exception as error:  # noqa: BLE001 - it ends this text only
                each.failure = error
            else:
                room -= len(each.token_ids)
                found.append(each)
        lengths = [len(each.token_ids) for each in found]
        return found[: kv_cache_manager.base.num_packable(lengths)]

    def _compute(self, texts: Sequence[Text], kv_cache_manager: KVCacheManager) -> None:
        """Compute one pass."""
        base, parts = kv_cache_manager.base, list[SequencePart]()
        try:
            for text in texts:
                ids, kv = np.array(text.token_ids, np.int64), base.new_kv()
                kv.adapter = text.adapter
                parts.append(SequencePart(kv, ids, 0, np.array([len(ids) - 1])))
            for text, result in zip(texts, base.run_batch(parts) if parts else (), strict=True):
                pooled = _Pooled(text, self._pooling)
                pooled.add(0, result.taps)
                text.pooled = pooled.vector
        finally:
            for part in parts:
                part.kv.free()


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

    def pooled(self, text: Text, pooling: str) -> NDArray[np.float64]:
        """Pooled hidden states [H] of a text; `pooling` is one of `POOLINGS`."""
        found = _Pooled(text, pooling)
        rows = self._kv_cache_manager.prefill_rows
        for begin, result in self._chunks(text.token_ids, rows, all_logits=False):
            found.add(begin, result.taps)
        return found.vector

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

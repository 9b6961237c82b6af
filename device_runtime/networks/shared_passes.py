"""Passes of several threads as batches: each waits until all that decode have theirs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from edgellm.device_runtime.arrays import F32
from edgellm.device_runtime.networks.decoder import DecoderNetwork, SequencePart


class DecodedPart(NamedTuple):
    """Outputs of a part of a pass."""

    logits: F32  # [R, V]
    alignment_queries: F32  # [S, N*D]


class _Wanted:
    """A part that a thread waits for."""

    def __init__(self, part: SequencePart) -> None:
        self.part = part
        self.found: DecodedPart | None = None
        self.error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        return self.found is not None or self.error is not None


class SharedPasses:
    """Batches of the passes of one network."""

    def __init__(self, network: DecoderNetwork) -> None:
        """Args: `network` whose `max_batch_size` is at least the number of decoding threads."""
        self._network, self._changed = network, threading.Condition()
        self._num_decoding, self._is_running = 0, False
        self._waiting: list[_Wanted] = []

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """The calling thread computes passes until the end; the others' passes wait for its."""
        with self._changed:
            self._num_decoding += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_decoding -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No pass runs until the end: KV blocks may be freed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_running)
            yield

    def run(self, part: SequencePart) -> DecodedPart:
        """The outputs of a part, within `decoding`; raises as `DecoderNetwork.run_batch`."""
        wanted = _Wanted(part)
        with self._changed:
            self._waiting.append(wanted)
            self._changed.notify_all()
            self._changed.wait_for(lambda: wanted.is_over or self._is_complete)
            taken: list[_Wanted] = []
            if not wanted.is_over:
                taken, self._waiting, self._is_running = self._waiting, [], True
        if taken:
            try:
                self._compute(taken)
            finally:
                with self._changed:
                    self._is_running = False
                    self._changed.notify_all()
        if wanted.error is not None:
            raise wanted.error
        assert wanted.found is not None
        return wanted.found

    @property
    def _is_complete(self) -> bool:
        """Whether all decoding threads wait."""
        return not self._is_running and len(self._waiting) >= self._num_decoding

    def _compute(self, taken: list[_Wanted]) -> None:
        """Compute all parts; the arrays of one alone are valid until the next pass."""
        try:
            found = self._network.run_batch([each.part for each in taken])
        except BaseException as error:
            for each in taken:
                each.error = error
            raise
        for each, result in zip(taken, found, strict=True):
            outputs = result.logits, result.alignment_queries
            if len(taken) > 1:
                outputs = outputs[0].copy(), outputs[1].copy()
            each.found = DecodedPart(*outputs)

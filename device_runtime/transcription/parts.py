"""Parts of a recording that are transcribed one after the other, and times of their samples."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from edgellm.core.errors import RequestError
from edgellm.device_runtime.arrays import F32
from edgellm.device_runtime.transcription.speech_detector import Region, SpeechDetector
from edgellm.multimodal.audio import SAMPLE_RATE

# At least between parts of the same speech: words on which decodings of almost the same audio agree
# are often wrong
_STEP = 6 * SAMPLE_RATE // 10


@dataclass(frozen=True, slots=True)
class Part:
    """Regions of a recording, one after the other."""

    samples: F32
    regions: tuple[Region, ...]  # in the recording; their sizes add up to that of the samples
    is_complete: bool = True  # False: speech that goes on; a longer part follows

    def time_s(self, seconds: float, *, ends: bool) -> float:
        """The time in the recording of a time in the part.

        Args:
            seconds: from the part's begin; later than its end is its end.
            ends: whether a time between two regions is the end of the first.
        """
        left = seconds
        for region in self.regions:
            size = (region.end - region.begin) / SAMPLE_RATE
            if left < size or (ends and left == size) or region is self.regions[-1]:
                return region.begin / SAMPLE_RATE + min(left, size)
            left -= size
        raise AssertionError  # there are regions


class Audio(Protocol):
    """A recording."""

    @property
    def num_samples(self) -> int:
        """Number of samples; of a stream, of those that came so far."""
        ...

    def parts(self) -> Iterator[Part]:
        """Its parts in their order."""
        ...


class WholeRecording:
    """A recording of one part."""

    def __init__(self, samples: F32) -> None:
        self._samples, self.num_samples = samples, len(samples)

    def parts(self) -> Iterator[Part]:
        """See `Audio`."""
        yield Part(self._samples, (Region(0, self.num_samples),))


class SpeechParts:
    """The speech of a recording, in parts of a window at most that are cut at pauses."""

    def __init__(self, samples: F32, window_size: int) -> None:
        """Detect the speech.

        Raises:
            RequestError: there is none, or silero-vad is not installed.
        """
        detector = SpeechDetector(window_size)
        regions = detector.push(samples) + detector.finish()
        if not regions:
            raise RequestError(
                f"no speech was found in {len(samples) / SAMPLE_RATE:.1f} s of audio",
                hint="check the microphone; without voice activity detection all is transcribed",
            )
        self._samples, self._groups = samples, pack(regions, window_size)
        self.num_samples = len(samples)

    def parts(self) -> Iterator[Part]:
        """See `Audio`."""
        for group in self._groups:
            speech = [self._samples[region.begin : region.end] for region in group]
            yield Part(np.concatenate(speech), group)


class SpeechStream:
    """The speech of a recording that is not over: a part for each region."""

    def __init__(
        self, chunks: Iterable[F32], window_size: int, *, is_partial: bool = False
    ) -> None:
        """Load the detector.

        Args:
            chunks: of samples, in their order.
            window_size: maximum samples of a part.
            is_partial: whether speech that goes on has parts, too. The next one has at least as
                much more audio as the computation of the last one took.

        Raises:
            RequestError: silero-vad is not installed.
        """
        self._chunks, self._is_partial = chunks, is_partial
        self._detector = SpeechDetector(window_size, cuts_back=not is_partial)
        self.num_samples = 0

    def parts(self) -> Iterator[Part]:
        """See `Audio`; waits for chunks, and keeps those that later regions may have."""
        held, first = np.zeros(0, np.float32), 0  # samples from `first` on
        due = 0  # sample from which speech that goes on is a part
        for chunk in self._chunks:
            self.num_samples += len(chunk)
            held = np.concatenate([held, chunk])
            for region in self._detector.push(chunk):
                yield _cut(held, first, region)
                due = 0
            current = self._detector.current if self._is_partial else None
            if current is not None and current.end >= due:
                start = time.monotonic()
                yield replace(_cut(held, first, current), is_complete=False)
                taken = int((time.monotonic() - start) * SAMPLE_RATE)
                due = current.end + max(_STEP, taken)
            kept = self._detector.kept_from
            held, first = held[kept - first :], kept
        for region in self._detector.finish():
            yield _cut(held, first, region)


def _cut(held: F32, first: int, region: Region) -> Part:
    return Part(held[region.begin - first : region.end - first], (region,))


def pack(regions: Sequence[Region], size: int) -> list[tuple[Region, ...]]:
    """Groups of successive regions, each of `size` samples at most."""
    groups: list[tuple[Region, ...]] = []
    left = 0
    for region in regions:
        length = region.end - region.begin
        if length > left:
            groups.append(())
            left = size
        groups[-1] += (region,)
        left -= length
    return groups

"""The worker of a speech model: recordings are transcribed in turns, a window at a time."""

from __future__ import annotations

import functools
import io
import time

from edgellm.core.errors import RequestError
from edgellm.device_runtime.api.llm import Step
from edgellm.device_runtime.arrays import F32
from edgellm.device_runtime.sampling.logprobs import TokenLogprobs
from edgellm.device_runtime.transcription.transcriber import Segment, Transcriber, Transcript
from edgellm.multimodal.audio import decode_audio
from edgellm.tools.serve.engines.ask import TranscriptionInput
from edgellm.tools.serve.engines.events import Finished, Started
from edgellm.tools.serve.engines.metrics import Metrics
from edgellm.tools.serve.engines.worker import Job, Worker
from edgellm.tools.serve.http.errors import ApiError

MAX_AUDIO_S = 7200.0  # of a recording; its samples and features take 1 MB each 10 s
_RECORDINGS = 4  # at least: windows take turns, so that short ones need not wait for a long one


class SpeechWorker(Worker):
    """Transcribes recordings, each in a thread."""

    too_late = "the recording was not transcribed within {limit}: cut it into shorter ones"

    def __init__(
        self,
        *,
        transcriber: Transcriber,
        metrics: Metrics,
        queue_size: int,
        request_timeout_s: float,
    ) -> None:
        super().__init__(
            engine=transcriber,
            metrics=metrics,
            queue_size=queue_size,
            request_timeout_s=request_timeout_s,
            num_threads=max(_RECORDINGS, transcriber.num_windows),
        )
        self.transcriber = transcriber

    def _run(self, job: Job, began: float) -> None:
        self._check(job)
        for ask in job.asks:
            assert isinstance(ask, TranscriptionInput)
            self._transcribe(job, ask, began)

    def _transcribe(self, job: Job, ask: TranscriptionInput, began: float) -> None:
        """Post the segments of a recording, and then its transcript."""
        self.transcriber.require(ask.options)
        samples = _samples(ask.audio)
        self._check(job)
        found = self.transcriber.transcribe(samples, ask.options)
        found.before_pass = functools.partial(self._check, job)
        job.post(Started(0))
        segments: list[Segment] = []
        first = 0.0
        for segment in found:
            first = first or time.monotonic()
            self._metrics.generated.inc(len(segment.token_ids))
            segments.append(segment)
            job.post(Step(segment.token_ids, segment.text, logprobs=self._logprobs(segment)))
        transcript = found.collected(tuple(segments))
        finished = _figures(transcript, job, began, first or time.monotonic())
        self._metrics.audio.inc(transcript.duration_s)
        self._metrics.finished(finished, time.monotonic() - job.arrived)
        job.post(finished)

    def _logprobs(self, segment: Segment) -> tuple[TokenLogprobs, ...]:
        """Of the tokens of its text, without times."""
        first = self.transcriber.spec.first_timestamp_id
        return tuple(
            TokenLogprobs(token_id, logprob, ())
            for token_id, logprob in zip(segment.token_ids, segment.logprobs, strict=True)
            if token_id < first
        )


def _samples(audio: bytes) -> F32:
    try:
        return decode_audio(io.BytesIO(audio), "the file", MAX_AUDIO_S)
    except RequestError as error:
        raise ApiError(400, f"{error} ({error.hint})", param="file") from None


def _figures(found: Transcript, job: Job, began: float, first: float) -> Finished:
    return Finished(
        finish_reason="stop",
        prompt_tokens=0,
        cached_tokens=0,
        completion_tokens=sum(len(each.token_ids) for each in found.segments),
        rounds=(),
        queue_ms=(began - job.arrived) * 1e3,
        first_token_ms=(first - job.arrived) * 1e3,
        generation_ms=(time.monotonic() - first) * 1e3,
        transcript=found,
    )

"""`/v1/audio/transcriptions` and `/v1/audio/translations`: audio files to text."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI, Form, Request, UploadFile
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from edgellm.device_runtime.api.llm import Step
from edgellm.device_runtime.text.tokenizer import ChatTokenizer
from edgellm.device_runtime.transcription.formats import facts, srt, vtt
from edgellm.device_runtime.transcription.options import (
    NO_TIMES,
    SEGMENT_TIMES,
    TRANSCRIBE,
    TRANSLATE,
    WORD_TIMES,
    TranscriptionOptions,
    rising_temperatures,
)
from edgellm.device_runtime.transcription.transcriber import Transcript
from edgellm.tools.serve.engines.ask import TranscriptionInput
from edgellm.tools.serve.engines.events import Finished, Started
from edgellm.tools.serve.http.errors import ApiError
from edgellm.tools.serve.output.streams import EVENTS, OneText
from edgellm.tools.serve.protocols.openai.logprobs import TokenPlaces, transcript_logprobs
from edgellm.tools.serve.routing.engine_pool import EnginePool

_Event = dict[str, Any]
_Form = Form(media_type="multipart/form-data")
_SUBTITLES = {"srt": srt, "vtt": vtt}
_STREAMED = ("json", "text")  # formats


class SpeechForm(BaseModel):
    """The fields of a request; those of lists have OpenAI's names with brackets."""

    model_config = ConfigDict(extra="forbid")

    file: UploadFile
    model: str | None = None
    language: str | None = None  # of the speech; None: detected
    prompt: str = ""
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    # 0: the first of rising temperatures; others stay
    temperature: Annotated[float, Field(ge=0, le=1)] = 0.0
    granularities: Annotated[
        list[Literal["word", "segment"]], Field(alias="timestamp_granularities[]")
    ] = []
    stream: bool = False
    chunking_strategy: Literal["auto"] | None = None  # cut at pauses, without silence
    include: Annotated[list[Literal["logprobs"]], Field(alias="include[]")] = []

    def require_supported(self) -> None:
        """Raise `ApiError` for fields that contradict each other."""
        if self.include and self.response_format != "json":
            raise ApiError(400, "include[]: logprobs need response_format json", param="include[]")
        if self.stream and self.response_format not in _STREAMED:
            raise ApiError(
                400,
                f"stream: {self.response_format} is not streamed: ask for json or text",
                param="stream",
            )
        if self.granularities and self.response_format != "verbose_json":
            raise ApiError(
                400,
                "timestamp_granularities[]: needs response_format verbose_json",
                param="timestamp_granularities[]",
            )

    async def ask(self, task: str) -> TranscriptionInput:
        """The engine's input; raises as `require_supported`, and `ApiError` for an empty file."""
        self.require_supported()
        content = await self.file.read()
        if not content:
            raise ApiError(400, "file: the file is empty", param="file")
        times = NO_TIMES if self.response_format in _STREAMED else SEGMENT_TIMES
        options = TranscriptionOptions(
            language=self.language or None,
            task=task,
            timestamps=WORD_TIMES if "word" in self.granularities else times,
            prompt=self.prompt,
            temperatures=(self.temperature,) if self.temperature else rising_temperatures(0.0),
            vad=self.chunking_strategy is not None,
        )
        return TranscriptionInput(audio=content, options=options)


class TranscriptWriter(OneText):
    """Writes a transcript in OpenAI's forms."""

    framing, last = EVENTS, b""

    def __init__(self, form: SpeechForm, tokenizer: ChatTokenizer) -> None:
        self._form, self._is_first = form, True
        self._places = TokenPlaces(tokenizer, tokenizer.hidden_ids())
        self._logprobs: list[_Event] = []  # of all segments so far

    def begin(self, started: Started) -> list[_Event]:
        """Nothing precedes the text."""
        del started
        return []

    def step(self, step: Step) -> list[_Event]:
        """The text of a segment."""
        text = step.text.lstrip() if self._is_first else step.text
        self._is_first = self._is_first and not text
        found = transcript_logprobs(step.logprobs, self._places)
        self._logprobs += found
        if not text:
            return []
        return [{"type": "transcript.text.delta", "delta": text, **self._with(found)}]

    def _with(self, logprobs: list[_Event]) -> _Event:
        """The field of log-probabilities, if it is included."""
        return {"logprobs": logprobs} if self._form.include else {}

    def end(self, figures: Finished) -> list[_Event]:
        """The whole text."""
        found = _transcript(figures)
        done = {"type": "transcript.text.done", "text": found.text, "usage": _usage(found)}
        return [done | self._with(self._logprobs)]

    def whole(self, figures: Finished) -> _Event | str:
        """The body in the requested format."""
        found, kind = _transcript(figures), self._form.response_format
        if kind == "text":
            return found.text + "\n"
        if kind in _SUBTITLES:
            return "".join(_SUBTITLES[kind](found))
        if kind == "json":
            return {"text": found.text, "usage": _usage(found), **self._with(self._logprobs)}
        shown = {**facts(found), "usage": _usage(found)}
        if self._form.granularities == ["word"]:
            del shown["segments"]
        return shown


def add_transcriptions(app: FastAPI, engines: EnginePool) -> None:
    """Add the routes."""

    async def transcribed(form: SpeechForm, request: Request, task: str) -> Response:
        served = await engines.of(form.model, request)
        writer = TranscriptWriter(form, served.transcriber.tokenizer)
        asks = [await form.ask(task)]
        return await served.respond(request, asks, writer, streams=form.stream)

    @app.post("/v1/audio/transcriptions")
    async def transcribe(form: Annotated[SpeechForm, _Form], request: Request) -> Response:
        """Write down the speech of an audio file."""
        return await transcribed(form, request, TRANSCRIBE)

    @app.post("/v1/audio/translations")
    async def translate(form: Annotated[SpeechForm, _Form], request: Request) -> Response:
        """Translate the speech of an audio file to English."""
        return await transcribed(form, request, TRANSLATE)


def _transcript(figures: Finished) -> Transcript:
    assert figures.transcript is not None
    return figures.transcript


def _usage(found: Transcript) -> _Event:
    return {"type": "duration", "seconds": round(found.duration_s)}

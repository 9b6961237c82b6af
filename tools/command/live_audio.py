"""Audio while it is recorded: raw samples from a pipe, or from a microphone by a recorder."""

from __future__ import annotations

import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

from edgellm.core.errors import EdgeLLMError, RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_RATE = "16000"
_READ_BYTES = 3200  # at most at once: 0.1 s
_RAW = ("-ac", "1", "-ar", _RATE, "-f", "s16le", "-")
# Commands that write 16-bit samples, mono, at 16 kHz; the first that is installed records
RECORDERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "linux": (
        ("arecord", "-q", "-t", "raw", "-f", "S16_LE", "-r", _RATE, "-c", "1"),
        ("ffmpeg", "-nostdin", "-loglevel", "error", "-f", "pulse", "-i", "default", *_RAW),
    ),
    "darwin": (
        ("ffmpeg", "-nostdin", "-loglevel", "error", "-f", "avfoundation", "-i", ":0", *_RAW),
    ),
}
_PIPE = "or pipe raw audio: RECORDER | edgellm transcribe - MODEL --live"


class LiveAudio:
    """Samples of a stream. They are read in a thread, so that the recorder never waits."""

    def __init__(self, stream: BinaryIO) -> None:
        """Args: `stream` of 16-bit integers, little endian, mono, at 16 kHz."""
        self._stream = stream
        self._read: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None: the end
        self.num_bytes = 0

    def stop(self) -> None:
        """End the recording here; from any thread, and from a signal's handler."""
        self._read.put(None)

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        """Samples from -1 to 1, until the stream ends or is stopped.

        Raises:
            RequestError: the stream is a WAV file.
        """
        from edgellm.multimodal.audio import raw_samples

        threading.Thread(target=self._fill, daemon=True).start()
        rest = b""
        while (content := self._read.get()) is not None:
            if not self.num_bytes and content.startswith(b"RIFF"):
                raise RequestError(
                    "the live audio is a WAV file, not raw samples",
                    hint="record raw ones (arecord -t raw), or leave out --live",
                )
            self.num_bytes += len(content)
            content = rest + content
            whole = len(content) // 2 * 2
            rest = content[whole:]
            yield raw_samples(content[:whole])

    def _fill(self) -> None:
        try:
            while content := self._stream.read1(_READ_BYTES):  # type: ignore[attr-defined]
                self._read.put(content)
        except (OSError, ValueError):  # it was closed
            pass
        self._read.put(None)


@contextmanager
def stopped_by_interrupt(audio: LiveAudio) -> Iterator[None]:
    """Let the first Ctrl-C end the recording, and the next one the command."""
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, _frame: object) -> None:
        signal.signal(number, before)
        audio.stop()

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def microphone() -> Iterator[LiveAudio]:
    """Record the microphone.

    Raises:
        EdgeLLMError: there is no recorder, or it fails before the first sample.
    """
    command = _recorder()
    # Ctrl-C is not the recorder's: it ends when it was read.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    audio = LiveAudio(process.stdout)  # type: ignore[arg-type]
    try:
        yield audio
        if process.poll() and not audio.num_bytes:
            raise _failed(command, process)
    finally:
        process.terminate()
        process.communicate()


def _recorder() -> Sequence[str]:
    known = RECORDERS.get(sys.platform, ())
    for command in known:
        if shutil.which(command[0]) is not None:
            return command
    names = " or ".join(dict.fromkeys(command[0] for command in known)) or "a recorder"
    raise EdgeLLMError(
        f"--mic needs {names}, which is not installed",
        hint=f"install it (arecord is in alsa-utils), {_PIPE}",
    )


def _failed(command: Sequence[str], process: subprocess.Popen[Any]) -> EdgeLLMError:
    assert process.stderr is not None
    lines = process.stderr.read().decode(errors="replace").split("\n")
    reason = next((line.strip() for line in lines if line.strip()), "no reason given")
    return EdgeLLMError(
        f"{command[0]} does not record: {reason}", hint=f"connect a microphone, {_PIPE}"
    )

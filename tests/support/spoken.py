"""Speech by eSpeak NG, from the package espeakng-loader, without a sound card."""

from __future__ import annotations

import ctypes
import wave
from pathlib import Path

VOICE = Path(__file__).with_name("voice.txt")  # packages of speech and its detection
_RETRIEVAL = 1  # samples go to a callback
_UTF8 = 1
_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
)


def say(package: Path, text: str, path: Path) -> Path:
    """Write an English text as speech to a WAV file, mono, 16 bits, at eSpeak's 22050 Hz.

    Args:
        package: folder of espeakng_loader.
        text: what is said.
        path: of the file.
    """
    espeak = ctypes.CDLL(str(package / "libespeak-ng.so"))
    pieces: list[bytes] = []

    @_CALLBACK
    def receive(samples, count, events):
        del events
        if samples and count:
            pieces.append(ctypes.string_at(samples, 2 * count))
        return 0

    rate = espeak.espeak_Initialize(_RETRIEVAL, 0, str(package).encode(), 0)
    assert rate > 0
    assert espeak.espeak_SetVoiceByName(b"en") == 0
    espeak.espeak_SetSynthCallback(receive)
    content = text.encode() + b"\0"
    assert espeak.espeak_Synth(content, len(content), 0, 1, 0, _UTF8, None, None) == 0
    espeak.espeak_Synchronize()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(b"".join(pieces))
    return path

"""ONNX Runtime as `ort`, imported without its notes about ARM processors that it does not know.

Boards have many of these. The notes are on standard error, of native code, and change nothing.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NOTES = re.compile(
    rb"cpuid_info warning: Unknown CPU vendor|Error in cpuinfo: |unknown .*CPU part \w+ ignored"
    rb"|GPU device discovery failed"  # a display controller that is not on a PCI bus
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def without_notes() -> Iterator[None]:
    """Write standard error, also that of native code, at the end and without lines with notes.

    Signals wait, so that the line of an interrupted command is not held back.
    """
    try:
        stderr = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    try:
        with _signals_wait(), open(os.memfd_create("stderr"), "r+b") as held:
            os.dup2(held.fileno(), 2)
            try:
                yield
            finally:
                os.dup2(stderr, 2)
                held.seek(0)
                _write(b"".join(line for line in held if not _NOTES.search(line)))
    finally:
        os.close(stderr)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Call handlers written in Python at the end; only the main thread can change them."""
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    found = {each: signal.getsignal(each) for each in _SIGNALS} if is_main else {}
    handlers = {each: handler for each, handler in found.items() if callable(handler)}
    for each in handlers:
        signal.signal(each, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
        for number in came:
            signal.raise_signal(number)


def _write(text: bytes) -> None:
    """Write to standard error, which may be full or without a reader."""
    try:
        while text:
            text = text[os.write(2, text) :]
    except OSError:
        return


if sys.platform == "linux" and platform.machine() == "aarch64":
    with without_notes():
        import onnxruntime as ort
else:
    import onnxruntime as ort

__all__ = ["ort", "without_notes"]

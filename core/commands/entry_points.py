"""Entry points of the commands. Ctrl-C ends a command in one line, also while it is imported."""

from __future__ import annotations

import gc
import importlib
import os
import signal
from collections.abc import Callable

MODULES = {
    "edgellm": "edgellm.tools.command.cli",
    "edgellm-quantize": "edgellm.quantize.cli",
    "edgellm-export": "edgellm.export.cli",
    "llm_build": "edgellm.build.cli",
    "visual_build": "edgellm.build.visual_cli",
    "audio_build": "edgellm.build.audio_cli",
    "llm_inference": "edgellm.device_runtime.cli",
    "edgellm-trees": "edgellm.tools.trees",
    "edgellm-serve": "edgellm.tools.serve.cli",
    "edgellm-doctor": "edgellm.tools.doctor.cli",
    "edgellm-inspect": "edgellm.tools.inspection.cli",
    "edgellm-chat": "edgellm.tools.chat.cli",
    "edgellm-bench": "edgellm.tools.bench.cli",
    "edgellm-transfer": "edgellm.tools.transfer.cli",
    "edgellm-eval": "edgellm.tools.evaluate.cli",
    "edgellm-train-draft": "edgellm.tools.train_draft.cli",
}
NOTHING_HALF_WRITTEN, INTERRUPTED_CODE = "nothing half-written was left", 130


def __getattr__(name: str) -> Callable[[], None]:
    """Return the entry point of a command, whose dashes are underscores."""
    for command, module in MODULES.items():
        if name == command.replace("-", "_"):
            return lambda: run(module)
    raise AttributeError(name)


def run(module: str) -> None:
    """Import a command's module and run its `main`, which handles signals itself."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    gc.disable()  # imports make no garbage; see `collect_garbage`
    importlib.import_module(module).main()


def collect_garbage() -> None:
    """Collect garbage from now on, but not what `run` imported."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def _end(*_: object) -> None:
    """End the process at once: nothing was begun, and libraries turn exceptions into others."""
    try:
        os.write(2, f"error: interrupted; {NOTHING_HALF_WRITTEN}\n".encode())
    finally:
        os._exit(INTERRUPTED_CODE)

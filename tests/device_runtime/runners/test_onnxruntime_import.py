"""ONNX Runtime's notes about unknown ARM processors; `make arm` imports it on one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from edgellm.device_runtime.runners.onnxruntime_import import without_notes

# Of a Raspberry Pi, a Snapdragon, and an emulator: issues 26300, 21947 and 27336 of ONNX Runtime
NOTES = (
    "2025-10-13 19:56:01.17 [W:onnxruntime:Default, device_discovery.cc:164 "
    "DiscoverDevicesForPlatform] GPU device discovery failed: device_discovery.cc:89 "
    'ReadFileContents Failed to open file: "/sys/class/drm/card1/device/vendor"',
    "Error in cpuinfo: failed to parse the list of possible processors in /sys/devices/system",
    "unknown Qualcomm CPU part 0x1 ignored",
    "onnxruntime cpuid_info warning: Unknown CPU vendor. cpuinfo_vendor value: 0",
)
OTHERS = (
    "onnxruntime cpuid_info warning: Failed to initialize PyTorch cpuinfo library.",
    "anything else",
)


def test_only_notes_are_held_back(capfd):
    with without_notes():
        os.write(2, "\n".join([OTHERS[0], *NOTES, OTHERS[1]]).encode())
    os.write(2, b"\nafter")
    assert capfd.readouterr().err == "\n".join([*OTHERS, "after"])


def fail():
    with without_notes():
        os.write(2, b"why")
        raise ImportError("no such library")


def test_errors_of_the_import_are_raised(capfd):
    with pytest.raises(ImportError, match="no such library"):
        fail()
    assert capfd.readouterr().err == "why"


def interrupt(reached: list[bool]) -> None:
    with without_notes():
        os.kill(os.getpid(), signal.SIGINT)
        reached.append(True)


def test_signals_wait():
    reached, handler = [], signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        interrupt(reached)
    assert reached
    assert signal.getsignal(signal.SIGINT) is handler


def test_closed_standard_error():
    code = (
        "from edgellm.device_runtime.runners.onnxruntime_import import without_notes as hide\n"
        "with hide(): print(1)"
    )
    words = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", code]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "1\n")

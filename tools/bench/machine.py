"""Facts about the machine of a benchmark; unavailable ones are omitted."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from edgellm.core.resources import physical_memory_bytes

_PACKAGES = ("edgellm", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "numpy")
_CPU = Path("/sys/devices/system/cpu")
_COMMAND_S = 10.0
_BUSY = 0.5  # load per core above which other programs disturb the results


def facts() -> dict[str, str]:
    """Return processor, memory, clocks, power mode, load and versions."""
    found = {
        "board": _read(Path("/proc/device-tree/model")),
        "CPU": cpu_name(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory": f"{physical_memory_bytes() / 1e9:.1f} GB",
        "governor": _read(_CPU / "cpu0/cpufreq/scaling_governor"),
        "highest clock": _megahertz(_read(_CPU / "cpu0/cpufreq/scaling_max_freq")),
        "power mode": _first_line("nvpmodel", "-q"),
        "GPU": _first_line(
            "nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"
        ),
        "load": f"{os.getloadavg()[0]:.2f}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
    }
    return {name: value for name, value in found.items() if value}


def busy_warning() -> str:
    """Return a warning if other programs use the processor, else ""."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load < _BUSY * cores:
        return ""
    return f"the load is {load:.1f} on {cores} cores: other programs disturb the results"


def cpu_name() -> str:
    """Return the model name; on ARM, which has none, the core's part number."""
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    fields = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    if name := fields.get("model name"):
        return name
    part = fields.get("CPU part", "")
    return f"{platform.machine()} part {part}" if part else platform.machine()


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace").strip("\x00\n ")
    except OSError:
        return ""


def _megahertz(kilohertz: str) -> str:
    return f"{int(kilohertz) / 1e3:.0f} MHz" if kilohertz.isdigit() else ""


def _first_line(*command: str) -> str:
    """Return the first line that a command prints, "" if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip().partition("\n")[0] if result.returncode == 0 else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""

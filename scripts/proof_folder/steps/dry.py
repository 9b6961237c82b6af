"""Runs without TensorRT: dry ones on the CPU, and with engines that torch computes.

A dry run has TensorRT's backend on the fake GPU, and engines for CUDA on the CPU. With `stand_in`
torch computes TensorRT's engines: on the GPU all else is real, in a dry run on the fake GPU.
"""

from __future__ import annotations

import atexit
import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.device_runtime.runners.onnxruntime_cuda import provider
from edgellm.scripts.proof_folder.steps.outputs import row

_MODULE = __name__
_GRAPHS = re.compile(r"CUDA graphs: (\d+) recorded, (\d+) launched, (\d+) refused")
_device: Any = None  # of TensorRT's backend, if it runs without TensorRT


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """What of a run is real.

    Attributes:
        dry: it is on the CPU.
        stand_in: torch computes TensorRT's engines.
    """

    dry: bool = False
    stand_in: bool = False


def pretend(backend: str, mode: Mode) -> None:
    """Let a backend for GPUs run in this process without what the mode replaces.

    Raises:
        EdgeLLMError: there is no GPU, or torch does not run on it.
    """
    global _device
    if backend == "tensorrt" and mode.stand_in:
        _device = importlib.import_module("torch_engine").install(on_cpu=mode.dry)
    elif backend == "tensorrt" and mode.dry:
        _device = importlib.import_module("fake_backend").install()
    elif mode.dry:
        provider.require_cuda = lambda: "cpu"


def command_prefix(backend: str, mode: Mode) -> str:
    """Python code that does so in another process, which prints its `graphs` at its end."""
    call = f"pretend({backend!r}, {mode!r})"
    return f"from {_MODULE} import Mode, pretend, show_graphs; {call}; show_graphs(); "


def graphs() -> str:
    """How many CUDA graphs this process recorded and ran; "" if it ran none without TensorRT."""
    if _device is None or not _device.passes:
        return ""
    refused = getattr(_device, "refusals", 0)
    recorded, launched = _device.captures, _device.launches
    return f"CUDA graphs: {recorded} recorded, {launched} launched, {refused} refused"


def missing_graphs(said: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A row of the report by what `graphs` says in these lines: passes that recur become graphs."""
    found = [match for line in said if (match := _GRAPHS.fullmatch(line))]
    missing = [int(one[3]) if int(one[1]) else 1 for one in found]
    return {"missing CUDA graphs": row(sum(missing), 0, sum(missing), 0)} if found else {}


def show_graphs() -> None:
    """Print `graphs` when this process ends."""
    atexit.register(lambda: print(graphs(), flush=True))


def lack_of_torch() -> str:
    """Why torch computes no engines on this machine's GPU; "": it does."""
    try:
        return importlib.import_module("torch_engine").lack()
    except ImportError as error:
        return f"--stand_in needs torch: {error}"


def backend_for(bundle: Path, backend: str) -> str:
    """The backend of a dry run: TensorRT's graphs of NVFP4 have a type that no CPU computes."""
    has_fp4 = load_bundle(bundle, LLM_BUNDLE).quantization == "NVFP4"
    return "onnxruntime_cpu" if has_fp4 and backend == "tensorrt" else backend

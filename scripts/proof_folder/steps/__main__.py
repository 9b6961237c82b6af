"""A step of the proof on engines: built on this machine, compared with expected outputs.

    python -m edgellm.scripts.proof_folder.steps available
    python -m edgellm.scripts.proof_folder.steps machine
    python -m edgellm.scripts.proof_folder.steps outputs BACKEND BUNDLE EXPECTED
    python -m edgellm.scripts.proof_folder.steps trees BACKEND BASE DRAFT REQUESTS
    python -m edgellm.scripts.proof_folder.steps pictures BACKEND BASE VISUAL PICTURES
    python -m edgellm.scripts.proof_folder.steps memory BACKEND BASE DRAFT

`--help` has the flags. The last line of the output is a JSON object for `prove`. With `--dry`
TensorRT's engines run on a fake GPU, and those for CUDA on the CPU. With `--stand_in` torch
computes TensorRT's engines on the GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime import runners
from edgellm.device_runtime.gpu import compute_capability
from edgellm.scripts.proof_folder.steps.dry import (
    Mode,
    backend_for,
    graphs,
    lack_of_torch,
    missing_graphs,
    pretend,
)
from edgellm.scripts.proof_folder.steps.memory import run_long
from edgellm.scripts.proof_folder.steps.outputs import Result, compare_outputs, passed
from edgellm.scripts.proof_folder.steps.pictures import compare_captions
from edgellm.scripts.proof_folder.steps.trees import command, compare_trees

_BACKENDS, _GPU = ("tensorrt", "onnxruntime_cuda"), "gpu"
_KINDS = ("available", "machine", "outputs", "trees", "pictures", "memory")
_DRY_S = 1.0  # of a long run


def _machine() -> Result:
    """What `edgellm-doctor` says of this machine; it exits with 1 if something is missing."""
    code, said = command("tools.doctor")
    return code in (0, 1), {"said": said}


def _available(mode: Mode) -> dict[str, str]:
    """Why this machine cannot run steps, by what they need; "": it can."""
    if mode.dry:
        return {}
    found = {name: _lack_of(name, mode) for name in _BACKENDS}
    try:
        found[_GPU] = "" if compute_capability() is not None else "there is no NVIDIA GPU here"
    except EdgeLLMError as error:
        found[_GPU] = str(error)
    return {name: why or found[_GPU] for name, why in found.items()}


def _lack_of(backend: str, mode: Mode) -> str:
    if mode.stand_in and backend == "tensorrt":
        return lack_of_torch()
    try:
        runners.find(backend).require_device()
    except EdgeLLMError as error:
        return f"{backend}: {error}"
    return ""


def _run(options: argparse.Namespace) -> Result:
    """Run a step; its result may be that it is skipped."""
    if options.kind == "machine":
        return _machine()
    backend, *words = options.words
    mode = Mode(dry=options.dry, stand_in=options.stand_in)
    if not mode.dry and options.capability > (compute_capability() or 0):
        return True, {"skipped": f"it needs compute capability {options.capability / 10}"}
    pretend(backend, mode)
    is_passed, result = _compare(options, backend, list(map(Path, words)), mode)
    if said := graphs():
        result["said"] = [*result.get("said", ()), said]
    if mode.stand_in and (rows := missing_graphs(result.get("said", ()))):
        result["outputs"] = {**result.get("outputs", {}), **rows}
        is_passed = is_passed and passed(rows)
    return is_passed, result


def _compare(options: argparse.Namespace, backend: str, paths: list[Path], mode: Mode) -> Result:
    """Run a step on engines."""
    first, second, *others = paths
    if options.kind == "trees":
        return compare_trees(first, second, others[0], backend, mode)
    if options.kind == "pictures":
        return compare_captions(first, second, others[0], backend)
    if options.kind == "memory":
        seconds = _DRY_S if mode.dry else options.seconds
        return run_long(first, second, backend, seconds, dry=mode.dry)
    if mode.dry:
        backend = backend_for(first, backend)
    return compare_outputs(first, second, backend, options.sequences, options.adapter)


def main() -> None:
    """Run a step; the exit status is 1 if outputs differ more than they may."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("kind", choices=_KINDS)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--dry", action="store_true", help="run on the CPU")
    parser.add_argument("--stand_in", action="store_true", help="torch computes TensorRT's engines")
    parser.add_argument("--capability", type=int, default=0, help="least one of the GPU, as 89")
    parser.add_argument("--sequences", type=int, default=1, help="size of the batch")
    parser.add_argument("--adapter", type=Path, help="LoRA adapter of all sequences")
    parser.add_argument("--seconds", type=float, default=120.0, help="of a long run")
    options = parser.parse_args()
    if options.kind == "available":
        print(json.dumps(_available(Mode(dry=options.dry, stand_in=options.stand_in))))
        return
    try:
        passed, result = _run(options)
    except EdgeLLMError as error:
        passed, result = False, {"said": [str(error), error.hint]}
    print(*result.get("said", ()), sep="\n")
    print(json.dumps(result))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()

"""All checks on a machine with an NVIDIA GPU.

    python benchmarks/gpu_proof.py [ENGINE] [--dry]

Stages run even if an earlier one fails: the machine, tests on the GPU, the runtime in its own
process (copies, kernels, graphs, a second thread, a clean exit), engines built here, decoding
against the memory roofline and published figures. The result is one JSON file and one page. With
`--dry` the script runs on the fake GPU and ONNX Runtime's CPU engines, which tests only the script.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gpu
import numpy as np
from harness.gpu.clock import measured_bandwidths
from harness.gpu.comparison import published_llama
from harness.gpu.device import open_gpu

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.gpu import compute_capability
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import Device, NewRows, Planes
from edgellm.tools.bench.machine import facts

ROOT = Path(__file__).resolve().parents[1]
_LONGEST_S = 1800  # of a stage
# PyPI's torch for aarch64 brings 3.3 GB of CUDA packages.
_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
_TESTS_NEED = ("pytest", "hypothesis", "safetensors", "torch", "transformers")
_MATRIX = (4096, 4096)  # bytes: rows and their size, gathered for the bandwidth


@dataclass(frozen=True, slots=True)
class Stage:
    """The result of one stage."""

    name: str
    passed: bool
    seconds: float
    found: str  # the last lines of its output
    figures: dict[str, Any] = field(default_factory=dict)


def command(*words: object, codes: tuple[int, ...] = (0,)) -> tuple[bool, str]:
    """Run a program; return whether it succeeded, and its last output."""
    folders = (ROOT / ".src", ROOT / "benchmarks", ROOT / "tests", ROOT / "tests" / "support")
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, timeout=_LONGEST_S,
        check=False, cwd=ROOT, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    said = (result.stdout + result.stderr).strip().splitlines()
    return result.returncode in codes, "\n".join(said[-12:])


def check_runtime(device: Device, matrix: tuple[int, int] = _MATRIX) -> dict[str, float]:
    """Check copies, kernels and a graph against numpy; return GB/s of the largest.

    Raises:
        AssertionError: results differ.
    """
    count, row_bytes = matrix
    random = np.random.default_rng(0)
    source, target = (device.allocate(count * row_bytes) for _ in range(2))
    host, back = (device.pinned(count * row_bytes) for _ in range(2))
    host[:] = random.integers(0, 256, len(host), np.uint8)
    device.upload(source.address, host)
    rows = random.permutation(count)
    replay = device.capture(lambda: device.download(back, target.address))

    def gather() -> None:
        device.gather_rows(target.address, source.address, rows, row_bytes)
        replay()
        device.synchronize()

    gather()
    expected = host.reshape(matrix)[rows]
    assert np.array_equal(back.reshape(matrix), expected), "gather_rows"
    back[:] = 0
    thread = threading.Thread(target=gather)
    thread.start()
    thread.join()
    assert np.array_equal(back.reshape(matrix), expected), "in a second thread"
    _check_caches(device, target.address, host)
    start, repeats = time.perf_counter(), 20
    for _ in range(repeats):
        device.gather_rows(target.address, source.address, rows[: count // 4], row_bytes)
    device.synchronize()
    seconds = (time.perf_counter() - start) / repeats
    return {"gather_gb_per_s": 2 * count // 4 * row_bytes / seconds / 1e9}


def _check_caches(device: Device, address: int, host: np.ndarray) -> None:
    """Check that new rows are appended to a KV cache, and accepted ones compacted."""
    planes = Planes(address=address, count=4, rows=16, row_bytes=64)
    cache = host[: planes.num_bytes].reshape(4, 16, 64)
    device.load_rows(planes, cache.reshape(4, -1))
    small = device.allocate(4096)
    staged = device.pinned(4096)
    staged[:] = 0
    staged[:8] = np.array([5]).view(np.uint8)
    staged[256:268] = np.array([0, 2, 4], np.int32).view(np.uint8)
    staged[512:1024] = 7
    device.upload(small.address, staged)
    device.append_rows(
        planes,
        NewRows(
            address=small.address + 512, stride=256, planes=2, write_index_address=small.address
        ),
        2,
    )
    expected = cache.copy()
    expected[:, 5:7] = 7
    device.move_rows(planes, small.address + 256, 3, 3)
    expected[:, 3:6] = expected[:, [3, 5, 7]]
    found = device.save_rows(planes, 16).reshape(cache.shape)
    assert np.array_equal(found, expected), "append_rows, move_rows"


def _runtime(*, dry: bool) -> None:
    """Run the stage's process; its exit status is part of the proof."""
    from harness.gpu.attention import Sizes, check_attention
    from harness.gpu.experts import Sizes as ExpertSizes
    from harness.gpu.experts import check_experts
    from harness.gpu.kernels import check_kernels
    from harness.gpu.recurrent import Sizes as RecurrentSizes
    from harness.gpu.recurrent import check_recurrent
    from harness.gpu.vocabulary import Sizes as VocabularySizes
    from harness.gpu.vocabulary import check_vocabulary

    device, sm = open_gpu(fake=dry)
    found = check_runtime(device, (256, 64) if dry else _MATRIX)
    found |= check_kernels(device, 9000) if dry else check_kernels(device)
    found |= check_attention(device, sm, Sizes.small() if dry else Sizes())
    found |= check_recurrent(device, RecurrentSizes.small() if dry else RecurrentSizes())
    found |= check_experts(device, ExpertSizes.small() if dry else ExpertSizes())
    found |= check_vocabulary(device, VocabularySizes.small() if dry else VocabularySizes())
    print(json.dumps(found))


def build_engine(folder: Path, *, dry: bool) -> tuple[bool, str]:
    """Export and build the small model of `examples/` with its draft."""
    base, draft = (ROOT / "examples" / name for name in ("synthetic-vlm", "synthetic-vlm-eagle3"))
    dtype = "fp32" if dry else "fp16"
    backend = ("--backend", "tensorrt", "--layerReport")
    if dry:
        backend = ("--backend", "onnxruntime", "--device", "cpu")
    lengths = (64, 128) if dry else (128, 512)  # the fake GPU's graphs are of these
    sizes = ("--maxInputLen", lengths[0], "--maxKVCacheCapacity", lengths[1], *backend)
    steps = (
        ("export.cli", "llm", "--model_dir", base, "--draft_model_dir", draft, "--is_eagle_base",
         "--dtype", dtype, "--output_dir", folder / "base"),
        ("export.cli", "draft", "--draft_model_dir", draft, "--base_model_dir", base,
         "--dtype", dtype, "--output_dir", folder / "draft"),
        ("build.cli", "--onnxDir", folder / "base", "--engineDir", folder / "engine",
         "--eagleBase", *sizes),
        ("build.cli", "--onnxDir", folder / "draft", "--engineDir", folder / "engine",
         "--eagleDraft", *sizes),
    )  # fmt: skip
    said = ""
    for module, *words in steps:
        main = f"from edgellm.{module} import main; main()"
        passed, said = command(sys.executable, "-c", main, *words)
        if not passed:
            return False, said
    return True, said


def prove(options: argparse.Namespace) -> list[Stage]:
    """Run all stages; print a line after each."""
    python, stages = sys.executable, []

    def stage(name: str, work: Callable[[], tuple[bool, str, dict[str, Any]]]) -> bool:
        start = time.perf_counter()
        try:
            passed, found, figures = work()
        except Exception as error:  # noqa: BLE001 - the proof goes on, and says what failed
            passed, found, figures = False, f"{type(error).__name__}: {error}", {}
        stages.append(Stage(name, passed, time.perf_counter() - start, found, figures))
        print(f"{'ok' if passed else 'FAILED':7} {name}, {stages[-1].seconds:.1f} s", flush=True)
        return passed

    def runtime() -> tuple[bool, str, dict[str, Any]]:
        flags = ["--runtime", *(["--dry"] if options.dry else [])]
        passed, said = command(python, Path(__file__), *flags)
        return passed, said, json.loads(said.splitlines()[-1]) if passed else {}

    doctor = "from edgellm.tools.doctor.cli import main; main()"
    stage("doctor", lambda: (*command(python, "-c", doctor, codes=(0, 1)), {}))
    stage("tests", lambda: _tests(dry=options.dry))
    stage("runtime", runtime)
    with tempfile.TemporaryDirectory() as folder:
        engine = options.engine
        if engine is None and stage(
            "engine", lambda: (*build_engine(Path(folder), dry=options.dry), {})
        ):
            engine = Path(folder, "engine")
            if options.dry:
                stage("rounds", lambda: _fake_rounds(Path(folder)))
        if engine is not None:
            stage("decoding", lambda: _decoding(engine, options))
    return stages


def _tests(*, dry: bool) -> tuple[bool, str, dict[str, Any]]:
    """Run the tests of the GPU; fail if all are skipped."""
    if missing := [name for name in _TESTS_NEED if importlib.util.find_spec(name) is None]:
        return False, f"missing: {', '.join(missing)}; pip install '.[proof]' && {_TORCH}", {}
    flags = ["--collect-only", "-q"] if dry else ["-rs"]
    words = (sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", *flags)
    passed, said = command(*words)
    counts = {
        what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|skipped)", said)
    }
    return passed and (dry or counts.get("passed", 0) > 0), said, {} if dry else counts


def _fake_rounds(folder: Path) -> tuple[bool, str, dict[str, Any]]:
    """Count the calls of rounds on the fake GPU; `decoding` does so on a real one."""
    base, draft, engine = (folder / name for name in ("base", "draft", "engine"))
    script = Path(gpu.__file__)
    passed, said = command(sys.executable, script, "rounds", engine, "--fake", base, draft)
    figures = json.loads(said.splitlines()[-1]) if passed else {}
    return passed and figures["is_plain"], "\n".join(said.splitlines()[:-1]) or said, figures


def _decoding(engine: Path, options: argparse.Namespace) -> tuple[bool, str, dict[str, Any]]:
    """Check that drafted outputs equal plain ones; return a line for each speed."""
    options.bandwidth = options.bandwidth or max(measured_bandwidths().values())
    figures = gpu.measure(engine, options)
    runs = [(name, figures[name]) for name in ("plain", "drafted") if name in figures]
    lines = [f"{name}: {each['tokens_per_s']:.1f} tokens/s" for name, each in runs]
    for name, steps in figures.get("production", {}).items():
        if name != "is_plain":
            lines.append(_as_used(name, steps))
    lines += [
        f"kernels of a pass of {graph}: "
        + ", ".join(f"{name} {count}" for name, count in passes.items())
        for graph, passes in figures.get("launches", {}).items()
    ]
    if "roofline" in figures:
        lines.append(f"{figures['roofline']:.1%} of the memory's bandwidth")
    answers = [each for _, each in runs] + [figures.get("production", {})]
    is_plain = all(each.get("is_plain", True) for each in answers)
    return is_plain, "\n".join(lines if is_plain else [*lines, "the answers differ"]), figures


def _as_used(name: str, steps: dict[str, Any]) -> str:
    """Return lines on the production path, without clocks in it."""
    line = f"as users get it, {name}: {steps['tokens_per_s']:.1f} tokens/s"
    peak = steps["largest"]
    if not peak:
        return line
    return (
        f"{line}; a step has at most {peak['waits']} waits, {peak['bytes_down']} bytes back, "
        f"{peak['bytes_up']} there, {peak['graphs']} graphs, {peak['kernels']} more kernels"
    )


def write(stages: list[Stage], folder: Path, *, dry: bool) -> None:
    """Write `gpu-proof.json` and `gpu-proof.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    content = {"date": date, "is_dry": dry, "machine": facts(), "stages": list(map(asdict, stages))}
    text = json.dumps(content, indent=1)
    (folder / "gpu-proof.json").write_text(f"{text}\n", "utf-8")
    title = "# A dry run: nothing ran on a GPU" if dry else "# edgellm on a GPU"
    lines = [title, "", f"{date}", "", "| stage | | seconds |", "|---|---|---|"]
    lines += [f"| {s.name} | {'ok' if s.passed else 'FAILED'} | {s.seconds:.1f} |" for s in stages]
    lines += ["", *(f"* {name}: {value}" for name, value in facts().items()), ""]
    for each in stages:
        lines += [f"## {each.name}", "", "```", each.found, "```", ""]
    lines += ["## Published by TensorRT Edge-LLM for Thor, Llama-3.1-8B, tokens/s", ""]
    for name in ("nvfp4", "int4"):
        plain, drafted = published_llama(name)
        lines.append(f"* {name}: plain {plain}, EAGLE3 {drafted}")
    (folder / "gpu-proof.md").write_text("\n".join(lines) + "\n", "utf-8")


def main() -> None:
    """Run all stages; exit with code 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("engine", type=Path, nargs="?", help="default: a small one is built")
    parser.add_argument("--dry", "--quick", action="store_true", help="run on fakes, without a GPU")
    parser.add_argument("--output", type=Path, default=Path("gpu-proof"), help="folder of results")
    parser.add_argument("--runtime", action="store_true", help=argparse.SUPPRESS)
    gpu.add_run_flags(parser)
    options = parser.parse_args()
    if options.runtime:
        _runtime(dry=options.dry)
        return
    with contextlib.suppress(EdgeLLMError):  # of a driver that fails; the stages report it
        if not options.dry and compute_capability() is None:
            print("skipped: there is no NVIDIA GPU here")
            return
    if options.engine is None:  # of the small model in examples/, whose text continues this word
        options.prompt, options.tokens = "red", min(options.tokens, 48)
    if options.dry:
        options.bandwidth, options.repeats = options.bandwidth or 10.0, 1
    stages = prove(options)
    write(stages, options.output, dry=options.dry)
    print(f"{options.output}/gpu-proof.md and .json")
    sys.exit(0 if all(stage.passed for stage in stages) else 1)


if __name__ == "__main__":
    main()

"""Memory and time of quantization, layer by layer from disk, on this machine's CPU.

    pip install -e '.[dev]'
    python benchmarks/quantize.py               # an 8B shape: 40 GB of free disk, hours
    python benchmarks/quantize.py --layers 2    # peak memory does not depend on the layers
    python benchmarks/quantize.py --shape qwen2.5-0.5b  # with the default calibration
    python benchmarks/quantize.py --shape qwen2.5-0.5b --layers 3  # each layer costs the same

`--interrupt` interrupts each run with Ctrl-C, resumes it, and compares the bytes of both results.
The weights are random: this measures time and memory; quality.py measures quality. CPU time and
peak memory are the operating system's figures of the finished process.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from export import Cost, make_large, run
from harness import checkpoints

from edgellm.export.pipeline.resolve import open_checkpoint
from edgellm.scripts import smollm2

SCHEMES = {
    "fp8": [],
    "int8_sq": [],
    "nvfp4": [],
    "int4_awq": [],
    "nvfp4_awq": [],
    "int4_awq, autoround": ["--algo", "autoround"],
    "int4_awq, gptq": ["--algo", "gptq", "--block_size", "32"],
    "fp8, gptq": ["--algo", "gptq"],
    "nvfp4, gptq": ["--algo", "gptq"],
    "mixed": ["--target_bits", "5.7"],
}
_PROGRESS = re.compile(r"\((\d+)/(\d+)\)$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=smollm2.cache_folder() / "benchmarks")
    parser.add_argument(
        "--shape", choices=checkpoints.SHAPES, help="random weights of this shape; default: 8B"
    )
    parser.add_argument("--layers", type=int, help="number of layers; default: all")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=SCHEMES)
    parser.add_argument("--num_samples", type=int, default=8, help="samples, for the 8B shape")
    parser.add_argument(
        "--seq_len", type=int, default=256, help="tokens of a sample, for the 8B shape"
    )
    parser.add_argument(
        "--interrupt", action="store_true", help="interrupt and resume; compare the bytes"
    )
    arguments = parser.parse_args()
    amounts: list[object] = []
    if arguments.shape:
        model = _shape(arguments.work, arguments.shape, arguments.layers)
    else:
        model = _large(arguments.work, arguments.layers or 32)
        amounts = ["--num_samples", arguments.num_samples, "--seq_len", arguments.seq_len]
        amounts += ["--held_out", 1]
    script = Path(sys.executable).parent / "edgellm-quantize"
    print(f"{'scheme':20} {'peak GB':>7} {'CPU minutes':>11} {'minutes':>7} {'GB':>5}", flush=True)
    for name in arguments.schemes:
        output = arguments.work / f"quantized-{name.replace(', ', '-')}"
        shutil.rmtree(output, ignore_errors=True)
        command = [
            script,
            "llm",
            "--model_dir",
            model,
            "--output_dir",
            output,
            "--quantization",
            name.partition(",")[0],
            *SCHEMES[name],
            *amounts,
            "--device",
            "cpu",
        ]
        cost = run(*command)
        _show(name, cost, output)
        if arguments.interrupt:
            _show_interrupted(command, output)
        shutil.rmtree(output)


def _shape(work: Path, shape: str, layers: int | None) -> Path:
    checkpoint = work / (shape if layers is None else f"{shape}-{layers}-layers")
    if not checkpoint.exists():
        tokenizer = open_checkpoint(str(smollm2.fetch())).tokenizer_files
        checkpoints.synthetic_checkpoint(shape, tokenizer, checkpoint, layers)
    return checkpoint


def _large(work: Path, layers: int) -> Path:
    small = work / "bf16"
    if not small.exists():
        checkpoints.float_checkpoint(str(smollm2.fetch()), small, dtype="BF16")
    return make_large(work / f"large-{layers}", layers, small)


def _show(name: str, cost: Cost, output: Path) -> None:
    size = sum(path.stat().st_size for path in output.iterdir())
    print(
        f"{name:20} {cost.peak_bytes / 1e9:7.2f} {cost.cpu_s / 60:11.1f} "
        f"{cost.wall_s / 60:7.1f} {size / 1e9:5.2f}",
        flush=True,
    )


def _show_interrupted(command: list[object], output: Path) -> None:
    """Run `command` again with an interrupt, and compare the result with `output`."""
    whole = _digests(output)
    shutil.rmtree(output)
    process = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    at = "nowhere"
    for line in process.stderr:
        found = _PROGRESS.search(line)
        if at == "nowhere" and found and 2 * int(found[1]) >= int(found[2]):
            at = line.strip()
            process.send_signal(signal.SIGINT)
    code = process.wait()
    rest = run(*command)
    equal = _digests(output) == whole
    print(
        f"  Ctrl-C after {at}: exit code {code}; the rest took {rest.cpu_s / 60:.1f} CPU minutes, "
        f"{len(whole)} files of weights {'are equal' if equal else 'DIFFER'}",
        flush=True,
    )
    if not equal:
        raise SystemExit(1)


def _digests(folder: Path) -> dict[str, str]:
    found = sorted(folder.glob("*.safetensors"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


if __name__ == "__main__":
    main()

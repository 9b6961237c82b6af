"""Memory and time of quantizing an 8B shape, layer by layer from disk, on this machine's CPU.

    pip install -e '.[dev]'
    python benchmarks/quantize.py               # 32 layers: 40 GB of free disk, hours
    python benchmarks/quantize.py --layers 2    # peak memory does not depend on the layers

The weights are noise, the text is short: this is about memory, not about quality, which
quality.py measures. Peak memory is the operating system's own figure of the finished process.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import weights
from export import make_large, run

from edgellm.scripts import smollm2

SCHEMES = {
    "fp8": [],
    "int8_sq": [],
    "nvfp4": [],
    "int4_awq": [],
    "nvfp4_awq": [],
    "int4_awq, autoround": ["--algo", "autoround"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=smollm2.cache_folder() / "benchmarks")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--num_samples", type=int, default=8)
    parser.add_argument("--seq_len", type=int, default=256)
    arguments = parser.parse_args()
    small = arguments.work / "bf16"
    if not small.exists():
        weights.float_checkpoint(str(smollm2.fetch()), small, dtype="BF16")
    large = make_large(arguments.work / f"large-{arguments.layers}", arguments.layers, small)
    output = arguments.work / "quantized"
    print("scheme               peak GB  minutes    GB", flush=True)
    for name in arguments.schemes:
        shutil.rmtree(output, ignore_errors=True)
        script = Path(sys.executable).parent / "edgellm-quantize"
        cost = run(
            script, "llm", "--model_dir", large, "--output_dir", output, "--quantization",
            name.partition(",")[0], *SCHEMES[name], "--num_samples", arguments.num_samples,
            "--seq_len", arguments.seq_len, "--held_out", 1, "--device", "cpu",
        )  # fmt: skip
        size = sum(path.stat().st_size for path in output.iterdir())
        print(
            f"{name:20s} {cost.peak_bytes / 1e9:7.2f}  {cost.wall_s / 60:7.1f} {size / 1e9:5.1f}",
            flush=True,
        )
    shutil.rmtree(output)


if __name__ == "__main__":
    main()

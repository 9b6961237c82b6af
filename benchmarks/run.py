"""Run all benchmarks, and write the tables of docs/benchmarks.md from results.json.

    python benchmarks/run.py                   # hours, 20 GB of disk
    python benchmarks/run.py --only decode     # scripts by name
    python benchmarks/run.py --quick           # minutes: shows that all run, writes nothing
    python benchmarks/run.py --tables          # runs nothing, only writes the page

Each run is a process of its own, and replaces its tables in results.json. A run that fails does not
stop the others; the exit code is 1 then. Without a GPU, `gpu_proof.py`
and most modes of `gpu.py` skip.
Runs for which other libraries need an environment of their own (`--llama_python`, `--peers`,
`--vllm`, other drafts) are not in the list: they are started by hand.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

from harness.results import FILE, PAGE, fill, named, read

RUNS: dict[str, tuple[str, ...]] = {
    "decode": ("smollm2 --rounds 5", "shape --rounds 3", "qwen3.5 --rounds 3", "gemma4 --rounds 3"),
    "prefill": ("tokens --rounds 3", "context --threads 1"),
    "peers": ("speed --prompts 8 --tokens 96",),
    "speculation": (
        "speedup --methods plain eagle3-fixed eagle3 auto --prompts 5 --tokens 96"
        " --table speculation-precisions",
        "speedup --methods plain eagle3 auto --prompts 5 --tokens 96 --engines int8"
        " --temperatures 1 --table speculation-sampling",
        "stages --threads 1 --prompts 5 --methods plain eagle3",
        "context --engine int8 --threads 1 --prompts 3 --tokens 64 --windows 0 256",
        "simulated --rounds 3",
        "recall --engine int8 --prompts 2 --tokens 96 --threads 1 --ranks 32 64 128 256"
        " --states 3000",
    ),
    "quality": ("--off_grid --windows 2 --threads 1 --answers 10 --tokens 48",),
    "export": (
        "export --layers 8",
        "quantize --layers 6 --num_samples 16 --schemes fp8 int8_sq int4_awq nvfp4"
        " 'int4_awq, gptq' 'mixed, 5.7 bits'",
        "build --shapes 8b",
        "pack --shapes 8b --layers 4",
        "sizes",
        "tensorrt",
    ),
    "cold_start": ("",),
    "serving": (
        "overhead",
        "load --minutes 5 --clients 200 --queueSize 32",
        "clients --tokens 64 --seconds 15 --counts 1 4 16",
    ),
    "moe_and_hybrids": ("moe --layers 12 --threads 1", "operator --threads 1", "tree", "turns"),
    "vlm": ("encoder --depth 4 --rounds 3", "first_token", "memory --depth 4", "captions"),
    "speech": ("speech --rounds 5", "live --rounds 3"),
    "gpu": ("model", "clock"),
    "gpu_proof": ("",),
}
QUICK = dict.fromkeys(RUNS, ("--quick",))
_HERE = Path(__file__).parent


def run(name: str, words: list[str]) -> bool:
    """Run a script; print its time, and return whether it succeeded."""
    start = time.perf_counter()
    print(f"\n$ python benchmarks/{name}.py {shlex.join(words)}", flush=True)
    status = subprocess.run([sys.executable, _HERE / f"{name}.py", *words], check=False).returncode
    took = f"{time.perf_counter() - start:.0f} s"
    print(f"{'ok' if status == 0 else 'FAILED'}, {took}", flush=True)
    return status == 0


def write_tables() -> None:
    """Write the page; tables that it does not show yet get markers at its end."""
    tables, page = read(FILE), PAGE.read_text("utf-8")
    for name in tables:
        if name not in named(page):
            print(f"new on the page: {name}")
            page += f"\n## {name}\n\n<!-- table: {name} -->\n<!-- /table -->\n"
    PAGE.write_text(fill(page, tables), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--quick", action="store_true", help="small shapes; writes no results")
    parser.add_argument("--tables", action="store_true", help="only write the page")
    given = parser.parse_args()
    runs = QUICK if given.quick else RUNS
    passed = True
    if not given.tables:
        for name in given.only:
            for words in runs[name]:
                passed &= run(name, shlex.split(words))
    if not given.quick:
        write_tables()
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()

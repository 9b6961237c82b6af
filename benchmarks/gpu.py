"""Decoding on an NVIDIA GPU: tokens/s, the memory roofline, EAGLE3, and the host's share.

    python benchmarks/gpu.py ENGINE [--tokens 256] [--bandwidth GB/s]

ENGINE is a folder of `llm_build --backend tensorrt`, with a draft if there is one. The bandwidth is
the GPU's own figure; without it the roofline is left away. Nothing here has run on a GPU yet.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from edgellm.contract import DRAFT_FOLDER, EngineManifest, load_manifest
from edgellm.device_runtime.backends.tensorrt.gpu import compute_capability
from edgellm.device_runtime.llm import LLM
from edgellm.device_runtime.sampling import SamplingParams
from edgellm.device_runtime.speculate.options import SpecOptions

PROMPT = "Write a long story about a lighthouse keeper who finds a letter in a bottle."


@dataclass(frozen=True, slots=True)
class Measured:
    """One answer."""

    tokens: int
    wall_s: float
    cpu_s: float  # of this process
    timings: dict[str, float]


def measure(llm: LLM, tokens: int, *, speculative: bool) -> Measured:
    greedy = SamplingParams(temperature=0.0)
    for _ in range(2):  # the first records the graphs
        answer = llm.generate(
            PROMPT, sampling=greedy, max_generate_length=tokens, speculative=speculative
        )
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in answer:
            pass
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Measured(len(answer.token_ids), wall, cpu, answer.timings())


def report(name: str, found: Measured, floor_ms: float) -> None:
    ms = found.timings["generation_ms"] / max(found.tokens - 1, 1)
    cpu = found.cpu_s * 1e3 / max(found.tokens, 1)
    line = f"{name:12} {1e3 / ms:8.1f} tokens/s, {ms:7.2f} ms a token, CPU {cpu:6.2f} ms a token"
    if floor_ms:
        line += f", {100 * floor_ms / ms:5.1f} % of the roofline"
    if "spec_acceptance_length" in found.timings:
        line += f", {found.timings['spec_acceptance_length']:.2f} tokens a round"
    print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--bandwidth", type=float, default=0.0, help="of the GPU's memory, GB/s")
    options = parser.parse_args()
    if compute_capability() is None:
        sys.exit("skipped: there is no NVIDIA GPU here")
    manifest = load_manifest(options.engine, EngineManifest)
    has_draft = (options.engine / DRAFT_FOLDER).is_dir()
    llm = LLM(options.engine, spec=SpecOptions() if has_draft else None)
    plan = (options.engine / manifest.graphs[0].path).stat().st_size
    kv = manifest.decoder.kv.bytes_per_token * options.tokens
    floor_ms = (plan + kv) / (options.bandwidth * 1e6) if options.bandwidth else 0.0
    print(f"{manifest.backend_version}, {manifest.machine}, engine {plan / 1e6:.0f} MB")
    report("plain", measure(llm, options.tokens, speculative=False), floor_ms)
    if has_draft:
        report("EAGLE3", measure(llm, options.tokens, speculative=True), 0.0)


if __name__ == "__main__":
    main()

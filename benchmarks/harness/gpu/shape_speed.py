"""Speed of a random model in INT4, with the memory's bandwidth, energy, clocks and temperatures."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm.build import backends
from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.core.errors import LimitError
from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.core.resources import available_memory_bytes
from edgellm.device_runtime.api.llm import LLM
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint
from edgellm.scripts.proof_folder.steps.outputs import Result, passed, row, silent
from edgellm.tools.bench.machine import facts
from edgellm.tools.bench.measure import decode_rate, prefill_rate
from edgellm.tools.energy import Energy
from harness.gpu.clock import measured_bandwidths
from harness.gpu.readings import Watch
from harness.models.random_weights import SHAPES, int4_tensors, num_bytes, write_int4

# A token takes at most twice the time in which the memory gives its bytes: a share of 50 %.
_ALLOWED = 1.0
_COPIES = 3  # of the weights on the disk: checkpoint, bundle, engine; one is deleted early
_DRY_BANDWIDTHS = {"assumed": 10.0}  # GB/s
_DRY_SHAPE = "small"


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Tokens of a prompt, and tokens decoded after it; the fastest of some runs counts."""

    prompt: int = 512
    decoded: int = 128
    runs: int = 3

    @property
    def capacity(self) -> int:
        return 2 * (self.prompt + self.decoded)

    @property
    def mean(self) -> int:
        """Positions in the KV cache, over the decoded tokens."""
        return self.prompt + self.decoded // 2


def measure_speed(shape: str, backend: str, *, dry: bool) -> Result:
    """Make a checkpoint of a shape, build it, and measure prompts and decoding.

    Args:
        shape: "1b" or "8b", of `SHAPES`; a dry run takes a small one.
        backend: of the engine.
        dry: measure bandwidth of nothing, and judge no times.
    """
    config = SHAPES[_DRY_SHAPE if dry else shape]
    lengths = _Lengths(16, 4, 1) if dry else _Lengths()
    with tempfile.TemporaryDirectory() as folder:
        if why := _lack_of_space(num_bytes(int4_tensors(config)), Path(folder)):
            return True, {"skipped": why}
        bandwidths = _DRY_BANDWIDTHS if dry else measured_bandwidths()
        try:
            engine, token_bytes = _make(config, Path(folder), backend, lengths)
            with LLM(engine) as llm:
                figures = _measure(llm, lengths)
        except LimitError as error:
            return True, {"skipped": str(error)}
    roofline = max(bandwidths.values())
    token_ms, wanted = 1e3 / figures["decoding, tokens/s"], token_bytes / roofline / 1e6
    allowed = None if dry else _ALLOWED
    rows = {"milliseconds a token": row([token_ms], [wanted], token_ms / wanted - 1, allowed)}
    figures |= {
        "bytes a token, GB": token_bytes / 1e9,
        "share of the bandwidth": wanted / token_ms,
        **{f"bandwidth by {name}, GB/s": rate for name, rate in bandwidths.items()},
    }
    return passed(rows), {"outputs": rows, "figures": figures}


def _lack_of_space(size: int, folder: Path) -> str:
    """Why disk or memory is too small for a checkpoint of this size; "": it is not."""
    disk, memory = shutil.disk_usage(folder).free, available_memory_bytes()
    if disk < (needed := _COPIES * size):
        return f"it needs {needed / 1e9:.1f} GB of disk, {disk / 1e9:.1f} are free in {folder}"
    if memory < size:
        return f"it needs {size / 1e9:.1f} GB of memory, {memory / 1e9:.1f} are available"
    return ""


def _make(
    config: dict[str, Any], folder: Path, backend: str, lengths: _Lengths
) -> tuple[Path, float]:
    """Write, export and build; return the engine and the bytes that a token reads."""
    checkpoint, bundle, engine = (folder / name for name in ("checkpoint", "bundle", "engine"))
    write_int4(config, checkpoint)
    export_llm(open_checkpoint(str(checkpoint)), bundle, ExportOptions(dtype="fp16"))
    shutil.rmtree(checkpoint)
    plan = Plan(max_input_len=lengths.prompt, kv_capacity=lengths.capacity, kv_cache="float")
    build_engine("llm", bundle, engine, plan, backend, silent)
    found = load_bundle(bundle, LLM_BUNDLE)
    weights = backends.find(backend).estimate(bundle, found, plan).decode_bytes
    return engine, weights + found.decoder.kv.bytes_per_token * lengths.mean


def _measure(llm: LLM, lengths: _Lengths) -> dict[str, Any]:
    """Speeds, energy and readings."""
    prompts, decoding = Energy(), Energy()
    decode_rate(llm, lengths.prompt, lengths.decoded)  # records the graphs
    with Watch() as watch:
        decoded, read = (
            max(rate(llm, *sizes, energy, watch.window) for _ in range(lengths.runs))
            for rate, sizes, energy in (
                (decode_rate, (lengths.prompt, lengths.decoded), decoding),
                (prefill_rate, (lengths.prompt,), prompts),
            )
        )
        figures = watch.figures()
    found = {"decoding, tokens/s": decoded, "prompt, tokens/s": read}
    for name, energy, tokens in (
        ("decoded token", decoding, lengths.decoded),
        ("prompt token", prompts, lengths.prompt),
    ):
        if watch.meter is not None and energy.seconds:
            found[f"joules a {name}"] = energy.joules / (lengths.runs * tokens)
            found[f"watts, {name}s"] = energy.average_watts
    mode = facts().get("power mode", "none")
    return {**found, "power mode": mode, **figures}

"""Memory and disk that an engine and its build need, checked before any long work.

Backends check packages, the driver and precisions of a GPU; this module compares bytes.
`edgellm-doctor --onnxDir` makes the same checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgellm.build import backends
from edgellm.build.host_info import free_disk_bytes, read_bandwidth_bytes_per_s
from edgellm.build.plan import Estimate, Origin, Plan
from edgellm.core.errors import (
    EdgeLLMError,
    LimitError,
)
from edgellm.core.graph_roles import BLOCK, DECODER
from edgellm.core.manifest import Bundle
from edgellm.core.model_spec import DecoderSpec
from edgellm.core.resources import available_memory_bytes, physical_memory_bytes


@dataclass(frozen=True, slots=True)
class Need:
    """A resource that a build or its engine needs."""

    what: str
    found: str
    remedy: str = ""  # if it is too small


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted cost and speed of a build on this machine."""

    origin: Origin
    estimate: Estimate
    needs: tuple[Need, ...]

    def tokens_per_s(self, bandwidth_bytes_per_s: float) -> float:
        """Upper bound of plain decoding: a token reads all weights once."""
        return bandwidth_bytes_per_s / self.estimate.decode_bytes

    def size_lines(self) -> list[str]:
        """Sizes for users."""
        sizes = (
            ("engine", self.estimate.engine_bytes),
            ("KV cache", self.estimate.kv_bytes),
            ("adapters", self.estimate.adapter_bytes),
            ("scratch memory", self.estimate.scratch_bytes),
            ("peak build memory", self.estimate.peak_build_bytes),
        )
        return [f"{name:17} {size / 1e6:10.1f} MB" for name, size in sizes if size]

    def speed_lines(self) -> list[str]:
        """Decoding speed for users; measures this machine's memory if the engine runs there."""
        read, adapters = self.estimate.decode_bytes, self.estimate.adapter_bytes
        lines = [f"read for a token  {read / 1e6:10.1f} MB"]
        if adapters:
            lines.append(f"with an adapter   {(read + adapters) / 1e6:10.1f} MB")
        if not self.estimate.runs_on_cpu:
            return lines
        bandwidth = read_bandwidth_bytes_per_s()
        return [
            *lines,
            f"memory bandwidth  {bandwidth / 1e9:10.1f} GB/s",
            f"decode, at most   {self.tokens_per_s(bandwidth):10.1f} tokens/s",
        ]

    def need_lines(self) -> list[str]:
        """Resources for users: which suffice, and hints for the others."""
        lines = [f"ok     compiler: {self.origin.version}, for {self.origin.machine}"]
        for need in self.needs:
            lines.append(f"{'fault' if need.remedy else 'ok':5}  {need.what}: {need.found}")
            if need.remedy:
                lines.append(f"       remedy: {need.remedy}")
        return lines + [f"note   weights: {note}" for note in self.estimate.notes]


def predict(
    source: Path, bundle: Bundle, plan: Plan, backend_name: str, engine: Path
) -> Prediction:
    """Sizes and required resources, from the bundle's graphs alone.

    Raises:
        EdgeLLMError: no such backend, it cannot work here, or the GPU lacks the precision.
    """
    backend = backends.find(backend_name)
    if plan.max_batch_size > 1 and not backend.takes_batches(plan):
        raise EdgeLLMError(
            f"--maxBatchSize {plan.max_batch_size}: on {backend.LABEL} a pass serves one request "
            "unless edgellm's kernels compute attention, or ONNX Runtime does on CUDA",
            hint="give --kernels edgellm, or --backend onnxruntime --device cuda, or leave "
            "--maxBatchSize out",
        )
    if plan.max_lora_rank and not backend.takes_adapters(plan):
        raise EdgeLLMError(
            f"--maxLoraRank {plan.max_lora_rank}: on a CPU edgellm's kernels take adapters, not "
            "ONNX Runtime's",
            hint="leave out --kernels, or merge the adapter: edgellm-export llm --lora_dir",
        )
    if bundle.main_role == BLOCK and not backend.mixes_rows(plan):
        raise EdgeLLMError(
            f"a {bundle.draft.method} draft: only edgellm's kernels let tokens of a block see each "
            "other",
            hint="give --backend onnxruntime --kernels edgellm",
        )
    is_encoder = bundle.main_role == DECODER and not bundle.decoder.is_causal
    if is_encoder and not backend.mixes_rows(plan):
        raise EdgeLLMError(
            f"{bundle.decoder.model_type} is an encoder: only edgellm's kernels let tokens attend "
            "to later ones",
            hint="give --backend onnxruntime --device cpu --kernels edgellm",
        )
    if bundle.main_role == DECODER:
        _require_layers(backend, bundle.decoder)
    origin = backend.origin(plan.options)
    estimate = backend.estimate(source, bundle, plan)
    return Prediction(origin, estimate, tuple(_needs(estimate, engine)))


def _require_layers(backend: backends.Backend, spec: DecoderSpec) -> None:
    unsupported = ""
    if spec.recurrent is not None and not backend.TAKES_STATES:
        unsupported = "recurrent layers"
    if not spec.has_uniform_layers and not backend.TAKES_MIXED_LAYERS:
        unsupported = "layers with shared KV, or with KV heads of several sizes,"
    if spec.audio is not None and not backend.TAKES_AUDIO:
        unsupported = "attention to audio"
    if unsupported:
        raise EdgeLLMError(
            f"{backend.LABEL} on {backend.DEVICE} does not compute {unsupported} yet",
            hint="give --backend onnxruntime --device cpu",
        )


def _needs(estimate: Estimate, engine: Path) -> list[Need]:
    memory, disk = available_memory_bytes(), free_disk_bytes(engine)
    peak, files = estimate.peak_build_bytes, 2 * estimate.engine_bytes
    device = estimate.device_bytes
    held = estimate.engine_bytes + estimate.kv_bytes + estimate.scratch_bytes
    held += estimate.adapter_bytes
    remedy = estimate.build_remedy or "build on a machine with more memory"
    needs = [
        Need(
            "build memory",
            f"the build needs about {_size(peak)} of memory, {_size(memory)} are available"
            + (f": {_size(peak - memory)} are missing" if peak > memory else ""),
            f"quantize the model, or {remedy}" if peak > memory else "",
        ),
        Need(
            "disk",
            f"the build needs about {_size(files)} of disk ({files} bytes), "
            f"{_size(disk)} are free in {engine.absolute().parent}",
            "free some space, or give an --engineDir on another disk" if files > disk else "",
        ),
    ]
    if estimate.runs_on_cpu and estimate.kv_bytes:  # all else is memory-mapped
        return [*needs, _room_for_cache(estimate.kv_bytes)]
    if not device:  # compiled for another machine
        return needs
    cache = f", or give a smaller --maxKVCacheCapacity (it takes {_size(estimate.kv_bytes)})"
    remedy = f"quantize the model{cache if estimate.kv_bytes else ''}"
    if estimate.adapter_bytes:
        remedy += f", or give a smaller --maxLoras (adapters take {_size(estimate.adapter_bytes)})"
    found = f"the engine needs about {_size(held)} of memory, the GPU has {_size(device)}"
    return [*needs, Need("engine memory", found, remedy if held > device else "")]


def _room_for_cache(full: int) -> Need:
    memory = physical_memory_bytes()
    remedy = "give a smaller --maxKVCacheCapacity or --maxBatchSize" if full > memory else ""
    found = f"a full KV cache takes {_size(full)} of memory, this machine has {_size(memory)}"
    return Need("cache memory", found, remedy)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def require_fit(needs: Sequence[Need]) -> None:
    """Reject a build that exceeds memory or disk; raises `LimitError` with all hints."""
    lacking = [need for need in needs if need.remedy]
    if lacking:
        raise LimitError(
            "; ".join(need.found for need in lacking),
            hint="; ".join(need.remedy for need in lacking),
        )

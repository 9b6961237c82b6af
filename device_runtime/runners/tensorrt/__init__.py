"""TensorRT and TensorRT-RTX: engines for NVIDIA GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm.contract import (
    BrokenArtifactError,
    DecoderSpec,
    DraftEngineManifest,
    EngineManifest,
    LimitError,
    VisualEngineManifest,
    past_name,
    present_name,
)
from edgellm.device_runtime.gpu import compute_capability
from edgellm.device_runtime.runners.tensorrt import library
from edgellm.device_runtime.session import DraftSession, HeadsSession, Session, VisualSession

if TYPE_CHECKING:
    from edgellm.device_runtime.runners.tensorrt.device import Device, Engine

AnyEngine = EngineManifest | DraftEngineManifest | VisualEngineManifest


def available() -> str:
    """The library that compiles here, with its version.

    Raises:
        EdgeLLMError: neither TensorRT nor TensorRT-RTX is usable; says why.
    """
    return library.find_library().label


def open_session(engine: Path, manifest: EngineManifest) -> Session:
    """Load a base's engine onto the GPU.

    Raises:
        BrokenArtifactError: compiled for another GPU or library, told before the file is read; or
            the library refuses it.
        LimitError: the GPU's memory does not suffice.
        EdgeLLMError: pycuda or cuda-python is missing.
    """
    from edgellm.device_runtime.runners.tensorrt.session import TensorRtSession

    opened = _open(engine, manifest, manifest.decoder, manifest.max_kv_cache_capacity)
    loaded = opened.load(manifest.graphs[0].path, manifest.decoder)
    return TensorRtSession(loaded, opened.device, manifest)


def open_draft_session(engine: Path, manifest: DraftEngineManifest) -> DraftSession:
    """As `open_session`, for a draft's engine."""
    from edgellm.device_runtime.runners.tensorrt.session import TensorRtDraftSession

    spec = manifest.draft.decoder
    opened = _open(engine, manifest, spec, manifest.max_kv_cache_capacity)
    loaded = opened.load(manifest.graphs[0].path, spec)
    fuse = opened.load(manifest.fuse_graph) if manifest.fuse_graph else None
    return TensorRtDraftSession(loaded, fuse, opened.device, manifest)


def open_heads(engine: Path, manifest: DraftEngineManifest) -> HeadsSession:
    """As `open_session`, for an engine of Medusa heads."""
    from edgellm.device_runtime.runners.tensorrt.heads import TensorRtHeads

    opened = _open(engine, manifest)
    return TensorRtHeads(opened.load(manifest.graphs[0].path), opened.device)


def open_visual_session(engine: Path, manifest: VisualEngineManifest) -> VisualSession:
    """As `open_session`, for an encoder's engine."""
    from edgellm.device_runtime.runners.tensorrt.visual import TensorRtVisualSession

    opened = _open(engine, manifest)
    return TensorRtVisualSession(opened.load(manifest.graph), opened.device)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A GPU that an engine suits."""

    trt: Any
    device: Device
    engine: Path

    def load(self, name: str, spec: DecoderSpec | None = None) -> Engine:
        """A plan file of the engine; with a cache if it has a `spec`."""
        from edgellm.device_runtime.runners.tensorrt.runtime import load_engine

        layers = range(spec.kv.num_layers) if spec is not None else ()
        caches = {
            present_name(layer, part): past_name(layer, part)
            for layer in layers for part in ("key", "value")
        }  # fmt: skip
        return load_engine(self.trt, self.engine / name, self.device, caches)


def _open(
    engine: Path, manifest: AnyEngine, spec: DecoderSpec | None = None, capacity: int = 0
) -> _Opened:
    """Compare an engine with this machine, and its size with the GPU's memory."""
    from edgellm.device_runtime.runners.tensorrt.cuda import open_device

    trt = _require_origin(engine, manifest)
    device = open_device()
    kv_bytes = spec.kv.bytes_per_token * capacity if spec is not None else 0
    require_memory(device.free_bytes(), manifest, kv_bytes)
    return _Opened(trt, device, engine)


def require_memory(free_bytes: int, manifest: AnyEngine, kv_bytes: int) -> None:
    """Refuse what will not fit into the GPU's memory; raises `LimitError`."""
    plans = sum(
        record.num_bytes for name, record in manifest.files.items() if name.endswith(".engine")
    )
    if plans + kv_bytes > free_bytes:
        raise LimitError(
            f"the engine needs {(plans + kv_bytes) / 1e9:.2f} GB on the GPU, "
            f"{free_bytes / 1e9:.2f} GB are free",
            hint=f"close other programs, or build with a smaller --maxKVCacheCapacity (it takes "
            f"{kv_bytes / 1e9:.2f} GB) or from a quantized checkpoint",
        )


def _require_origin(engine: Path, manifest: AnyEngine) -> Any:
    """The module that compiled an engine, if it and its GPU are those of this machine.

    Raises:
        BrokenArtifactError: they are not.
    """
    maker = "visual_build" if isinstance(manifest, VisualEngineManifest) else "llm_build"
    sm, libraries = compute_capability(), library.installed()
    if sm is None:
        fault = "this machine has no NVIDIA GPU"
    elif f"sm{sm}" != manifest.machine:
        fault = f"this machine has sm{sm}"
    elif manifest.backend_version not in libraries:
        fault = f"this machine has {' and '.join(libraries) or 'no TensorRT'}"
    else:
        return libraries[manifest.backend_version]
    raise BrokenArtifactError(
        f"{engine} was compiled by {manifest.backend_version} for {manifest.machine}, {fault}",
        hint=f"run {maker} on the machine that will run the engine",
    )

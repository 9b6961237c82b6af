"""Backend: TensorRT and TensorRT-RTX, for NVIDIA GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm.core.artifact import cache_folder
from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
    LimitError,
)
from edgellm.core.graph_io import (
    past_name,
    present_name,
)
from edgellm.core.graph_roles import DECODER, ENCODER
from edgellm.core.manifest import Engine
from edgellm.core.model_spec import DecoderSpec
from edgellm.device_runtime.adapted_layers import MAX_LORAS
from edgellm.device_runtime.gpu import compute_capability
from edgellm.device_runtime.runners.runner import Runner
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import ADDRESSED_SUFFIX
from edgellm.device_runtime.runners.tensorrt.library import trt_import
from edgellm.device_runtime.runners.tensorrt.library.refit import LOWERED_SUFFIX, WEIGHTS_SUFFIX
from edgellm.device_runtime.runners.tensorrt.state_memory import StateLayout

if TYPE_CHECKING:
    from edgellm.device_runtime.runners.tensorrt.cuda.protocols import CompiledEngine, Device

KERNELS = "kernels"  # option of an engine: attention kernels, as in `--kernels`


def available() -> str:
    """The library that compiles here, with its version.

    Raises:
        EdgeLLMError: neither TensorRT nor TensorRT-RTX is usable, with the reason.
    """
    return trt_import.find_library().label


def require_device() -> None:
    """See `runners.Backend`."""
    sm = compute_capability()
    if sm is None:
        raise EdgeLLMError("there is no NVIDIA GPU here")
    found = trt_import.find_library()
    if found.is_ahead_of_time and sm not in trt_import.targets(found.trt):
        raise EdgeLLMError(f"{found.label} does not compile for compute capability {sm / 10}")
    from edgellm.device_runtime.runners.tensorrt.cuda.driver import open_device

    open_device()


def open_engine(folder: Path, engine: Engine) -> dict[str, Runner]:
    """Load an engine onto the GPU.

    Raises:
        BrokenArtifactError: compiled for another GPU or library (checked before the file is
            read), rejected by the library, or a file of weights is damaged.
        LimitError: the GPU has too little memory.
        EdgeLLMError: cuda-python is missing.
    """
    from edgellm.device_runtime.runners.tensorrt.cuda.driver import open_device
    from edgellm.device_runtime.runners.tensorrt.cuda.weight_table import loaded_bytes
    from edgellm.device_runtime.runners.tensorrt.library.python_plugins import register
    from edgellm.device_runtime.runners.tensorrt.library.runtime import load_engine

    trt = _require_origin(folder, engine)
    if trt_import.Library(trt, trt.__name__ != "tensorrt").runs_python_plugins:
        register(trt)
    device = open_device()
    addressed = [folder / name for name in engine.files if name.endswith(ADDRESSED_SUFFIX)]
    shared = sum(loaded_bytes(path, device) for path in addressed)
    require_memory(device.free_bytes() + shared, engine)
    opened = {}
    for role, graphs in engine.graphs.items():
        kv = engine.cache_of(role)
        layers = range(kv.num_layers) if kv is not None else ()
        caches = {
            present_name(layer, part): past_name(layer, part)
            for layer in layers
            for part in ("key", "value")
        }
        plan = graphs[0].path
        compiled = cache_folder() / "tensorrt" / f"{engine.files[plan].sha256[:32]}.kernels"
        is_stripped = Path(plan).with_suffix(LOWERED_SUFFIX).as_posix() in engine.files
        loaded = load_engine(trt, folder / plan, device, caches, compiled, is_stripped=is_stripped)
        opened[role] = runner_of(role, engine, loaded, device)
        if loaded.kernels is not None:
            loaded.kernels.save()
    return opened


def runner_of(role: str, engine: Engine, loaded: CompiledEngine, device: Device) -> Runner:
    """The runner of a loaded graph; raises `LimitError` if the device has too little memory."""
    from edgellm.device_runtime.runners.tensorrt.batch_runner import BatchRunner
    from edgellm.device_runtime.runners.tensorrt.encoder import TensorRtEncoder
    from edgellm.device_runtime.runners.tensorrt.ragged_batch import shared_rows
    from edgellm.device_runtime.runners.tensorrt.runner import TensorRtRunner

    if role == ENCODER:
        return TensorRtEncoder(loaded, device)
    max_rows, answers = engine.graphs[role][-1].max_rows, engine.max_batch_size
    tree_rows = max(engine.max_verify_tree_size, engine.max_draft_tree_size)
    tree_rows = tree_rows if answers == 1 else shared_rows(tree_rows, answers)
    spec = engine.decoder if engine.cache_of(role) is not None else None
    runner = (TensorRtRunner if answers == 1 or spec is None else BatchRunner)(
        engine=loaded,
        device=device,
        max_rows=max_rows,
        tree_rows=tree_rows,
        spec=spec,
        capacity=engine.max_kv_cache_capacity,
        num_sequences=answers,
        adapters=int(engine.options.get(MAX_LORAS, 0)) if role == DECODER else 0,
    )
    runner.prepare()
    return runner


def require_memory(free_bytes: int, engine: Engine) -> None:
    """Check the engine's size against the GPU's free memory; raises `LimitError`."""
    plans = sum(
        record.num_bytes
        for name, record in engine.files.items()
        if name.endswith((".engine", ADDRESSED_SUFFIX, WEIGHTS_SUFFIX))
    )
    cache = engine.cache
    rows = engine.max_kv_cache_capacity * engine.max_batch_size
    kv_bytes = cache.bytes_per_token * rows if cache is not None else 0
    kv_bytes += _state_bytes(engine)
    if plans + kv_bytes > free_bytes:
        raise LimitError(
            f"the engine needs {(plans + kv_bytes) / 1e9:.2f} GB on the GPU, "
            f"{free_bytes / 1e9:.2f} GB are free",
            hint=f"close other programs, or build with a smaller --maxKVCacheCapacity (it takes "
            f"{kv_bytes / 1e9:.2f} GB) or from a quantized checkpoint",
        )


def _state_bytes(engine: Engine) -> int:
    """Bytes of recurrent states, and of what passes store for them."""
    if not isinstance(engine.spec, DecoderSpec) or engine.spec.recurrent is None:
        return 0
    rows = max(engine.main_graphs[-1].max_rows, engine.max_verify_tree_size)
    return StateLayout.of(engine.spec.recurrent, rows).num_bytes


def _require_origin(folder: Path, engine: Engine) -> Any:
    """The module that compiled an engine, if this machine has the same one and the same GPU.

    Raises:
        BrokenArtifactError: the module or the GPU differs.
    """
    sm, libraries = compute_capability(), trt_import.installed()
    if sm is None:
        fault = "this machine has no NVIDIA GPU"
    elif f"sm{sm}" != engine.machine:
        fault = f"this machine has sm{sm}"
    elif engine.backend_version not in libraries:
        fault = f"this machine has {' and '.join(libraries) or 'no TensorRT'}"
    else:
        return libraries[engine.backend_version]
    raise BrokenArtifactError(
        f"{folder} was compiled by {engine.backend_version} for {engine.machine}, {fault}",
        hint=f"run {engine.builder} on the machine that will run the engine",
    )

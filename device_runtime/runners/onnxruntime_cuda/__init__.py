"""Backend: ONNX Runtime on NVIDIA GPUs; modules that import onnxruntime are loaded lazily."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgellm.core.errors import EdgeLLMError
from edgellm.core.graph_roles import DECODER, DRAFT
from edgellm.core.manifest import Engine, GraphSpec, Spec
from edgellm.core.model_spec import DecoderSpec, DraftSpec
from edgellm.device_runtime.adapted_layers import MAX_LORAS
from edgellm.device_runtime.gpu import compute_capability
from edgellm.device_runtime.runners import onnxruntime_cpu
from edgellm.device_runtime.runners.onnxruntime_cuda.engine_options import INT_GEMM
from edgellm.device_runtime.runners.runner import Runner

# The first ONNX Runtime whose GroupQueryAttention for CUDA was tested with an attention bias
FUSED_VERSION = "1.31"


def available() -> str:
    """See `onnxruntime_cpu.available`: engines can be built without a GPU."""
    return onnxruntime_cpu.available()


def require_device() -> None:
    """See `runners.Backend`."""
    available()
    if compute_capability() is None:
        raise EdgeLLMError("there is no NVIDIA GPU here")
    from edgellm.device_runtime.runners.onnxruntime_cuda import provider

    provider.require_cuda()


def open_engine(folder: Path, engine: Engine) -> dict[str, Runner]:
    """Load the engine's graphs, which depend on no version, and record recurring passes.

    Raises:
        BrokenArtifactError: ONNX Runtime rejects a graph.
        LimitError: the device has too little memory.
        EdgeLLMError: CUDA does not run here, or ONNX Runtime is too old for an operator.
    """
    available()
    from edgellm.device_runtime.runners.onnxruntime_cuda import provider
    from edgellm.device_runtime.runners.onnxruntime_cuda.runner import CudaRunner

    threads = engine.threads
    room = engine.max_kv_cache_capacity, engine.max_batch_size
    device = provider.require_cuda()
    provider.require_version(engine.options)
    opened = open_graphs(folder, engine.graphs, engine.spec, room, threads, device, engine.options)
    decoder = opened.get(DECODER)
    if isinstance(decoder, CudaRunner):
        decoder.prepare(engine.max_verify_tree_size)
    return opened


def open_graphs(
    folder: Path,
    graphs: Mapping[str, tuple[GraphSpec, ...]],
    spec: Spec,
    room: tuple[int, int],
    threads: int,
    device: str,
    options: Mapping[str, Any],
) -> dict[str, Runner]:
    """Load graphs onto a device; raises as `open_engine`.

    Args:
        folder: of the graphs.
        graphs: of each role.
        spec: of the engine.
        room: of the KV cache: positions of a sequence, and the maximum batch size.
        threads: 0: all cores.
        device: see `onnxruntime_graphs`.
        options: of the engine.
    """
    from edgellm.device_runtime.runners.onnxruntime_cuda.attention_inputs import ROWS_GRAPH
    from edgellm.device_runtime.runners.onnxruntime_cuda.batch_runner import BatchRunner
    from edgellm.device_runtime.runners.onnxruntime_cuda.loading import Loader
    from edgellm.device_runtime.runners.onnxruntime_cuda.runner import CudaRunner, PlainRunner

    opened: dict[str, Runner] = {}
    (capacity, num_sequences), adapters = room, int(options.get(MAX_LORAS, 0))
    for role, specs in graphs.items():
        paths = [folder / each.path for each in specs]
        loader = Loader(
            paths=paths, threads=threads, device=device, has_int_gemm=INT_GEMM in options
        )
        decoder = spec.decoder if isinstance(spec, DraftSpec) else spec
        if role not in (DECODER, DRAFT) or not isinstance(decoder, DecoderSpec):
            opened[role] = PlainRunner(loader.of_role(role))
            continue
        # The cache of a draft with batch size 1 is never compacted
        has_mover = role == DECODER or num_sequences > 1
        mover = loader.load(folder / ROWS_GRAPH) if has_mover else None
        if mover is not None and num_sequences > 1:
            opened[role] = BatchRunner(
                loader=loader,
                mover=mover,
                spec=decoder,
                capacity=capacity,
                num_sequences=num_sequences,
                adapters=adapters,
            )
        else:
            opened[role] = CudaRunner(
                loader=loader, mover=mover, spec=decoder, capacity=capacity, adapters=adapters
            )
    return opened

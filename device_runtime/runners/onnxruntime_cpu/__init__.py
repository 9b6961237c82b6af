"""Backend: ONNX Runtime on the CPU, the default."""

from __future__ import annotations

from pathlib import Path

from edgellm.core.commands.extras import remedy
from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
)
from edgellm.core.graph_roles import ROLES, Rows
from edgellm.core.manifest import Engine, GraphSpec
from edgellm.device_runtime.runners.onnxruntime_cpu.processor import instruction_sets
from edgellm.device_runtime.runners.runner import Runner

MINIMUM_VERSION = (1, 22)
KERNELS, LAYOUT = "kernels", "weight_layout"  # options of an engine: its kernels, layout version
# An option: by graph, ranges of its weight file with tables that passes read by rows.
LOOKUPS = "lookup_tables"
EDGELLM, ONNXRUNTIME = "edgellm", "onnxruntime"  # values of `KERNELS`


def available() -> str:
    """ONNX Runtime's version.

    Raises:
        EdgeLLMError: not installed, or too old.
    """
    try:
        from edgellm.device_runtime.runners.onnxruntime_import import ort
    except ImportError:
        raise EdgeLLMError("onnxruntime is not installed", hint=remedy("onnxruntime")) from None
    version = ort.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < MINIMUM_VERSION:
        raise EdgeLLMError(
            f"onnxruntime {version} is too old", hint="pip install --upgrade onnxruntime"
        )
    return version


def require_device() -> None:
    """See `runners.Backend`: every machine has a CPU."""
    available()


def open_engine(folder: Path, engine: Engine) -> dict[str, Runner]:
    """Load the engine's graphs.

    Raises:
        BrokenArtifactError: built with another ONNX Runtime or for another processor, whose
            prepacked weights have another layout; or it needs edgellm's kernels, which are
            unavailable here.
    """
    from edgellm.device_runtime.runners.onnxruntime_cpu.runner import (
        LoadedGraph,
        open_runner,
    )
    from edgellm.device_runtime.runners.onnxruntime_graphs import GraphOptions, load_graph

    _check_origin(folder, engine)
    own_kernels = engine.options.get(KERNELS) == EDGELLM
    if own_kernels:
        _check_kernels(folder, engine)
    threads, opened = engine.threads, {}
    for role, graphs in engine.graphs.items():
        options = {
            "threads": threads,
            "optimize": False,
            "keeps_memory": ROLES[role].rows not in (Rows.ITEM, Rows.AUDIO),
            "own_kernels": own_kernels,
        }
        loaded = [
            LoadedGraph(
                load_graph(folder / g.path, GraphOptions(**options, lookups=_lookups(engine, g))),
                g.max_rows,
            )
            for g in graphs
        ]
        kv = engine.cache_of(role)
        capacity = engine.max_kv_cache_capacity
        opened[role] = open_runner(loaded, kv, capacity, engine.max_batch_size)
    return opened


def _lookups(engine: Engine, graph: GraphSpec) -> tuple[tuple[int, int], ...]:
    ranges = engine.options.get(LOOKUPS, {}).get(graph.path, ())
    return tuple((offset, size) for offset, size in ranges)


def _check_origin(folder: Path, engine: Engine) -> None:
    for what, built, found in (
        ("ONNX Runtime", engine.backend_version, available()),
        ("processor", engine.machine, instruction_sets()),
    ):
        if built != found:
            raise BrokenArtifactError(
                f"{folder} was built for {what} {built}, this machine has {found}",
                hint=f"run {engine.builder} on this machine",
            )


def _check_kernels(folder: Path, engine: Engine) -> None:
    from edgellm.device_runtime.kernels.library import load_library
    from edgellm.device_runtime.kernels.packed_layout import VERSION

    built = engine.options.get(LAYOUT)
    if built != VERSION:
        raise BrokenArtifactError(
            f"{folder} has weights in layout {built} of edgellm's kernels, this edgellm reads "
            f"{VERSION}",
            hint=f"run {engine.builder} on this machine",
        )
    try:
        load_library()
    except EdgeLLMError as error:
        raise BrokenArtifactError(
            f"{folder} needs edgellm's kernels: {error}",
            hint=f"{error.hint}; or build without them: {engine.builder} --kernels onnxruntime",
        ) from None

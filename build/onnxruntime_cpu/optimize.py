"""Offline optimization of a lowered graph by ONNX Runtime."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

from edgellm.build.verify.check import largest_error
from edgellm.build.verify.reference import Numbers
from edgellm.core.errors import EdgeLLMError
from edgellm.core.resources import forget, require_room, require_space, utf8_path
from edgellm.device_runtime.kernels.library import register
from edgellm.device_runtime.runners.onnxruntime_graphs import (
    GraphOptions,
    load_graph,
    maps_weights,
    set_threads,
)
from edgellm.device_runtime.runners.onnxruntime_import import ort

_PACKED_TWICE = 2  # a file with prepacked weights holds them as they were, too
_SAVED = 1e-3  # relative; one graph, loaded twice


def _session(
    lowered: Path, options: ort.SessionOptions, output: Path, *, prepacks: bool
) -> ort.InferenceSession:
    """A session that saves its graph; raises `OSError` where the disk has no room for it."""
    weights = lowered.with_suffix(".data").stat().st_size
    require_space(output.parent, weights)
    try:
        with utf8_path(lowered) as source, utf8_path(output) as target:
            options.optimized_model_filepath = target
            return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors have no type of their own, and no errno
        require_room(output.with_suffix(".data"), (_PACKED_TWICE if prepacks else 1) * weights)
        if re.search(r"fail\w* (to )?writ", str(error), re.IGNORECASE):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(output)) from None
        raise


def optimize(
    lowered: Path,
    output: Path,
    threads: int,
    *,
    prepacks: bool,
    probe: Callable[[ort.InferenceSession], Numbers] | None = None,
    own_kernels: bool = False,
) -> ort.InferenceSession:
    """Let ONNX Runtime fold, fuse and prepack once; save the result and load it.

    Prepacked weights are mapped from the file when the engine is loaded, not copied.

    Args:
        lowered: a graph with its weights in `.data`; both are removed.
        output: the saved graph.
        threads: 0: all cores.
        prepacks: save prepacked weights, too.
        probe: outputs that show what a graph computes, if no other check will.
        own_kernels: it has operators of `device_runtime.kernels`.

    Raises:
        EdgeLLMError: the saved graph differs from the lowered one.
    """
    options = ort.SessionOptions()
    set_threads(options, threads)
    options.log_severity_level = 3
    if own_kernels:
        register(options)
    for key, value in (
        ("optimized_model_external_initializers_file_name", f"{output.stem}.data"),
        ("optimized_model_external_initializers_min_size_in_bytes", "1024"),
        ("save_external_prepacked_constant_initializers", "1" if prepacks else "0"),
    ):
        options.add_session_config_entry(f"session.{key}", value)
    saving = _session(lowered, options, output, prepacks=prepacks)
    expected = probe(saving) if probe is not None else {}
    del saving
    lowered.unlink()
    lowered.with_suffix(".data").unlink()
    if own_kernels and maps_weights(output):
        forget(output.with_suffix(".data"))
    saved = load_graph(
        output, GraphOptions(threads=threads, optimize=False, own_kernels=own_kernels)
    )
    if probe is not None and largest_error(probe(saved), expected) > _SAVED:
        raise EdgeLLMError(
            f"ONNX Runtime {ort.__version__} saved a {output.stem} graph that computes "
            "something else than the one it was made from",
            hint="install another onnxruntime and report this",
        )
    return saved

"""Sessions on a device; the host reads picks, and logits and features when somebody asks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort

from edgellm import contract
from edgellm.contract import DecoderSpec, DraftEngineManifest, EngineManifest
from edgellm.device_runtime.runners.onnxruntime_cuda.cuda_pass import BoundPass, Passes
from edgellm.device_runtime.runners.onnxruntime_graphs import (
    CPU,
    ROWS_GRAPH,
    load_graph,
    run_arrays,
)
from edgellm.device_runtime.session import (
    F32,
    I64,
    Bool,
    DevicePassResult,
    DraftResult,
    ImageRows,
)


class DeviceSession:
    """A base's graph on a device; see `edgellm.device_runtime.session.Session`."""

    def __init__(
        self,
        graph: ort.InferenceSession,
        rows_graph: ort.InferenceSession,
        spec: DecoderSpec,
        capacity: int,
        device: str,
    ) -> None:
        """Allocate the cache; raises `LimitError` if the device is too small."""
        self.capacity = capacity
        self._spec, self._rows_graph = spec, rows_graph
        self._passes = Passes(graph, spec, capacity, device)
        self._outputs = {
            contract.TOKEN_IDS: CPU, contract.TOP_LOGITS: CPU, contract.LOGITS: device,
            contract.HIDDEN_TAPS: device,
        }  # fmt: skip
        self._generation = 0

    def run(
        self,
        token_ids: I64,
        write_index: int,
        logits_index: I64,
        *,
        position_ids: I64 | None = None,
        tree_mask: Bool | None = None,
    ) -> DevicePassResult:
        """See `edgellm.device_runtime.session.Session.run`."""
        bound = self._passes.bind(token_ids, write_index, logits_index, {}, self._outputs)
        bound.place(write_index, position_ids, tree_mask, self._spec.sliding_window)
        bound.run()
        self._generation += 1
        ids, highest = (bound.fetch(name) for name in (contract.TOKEN_IDS, contract.TOP_LOGITS))
        assert ids is not None
        assert highest is not None
        fetch = self._fetcher(bound, self._generation, len(token_ids))
        return DevicePassResult(ids[0], highest[0], fetch)

    def _fetcher(self, bound: BoundPass, generation: int, rows: int) -> Callable[[str], F32]:
        def fetch(name: str) -> F32:
            if generation != self._generation:
                raise ValueError(f"{name} of a pass is read after the next one")
            found = bound.fetch(name)
            return np.zeros((rows, 0), np.float32) if found is None else found[0].astype(np.float32)

        return fetch

    def set_images(self, images: ImageRows) -> None:
        """See `edgellm.device_runtime.session.Session.set_images`."""
        self._passes.shown.put(images)

    def compact(self, length: int, rows: I64) -> None:
        """See `edgellm.device_runtime.session.Session.compact`."""
        self._passes.cache.compact(self._rows_graph, length, rows)

    def read_rows(self, length: int) -> np.ndarray:
        """See `edgellm.device_runtime.session.Session.read_rows`."""
        return self._passes.cache.read_rows(length)

    def write_rows(self, rows: np.ndarray) -> None:
        """See `edgellm.device_runtime.session.Session.write_rows`."""
        self._passes.cache.write_rows(rows)


class DeviceDraftSession:
    """A draft's graphs on a device; see `edgellm.device_runtime.session.DraftSession`."""

    def __init__(
        self,
        graph: ort.InferenceSession,
        fuse: ort.InferenceSession | None,
        spec: DecoderSpec,
        capacity: int,
        device: str,
    ) -> None:
        """Allocate the cache; without `fuse` the features are the hidden rows."""
        self.capacity = capacity
        self._fuse = fuse
        self._passes = Passes(graph, spec, capacity, device)

    def set_images(self, images: ImageRows) -> None:
        """See `edgellm.device_runtime.session.Session.set_images`."""
        self._passes.shown.put(images)

    def read_rows(self, length: int) -> np.ndarray:
        """See `edgellm.device_runtime.session.Session.read_rows`."""
        return self._passes.cache.read_rows(length)

    def write_rows(self, rows: np.ndarray) -> None:
        """See `edgellm.device_runtime.session.Session.write_rows`."""
        self._passes.cache.write_rows(rows)

    def fuse(self, taps: F32) -> F32:
        """See `edgellm.device_runtime.session.DraftSession.fuse`."""
        if self._fuse is None:
            return taps
        return run_arrays(self._fuse, {contract.HIDDEN_TAPS: taps[None]})[contract.DRAFT_HIDDEN][0]

    def run(
        self,
        token_ids: I64,
        hidden: F32,
        write_index: int,
        output_rows: I64,
        *,
        top_k: int,
        position_ids: I64 | None = None,
        tree_mask: Bool | None = None,
    ) -> DraftResult:
        """See `edgellm.device_runtime.session.DraftSession.run`."""
        names = contract.CANDIDATE_IDS, contract.CANDIDATE_LOG_PROBS, contract.RECYCLED_HIDDEN
        more = {
            contract.DRAFT_HIDDEN: np.asarray(hidden)[None], contract.TOP_K: np.array([top_k])
        }  # fmt: skip
        bound = self._passes.bind(
            token_ids, write_index, output_rows, more, dict.fromkeys(names, CPU)
        )
        bound.place(write_index, position_ids, tree_mask, None)
        bound.run()
        ids, log_probs, recycled = (np.asarray(bound.fetch(name))[0] for name in names)
        return DraftResult(ids, log_probs, recycled.astype(np.float32))


def open_base(engine: Path, manifest: EngineManifest, device: str) -> DeviceSession:
    """Load a base's engine."""
    threads = int(manifest.options["threads"])
    graph, rows = (
        load_graph(engine / name, threads=threads, optimize=False, device=device)
        for name in (manifest.graphs[0].path, ROWS_GRAPH)
    )
    return DeviceSession(graph, rows, manifest.decoder, manifest.max_kv_cache_capacity, device)


def open_draft(engine: Path, manifest: DraftEngineManifest, device: str) -> DeviceDraftSession:
    """Load a draft's engine."""
    threads = int(manifest.options["threads"])
    names = (manifest.graphs[0].path, manifest.fuse_graph)
    graph, *fuse = (
        load_graph(engine / name, threads=threads, optimize=False, device=device)
        for name in names if name
    )  # fmt: skip
    spec, capacity = manifest.draft.decoder, manifest.max_kv_cache_capacity
    return DeviceDraftSession(graph, fuse[0] if fuse else None, spec, capacity, device)

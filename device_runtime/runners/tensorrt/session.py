"""Passes over a TensorRT engine; see `edgellm.device_runtime.session`.

Rows are padded to a bucket's, so that a CUDA graph can be replayed; padding stands behind the
rows, where the next pass overwrites it, and no row sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from edgellm import contract
from edgellm.contract import DecoderSpec, DraftEngineManifest, EngineManifest, LimitError
from edgellm.device_runtime.runners.tensorrt.bound_pass import (
    BoundPass,
    PassRunner,
    bucket_of,
    bucket_sizes,
    fill_mask,
)
from edgellm.device_runtime.runners.tensorrt.cache import DeviceCache, DeviceImages
from edgellm.device_runtime.runners.tensorrt.device import Device, Engine
from edgellm.device_runtime.runners.tensorrt.packed_buffers import Layout, packed_bytes
from edgellm.device_runtime.session import (
    F32,
    I64,
    Bool,
    DevicePassResult,
    DraftResult,
    ImageRows,
    require_room,
)


def row_inputs(axes: int, rows: int, columns: int, outputs: int) -> Layout:
    """The inputs of a decoder's pass that vary."""
    return {
        contract.INPUT_IDS: ((1, rows), np.int64),
        contract.POSITION_IDS: ((axes, rows), np.int64),
        contract.WRITE_INDEX: ((1,), np.int64),
        contract.TREE_MASK: ((rows, columns), np.bool_),
        contract.LOGITS_INDEX: ((outputs,), np.int64),
    }


def require_candidates(top_k: int, built: int) -> None:
    """Refuse more candidates than a draft's engine was built to give; raises `LimitError`."""
    if top_k > built:
        raise LimitError(
            f"--eagleDraftTopK {top_k} exceeds the {built} candidates that the draft engine gives",
            hint="take less, or build with a larger --maxDraftTreeSize",
        )


class _Rows:
    """Writes the rows of a pass into its inputs."""

    def __init__(self, images: DeviceImages) -> None:
        self._images = images

    def place(
        self,
        bound: BoundPass,
        token_ids: I64,
        write_index: int,
        outputs: I64,
        position_ids: I64 | None,
        tree_mask: Bool | None,
    ) -> None:
        rows, inputs = len(token_ids), bound.inputs
        for name, array in (
            (contract.INPUT_IDS, token_ids[None]),
            (contract.LOGITS_INDEX, outputs),
        ):
            if name in inputs:
                inputs[name][..., : array.shape[-1]] = array
                inputs[name][..., array.shape[-1] :] = 0
        positions = np.arange(rows) + write_index if position_ids is None else position_ids
        self._images.positions.place(positions, inputs[contract.POSITION_IDS][:, :rows])
        inputs[contract.POSITION_IDS][:, rows:] = 0
        inputs[contract.WRITE_INDEX][0] = write_index
        fill_mask(inputs[contract.TREE_MASK], tree_mask, rows)


class TensorRtSession:
    """A base's engine with its KV cache."""

    def __init__(self, engine: Engine, device: Device, manifest: EngineManifest) -> None:
        """Allocate all that passes need; raises `LimitError` if the device is too small."""
        spec = manifest.decoder
        self.capacity = manifest.max_kv_cache_capacity
        self._device, self._spec = device, spec
        self._cache = DeviceCache(device, spec.kv, self.capacity)
        self._images = DeviceImages(device, engine, spec)
        self._rows = _Rows(self._images)
        self._buckets = bucket_sizes(max(manifest.max_verify_tree_size, 1))
        most, most_outputs = manifest.graphs[-1].max_rows, self._buckets[-1]
        self._widths = {
            contract.LOGITS: spec.vocab_size,
            contract.HIDDEN_TAPS: len(manifest.hidden_taps) * spec.hidden_size,
        }
        self._dtypes = {name: info.dtype for name, info in engine.tensors.items()}
        counts = {contract.LOGITS: most_outputs, contract.HIDDEN_TAPS: most}
        sizes = {
            name: count * self._widths[name] * self._dtypes[name].itemsize
            for name, count in counts.items() if name in self._dtypes
        }  # fmt: skip
        self._outputs = {name: device.allocate(size) for name, size in sizes.items()}
        self._staging: dict[str, NDArray[np.uint8]] = {}
        fixed = {name: buffer.address for name, buffer in self._outputs.items()}
        self._passes = PassRunner(
            engine, device, {**self._cache.addresses, **fixed},
            packed_bytes(row_inputs(spec.position_axes, most, most, most_outputs)),
            packed_bytes(_picks(most_outputs)),
        )  # fmt: skip
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
        rows, outputs = len(token_ids), len(logits_index)
        require_room(self.capacity, write_index, rows)
        placed, has_images = self._images.of(token_ids)
        padded = bucket_of(rows, self._buckets)
        keep = not has_images and padded <= min(self._buckets[-1], self.capacity - write_index)
        if not keep:
            padded = rows
        heads = bucket_of(outputs, self._buckets) if keep else outputs
        layout = row_inputs(self._spec.position_axes, padded, padded, heads)
        bound = self._passes.bind(layout, _picks(heads), placed, keep=keep)
        self._rows.place(bound, token_ids, write_index, logits_index, position_ids, tree_mask)
        bound.run()
        self._cache.settled()
        self._generation += 1
        counts = {contract.LOGITS: outputs, contract.HIDDEN_TAPS: rows}
        return DevicePassResult(
            bound.outputs[contract.TOKEN_IDS][0, :outputs].copy(),
            bound.outputs[contract.TOP_LOGITS][0, :outputs].copy(),
            self._fetcher(self._generation, counts),
        )

    def set_images(self, images: ImageRows) -> None:
        """See `edgellm.device_runtime.session.Session.set_images`."""
        self._images.set_images(images)

    def compact(self, length: int, rows: I64) -> None:
        """See `edgellm.device_runtime.session.Session.compact`."""
        self._cache.compact(length, rows)

    def read_rows(self, length: int) -> NDArray:
        """See `edgellm.device_runtime.session.Session.read_rows`."""
        return self._cache.read_rows(length)

    def write_rows(self, rows: NDArray) -> None:
        """See `edgellm.device_runtime.session.Session.write_rows`."""
        self._cache.write_rows(rows)

    def _fetcher(self, generation: int, counts: Mapping[str, int]) -> Callable[[str], F32]:
        def fetch(name: str) -> F32:
            if generation != self._generation:
                raise ValueError(f"{name} of a pass is read after the next one")
            if name not in self._outputs:
                return np.zeros((counts[name], 0), np.float32)
            dtype, shape = self._dtypes[name], (counts[name], self._widths[name])
            if name not in self._staging:
                self._staging[name] = self._device.pinned(self._outputs[name].num_bytes)
            host = self._staging[name][: shape[0] * shape[1] * dtype.itemsize]
            self._device.download(host, self._outputs[name].address)
            self._device.synchronize()
            return host.view(dtype).reshape(shape).astype(np.float32)

        return fetch


def _picks(outputs: int) -> Layout:
    return {
        contract.TOKEN_IDS: ((1, outputs), np.int64),
        contract.TOP_LOGITS: ((1, outputs), np.float32),
    }


class TensorRtDraftSession:
    """A draft's engine with its KV cache."""

    def __init__(
        self,
        engine: Engine,
        fuse: Engine | None,
        device: Device,
        manifest: DraftEngineManifest,
    ) -> None:
        """Allocate; without `fuse` the features are the hidden rows."""
        spec = manifest.draft.decoder
        self.capacity = manifest.max_kv_cache_capacity
        self._device, self._spec = device, spec
        self._cache = DeviceCache(device, spec.kv, self.capacity)
        self._images = DeviceImages(device, engine, spec)
        self._rows = _Rows(self._images)
        self._most_columns = manifest.max_draft_tree_size
        self._buckets = bucket_sizes(self._most_columns)
        self._dtype = engine.tensors[contract.DRAFT_HIDDEN].dtype
        candidates = engine.tensors[contract.CANDIDATE_IDS].shape[-1]
        self._picked = (candidates, spec.hidden_size)
        most = manifest.graphs[-1].max_rows
        self._passes = PassRunner(
            engine, device, self._cache.addresses,
            packed_bytes(self._inputs(most, most, self._most_columns)),
            packed_bytes(self._picks(self._most_columns)),
        )  # fmt: skip
        self._fusing = None
        if fuse is not None:
            width = len(manifest.draft.hidden_taps) * manifest.draft.base_hidden_size
            self._fusing = _Fuse(fuse, device, most, width, spec, self._dtype, self._buckets)

    def set_images(self, images: ImageRows) -> None:
        """See `edgellm.device_runtime.session.Session.set_images`."""
        self._images.set_images(images)

    def read_rows(self, length: int) -> NDArray:
        """See `edgellm.device_runtime.session.Session.read_rows`."""
        return self._cache.read_rows(length)

    def write_rows(self, rows: NDArray) -> None:
        """See `edgellm.device_runtime.session.Session.write_rows`."""
        self._cache.write_rows(rows)

    def fuse(self, taps: F32) -> F32:
        """See `edgellm.device_runtime.session.DraftSession.fuse`."""
        return taps if self._fusing is None else self._fusing.run(taps)

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
        rows, outputs = len(token_ids), len(output_rows)
        require_candidates(top_k, self._picked[0])
        require_room(self.capacity, write_index, rows)
        placed, has_images = self._images.of(token_ids)
        columns = rows if tree_mask is None else tree_mask.shape[1]
        sizes = None if has_images else self._padded(rows, columns, outputs, write_index, tree_mask)
        padded, wide, heads = sizes or (rows, columns, outputs)
        layout, picks = self._inputs(padded, wide, heads), self._picks(heads)
        bound = self._passes.bind(layout, picks, placed, keep=sizes is not None)
        self._rows.place(bound, token_ids, write_index, output_rows, position_ids, tree_mask)
        bound.inputs[contract.DRAFT_HIDDEN][0, :rows] = hidden
        bound.inputs[contract.DRAFT_HIDDEN][0, rows:] = 0
        bound.run()
        found = bound.outputs
        return DraftResult(
            found[contract.CANDIDATE_IDS][0, :outputs, :top_k].copy(),
            found[contract.CANDIDATE_LOG_PROBS][0, :outputs, :top_k].copy(),
            found[contract.RECYCLED_HIDDEN][0, :outputs].astype(np.float32),
        )

    def _padded(
        self, rows: int, columns: int, outputs: int, write_index: int, tree_mask: Bool | None
    ) -> tuple[int, int, int] | None:
        """Rows, mask columns and output rows of a bucket; None where none fits.

        A mask may be wider than asked for, by rows before that all are seen.
        """
        padded = bucket_of(rows, self._buckets)
        wide = columns + padded - rows
        if tree_mask is not None:
            wide = bucket_of(wide, self._buckets)
        end = write_index + padded
        if padded > self._most_columns or end > self.capacity:
            return None
        if wide > min(self._most_columns, end):
            return None
        return padded, wide, bucket_of(outputs, self._buckets)

    def _inputs(self, rows: int, columns: int, outputs: int) -> Layout:
        return {
            **row_inputs(self._spec.position_axes, rows, columns, outputs),
            contract.DRAFT_HIDDEN: ((1, rows, self._spec.hidden_size), self._dtype),
        }

    def _picks(self, outputs: int) -> Layout:
        candidates, hidden = self._picked
        return {
            contract.CANDIDATE_IDS: ((1, outputs, candidates), np.int64),
            contract.CANDIDATE_LOG_PROBS: ((1, outputs, candidates), np.float32),
            contract.RECYCLED_HIDDEN: ((1, outputs, hidden), self._dtype),
        }


class _Fuse:
    """The engine that makes a draft's hidden rows of a base's features."""

    def __init__(
        self,
        engine: Engine,
        device: Device,
        most: int,
        width: int,
        spec: DecoderSpec,
        dtype: np.dtype,
        buckets: list[int],
    ) -> None:
        self._width, self._hidden, self._dtype = width, spec.hidden_size, dtype
        self._buckets = buckets
        self._passes = PassRunner(
            engine, device, {}, packed_bytes(self._inputs(most)), packed_bytes(self._picks(most))
        )

    def run(self, taps: F32) -> F32:
        rows = len(taps)
        padded = bucket_of(rows, self._buckets)
        keep = padded <= self._buckets[-1]
        bound = self._passes.bind(self._inputs(padded), self._picks(padded), {}, keep=keep)
        bound.inputs[contract.HIDDEN_TAPS][0, :rows] = taps
        bound.inputs[contract.HIDDEN_TAPS][0, rows:] = 0
        bound.run()
        return bound.outputs[contract.DRAFT_HIDDEN][0, :rows].astype(np.float32)

    def _inputs(self, rows: int) -> Layout:
        return {contract.HIDDEN_TAPS: ((1, rows, self._width), self._dtype)}

    def _picks(self, rows: int) -> Layout:
        return {contract.DRAFT_HIDDEN: ((1, rows, self._hidden), self._dtype)}

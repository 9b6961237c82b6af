"""What a session asks of a GPU and of a loaded engine; `cuda.py` and `runtime.py` answer it.

All work goes to one stream and runs in the order in which it was asked for. The host waits only
in `synchronize`. The stream does not synchronize with the legacy stream, which libraries may use:
`synchronize_all` waits for their work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.device_runtime.kernels.triton.catalog import Variant

ALIGNMENT = 256  # bytes; of tensors on the device
ADDRESSED_SUFFIX = ".weights"  # of the file with weights by address, next to a plan


class Buffer(Protocol):
    """Device memory, which lives as long as the object."""

    @property
    def address(self) -> int:
        """Where it begins, a multiple of `ALIGNMENT`."""
        ...

    @property
    def num_bytes(self) -> int:
        """Its size."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Planes:
    """A KV cache: planes of rows, one for each layer, part and head."""

    address: int
    count: int
    rows: int  # of a plane
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of all planes."""
        return self.count * self.rows * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRows:
    """Rows for a KV cache: a tensor [planes, count, row_bytes] for each layer and part."""

    address: int  # of the first tensor
    stride: int  # bytes from a tensor to the next
    planes: int  # of a tensor, one for each head
    write_index_address: int  # int64 [1], the row of a plane that the first goes to


class Device(Protocol):
    """A GPU with a stream."""

    @property
    def stream(self) -> int:
        """The stream's handle, of the CUDA driver."""
        ...

    def current(self) -> AbstractContextManager[None]:
        """What makes the GPU the calling thread's, for calls of libraries; may be nested.

        Raises:
            EdgeLLMError: a call of the driver fails in it.
        """
        ...

    def allocate(self, num_bytes: int) -> Buffer:
        """Zeroed device memory.

        Raises:
            LimitError: there is not so much.
        """
        ...

    def free_bytes(self) -> int:
        """Unused device memory."""
        ...

    def pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        """Host memory that copies to and from the device may go on reading while Python runs."""
        ...

    def upload(self, address: int, host: NDArray[Any]) -> None:
        """Copy a piece of `pinned` memory, contiguous, to the device."""
        ...

    def download(self, host: NDArray[Any], address: int) -> None:
        """Copy from the device into a piece of `pinned` memory, contiguous."""
        ...

    def move_rows(self, planes: Planes, rows_address: int, count: int, first: int) -> None:
        """In every plane: row first + i takes what row first + rows[i] holds, i ascending.

        Args:
            planes: of which `row_bytes` is a multiple of 16.
            rows_address: int32 [count], ascending, rows[i] >= i.
            count: of rows.
            first: row.
        """
        ...

    def append_rows(self, planes: Planes, rows: NewRows, count: int) -> None:
        """In every plane: row write_index + i takes new row i.

        Args:
            planes: of which `row_bytes` is a multiple of 16.
            rows: which the stream has computed by then.
            count: of rows.
        """
        ...

    def gather_rows(
        self, target: int, source: int, rows: NDArray[np.int64], row_bytes: int
    ) -> None:
        """Row i of one matrix takes row rows[i] of another; neither overlaps the other.

        Args:
            target: address.
            source: address.
            rows: at most 16384, or such as follow one another.
            row_bytes: a multiple of 16.
        """
        ...

    def gather_rows_at(
        self, target: int, source: int, rows_address: int, count: int, row_bytes: int
    ) -> None:
        """As `gather_rows`, by int32 rows that lie on the device."""
        ...

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copy within the device."""
        ...

    def launch(self, kernel: Variant, grid: tuple[int, int, int], arguments: Sequence[int]) -> None:
        """Run one of edgellm's compiled kernels.

        Args:
            kernel: of `catalog.variants`.
            grid: blocks.
            arguments: addresses and sizes, as the kernel's signature has them.

        Raises:
            EdgeLLMError: it was not compiled for this GPU; the first time only.
        """
        ...

    def save_rows(self, planes: Planes, length: int, first: int = 0) -> NDArray[np.uint8]:
        """Rows of every plane from `first` on, [count, length * row_bytes]; waits for them."""
        ...

    def load_rows(self, planes: Planes, rows: NDArray[np.uint8], first: int = 0) -> None:
        """Write what `save_rows` gave; waits until it is there."""
        ...

    def copy_rows(self, planes: Planes, source: int, target: int, count: int) -> None:
        """In every plane: `count` rows from `target` on take those from `source` on."""
        ...

    def synchronize(self) -> None:
        """Wait for everything that was asked for."""
        ...

    def synchronize_all(self) -> None:
        """Wait for all work on the GPU, also for that of libraries on streams of their own."""
        ...

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """Record what `enqueue` asks for, as a CUDA graph; the result asks for all of it again.

        What cannot be recorded is asked for piece by piece, and its reason is logged once. Other
        work is still recorded.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """An input or output of an engine."""

    name: str
    is_input: bool
    dtype: np.dtype
    shape: tuple[int, ...]  # -1: varies


class Context(Protocol):
    """What runs an engine with one profile; inputs keep their shapes and addresses."""

    def set_shape(self, name: str, shape: Sequence[int]) -> None:
        """Of an input whose shape varies."""
        ...

    def output_shape(self, name: str) -> tuple[int, ...]:
        """Of an output, once all inputs have theirs."""
        ...

    def bind(self, name: str, address: int) -> None:
        """Where a tensor lies on the device."""
        ...

    def enqueue(self) -> None:
        """Ask the device's stream for a pass."""
        ...

    def is_capturable(self) -> bool:
        """Whether a pass can be recorded as a CUDA graph."""
        ...


class Weights(Protocol):
    """Weights on the device that kernels know by address."""

    @property
    def addresses(self) -> Mapping[str, int]:
        """Of the inputs of an engine that takes them."""
        ...


class CompiledEngine(Protocol):
    """A loaded engine; its weights lie on the device."""

    @property
    def weights(self) -> Weights | None:
        """Weights that its kernels know by address; None: there are none."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """By name."""
        ...

    @property
    def num_profiles(self) -> int:
        """Kinds of passes."""
        ...

    def shape_range(self, name: str, profile: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The least and the largest shape of an input."""
        ...

    def scratch_bytes(self, profile: int) -> int:
        """Device memory that a context of the profile needs while it runs."""
        ...

    def new_context(self, profile: int, scratch: Buffer, *, is_recorded: bool = False) -> Context:
        """A context that computes in `scratch`, which others may use between its passes.

        Args:
            profile: kind of passes.
            scratch: of `scratch_bytes`.
            is_recorded: its passes have one shape, and may be recorded as a CUDA graph.
        """
        ...

"""Passes of an engine with fixed shapes: bound once, recorded as CUDA graphs if they recur."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.errors import LimitError
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import CompiledEngine, Context, Device
from edgellm.device_runtime.runners.tensorrt.packed_buffers import Block, Layout, Packed, Shape

Placed = Mapping[str, tuple[Shape, int]]  # tensors with shape and address


def bucket_sizes(maximum: int) -> list[int]:
    """Padded sizes of passes, so few graphs serve all trees of up to `maximum` tokens."""
    small = [size for size in (1, 2, 4, 8) if size < maximum]
    return [*small, *range(16, maximum, 8), maximum]


def bucket_of(size: int, buckets: list[int]) -> int:
    """The smallest bucket of at least `size`, or `size` if there is none."""
    return next((bucket for bucket in buckets if bucket >= size), size)


def fill_mask(out: NDArray[np.bool_], mask: NDArray[np.bool_] | None, rows: int) -> None:
    """Write a padded attention mask.

    Args:
        out: bool [S', M'], the first `rows` rows are tokens.
        mask: bool [rows, M] of the last columns before the padding's; all tokens attend to
            earlier columns. None: causal.
        rows: number of tokens.
    """
    padded, columns = out.shape
    if mask is None:
        out[:] = np.tri(padded, columns, columns - padded, dtype=np.bool_)
        return
    extra = padded - rows
    lead = columns - mask.shape[1] - extra
    out[:] = False
    out[:rows, :lead] = True
    out[:rows, lead : lead + mask.shape[1]] = mask
    # An empty mask row would give NaN, so padding attends to itself.
    np.fill_diagonal(out[rows:, columns - extra :], val=True)


class BoundPass:
    """A context with bound shapes and addresses; the second run records a CUDA graph."""

    def __init__(
        self,
        *,
        context: Context,
        device: Device,
        arguments: tuple[Block, Packed],
        picks: tuple[Block, Packed],
        after: Callable[[], None],
        is_kept: bool,
        fetches: bool,
    ) -> None:
        """Bind.

        Args:
            context: of these shapes.
            device: that computes.
            arguments: inputs to upload.
            picks: outputs to download.
            after: enqueues the work after the engine.
            is_kept: the pass runs again, and has the context exclusively.
            fetches: outputs are downloaded in every run; otherwise by `fetch`.
        """
        self._context, self._device, self.fetches = context, device, fetches
        self._arguments, self._picks, self._after = arguments, picks, after
        self._may_capture = is_kept and context.is_capturable()
        self._was_run = False
        self._replay: Callable[[], None] | None = None
        self.inputs: Mapping[str, NDArray] = arguments[1].arrays
        self.outputs: Mapping[str, NDArray] = picks[1].arrays
        self.pick_addresses: Mapping[str, int] = picks[1].addresses

    def run(self, *, waits: bool) -> None:
        """Run the pass; if it waits, `outputs` are valid until the runner's next pass."""
        with self._device.current():
            if self._replay is None and self._may_capture and self._was_run:
                self._replay = self._device.capture(self._enqueue)
            (self._replay or self._enqueue)()  # the first run prepares what cannot be recorded
            self._was_run = True
            if waits:
                self._device.synchronize()

    def _enqueue(self) -> None:
        if self.inputs:
            self._arguments[0].upload(self._arguments[1])
        self._context.enqueue()
        self._after()
        if self.fetches:
            self.fetch()

    def fetch(self) -> None:
        """Enqueue the download of `outputs`."""
        self._picks[0].download(self._picks[1])


@dataclass(frozen=True, slots=True)
class PlacedPass:
    """A pass with all inputs and outputs on the device."""

    enqueue: Callable[[], None]
    may_capture: bool  # whether a CUDA graph can contain it


class PassRunner:
    """Binds passes of one engine; all of them share scratch memory, inputs and outputs."""

    def __init__(
        self,
        *,
        engine: CompiledEngine,
        device: Device,
        fixed: Mapping[str, int],
        arguments_bytes: int,
        picks_bytes: int,
        after: Callable[[int, int], None],
    ) -> None:
        """Allocate.

        Args:
            engine: the loaded engine.
            device: its device.
            fixed: addresses of tensors that are the same in all passes.
            arguments_bytes: maximum `packed_bytes` of varying inputs.
            picks_bytes: maximum `packed_bytes` of outputs that the host always reads.
            after: enqueues the work after a pass, given its tokens and the address of its write
                index.
        """
        self._engine, self._device, self._fixed = engine, device, dict(fixed)
        self._after = after
        profiles = range(engine.num_profiles)
        # Passes never run concurrently, so contexts share scratch memory.
        self._scratch = device.allocate(max(engine.scratch_bytes(each) for each in profiles))
        self._arguments = Block(device, arguments_bytes)
        self._picks = Block(device, picks_bytes)
        self._kept: dict[tuple[Shape, ...], BoundPass] = {}
        self._contexts: dict[int, Context] = {}  # by profile; for passes that are not cached

    def prepare(self) -> None:
        """Create the contexts of uncached passes now, not during a request."""
        for profile in range(self._engine.num_profiles):
            self._context(profile, keep=False)

    def place(self, rows: int, placed: Placed, outputs: Mapping[str, int]) -> PlacedPass:
        """A pass without host inputs and outputs.

        Args:
            rows: number of tokens.
            placed: all varying inputs.
            outputs: addresses of outputs that differ from other passes.

        Raises:
            LimitError: as `bind`.
        """
        shapes = {name: shape for name, (shape, _) in placed.items()}
        context = self._context(self._profile(shapes), keep=True)
        addresses = {name: address for name, (_, address) in placed.items()}
        self._bind(context, shapes, {**addresses, **outputs})
        write_index = addresses.get(graph_io.WRITE_INDEX, 0)  # of a pass of one sequence

        def enqueue() -> None:
            context.enqueue()
            self._after(rows, write_index)

        return PlacedPass(enqueue, may_capture=context.is_capturable())

    def bind(
        self,
        inputs: Layout,
        picks: Layout,
        placed: Placed,
        weights: Callable[[], Placed] = dict,
        *,
        keep: bool,
        fetches: bool,
    ) -> BoundPass:
        """A pass with these shapes.

        Args:
            inputs: varying inputs from the host.
            picks: outputs that the host always reads.
            placed: further inputs at other addresses.
            weights: inputs whose shapes follow from the others.
            keep: cache the pass with its own context. The addresses of `placed` must then be
                constant.
            fetches: the host reads `picks` of every run.

        Raises:
            LimitError: the engine has no profile for the shapes.
        """
        taken = {name: at for name, at in inputs.items() if name in self._engine.tensors}
        shapes = {name: shape for name, (shape, _) in taken.items()}
        shapes |= {name: shape for name, (shape, _) in placed.items()}
        key = (*shapes.values(), *(shape for shape, _ in picks.values()), (fetches,))
        if keep and key in self._kept:
            return self._kept[key]
        placed = {**placed, **weights()}
        shapes |= {name: shape for name, (shape, _) in placed.items()}
        context = self._context(self._profile(shapes), keep=keep)
        packed, picked = self._arguments.pack(taken), self._picks.pack(picks)
        places = {name: address for name, (_, address) in placed.items()}
        self._bind(context, shapes, {**places, **packed.addresses, **picked.addresses})
        bound = BoundPass(
            context=context,
            device=self._device,
            arguments=(self._arguments, packed),
            picks=(self._picks, picked),
            after=partial(self._append, packed),
            is_kept=keep,
            fetches=fetches and bool(picks),
        )
        if keep:
            self._kept[key] = bound
        return bound

    def pick_addresses(self, picks: Layout) -> Mapping[str, int]:
        """Device addresses of these outputs."""
        return self._picks.pack(picks).addresses

    def _bind(
        self, context: Context, shapes: Mapping[str, Shape], addresses: Mapping[str, int]
    ) -> None:
        for name, shape in shapes.items():
            if -1 in self._engine.tensors[name].shape:
                context.set_shape(name, shape)
        for name, address in {**self._fixed, **addresses}.items():
            context.bind(name, address)

    def _append(self, inputs: Packed) -> None:
        if graph_io.WRITE_INDEX in inputs.addresses:
            rows = inputs.arrays[graph_io.INPUT_IDS].shape[-1]
            self._after(rows, inputs.addresses[graph_io.WRITE_INDEX])

    def _context(self, profile: int, *, keep: bool) -> Context:
        # A graph depends on its context's shapes, so a context is recorded at most once.
        if keep:
            return self._engine.new_context(profile, self._scratch, is_recorded=True)
        if profile not in self._contexts:
            self._contexts[profile] = self._engine.new_context(profile, self._scratch)
        return self._contexts[profile]

    def _profile(self, shapes: Mapping[str, Shape]) -> int:
        """The first profile that takes the shapes; profiles are in ascending order."""
        for profile in range(self._engine.num_profiles):
            if all(self._takes(profile, name, shape) for name, shape in shapes.items()):
                return profile
        shown = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise LimitError(
            f"the engine supports no pass of {shown}",
            hint="build it with a larger --maxInputLen, --maxVerifyTreeSize or --maxDraftTreeSize",
        )

    def _takes(self, profile: int, name: str, shape: Shape) -> bool:
        least, maximum = self._engine.shape_range(name, profile)
        return len(shape) == len(least) and all(
            low <= size <= high for low, size, high in zip(least, shape, maximum, strict=True)
        )

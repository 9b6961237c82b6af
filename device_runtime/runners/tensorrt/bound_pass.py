"""Passes of an engine with fixed shapes: bound once, recorded as CUDA graphs where they recur."""

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

Placed = Mapping[str, tuple[Shape, int]]  # tensors with a shape and an address of their own


def bucket_sizes(maximum: int) -> list[int]:
    """Rows that passes are padded to, so that few graphs serve all trees up to `maximum` rows."""
    small = [size for size in (1, 2, 4, 8) if size < maximum]
    return [*small, *range(16, maximum, 8), maximum]


def bucket_of(size: int, buckets: list[int]) -> int:
    """The least bucket that takes `size`, or `size` itself if none does."""
    return next((bucket for bucket in buckets if bucket >= size), size)


def fill_mask(out: NDArray[np.bool_], mask: NDArray[np.bool_] | None, rows: int) -> None:
    """Write what rows see, among padding.

    Args:
        out: bool [S', M'], its first `rows` rows are real.
        mask: bool [rows, M] of the last columns but for the padding's; those before are seen.
            None is causal.
        rows: real ones.
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
    # A row that sees nothing would be not a number; one of padding sees itself.
    np.fill_diagonal(out[rows:, columns - extra :], val=True)


class BoundPass:
    """A context with shapes and addresses; after its second run a graph."""

    def __init__(
        self,
        context: Context,
        device: Device,
        arguments: tuple[Block, Packed],
        picks: tuple[Block, Packed],
        after: Callable[[], None],
        *,
        is_kept: bool,
        fetches: bool,
    ) -> None:
        """Bind.

        Args:
            context: of these shapes.
            device: that computes.
            arguments: what goes there before.
            picks: what comes back.
            after: asks for what follows the engine on the device.
            is_kept: it runs again with these shapes, and nobody else has the context.
            fetches: what comes back does so every time; else when `fetch` is called.
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
        """Compute; if it waits, `outputs` hold what came of it until the session's next pass."""
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
        """Ask for `outputs`."""
        self._picks[0].download(self._picks[1])


@dataclass(frozen=True, slots=True)
class PlacedPass:
    """A pass over what lies on the device."""

    enqueue: Callable[[], None]
    may_capture: bool  # as a part of a CUDA graph


class PassRunner:
    """Binds passes of one engine; all of them share scratch memory, inputs and outputs."""

    def __init__(
        self,
        engine: CompiledEngine,
        device: Device,
        fixed: Mapping[str, int],
        arguments_bytes: int,
        picks_bytes: int,
        after: Callable[[int, int], None],
    ) -> None:
        """Allocate.

        Args:
            engine: loaded.
            device: where it was loaded.
            fixed: addresses of the tensors that are the same for all passes.
            arguments_bytes: of the inputs that vary, `packed_bytes` of the largest.
            picks_bytes: of the outputs that the host always reads.
            after: asks for what follows a pass on the device, by its rows and the address of its
                write index.
        """
        self._engine, self._device, self._fixed = engine, device, dict(fixed)
        self._after = after
        profiles = range(engine.num_profiles)
        # No pass runs beside another, so contexts take turns in one piece of memory.
        self._scratch = device.allocate(max(engine.scratch_bytes(each) for each in profiles))
        self._arguments = Block(device, arguments_bytes)
        self._picks = Block(device, picks_bytes)
        self._kept: dict[tuple[Shape, ...], BoundPass] = {}
        self._contexts: dict[int, Context] = {}  # by profile; of passes that are not kept

    def prepare(self) -> None:
        """Make the contexts of passes that are not kept, which are made in an answer else."""
        for profile in range(self._engine.num_profiles):
            self._context(profile, keep=False)

    def place(self, rows: int, placed: Placed, outputs: Mapping[str, int]) -> PlacedPass:
        """A pass that the host gives nothing and gets nothing from.

        Args:
            rows: of the pass.
            placed: all inputs that vary.
            outputs: addresses, of those that do not lie where other passes have them.

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
            inputs: that vary.
            picks: outputs that the host always reads.
            placed: further inputs, which lie somewhere else.
            weights: those whose shapes follow from those of the others.
            keep: it will be run again; it gets a context of its own. What is not kept may have
                its further inputs at other addresses.
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
        blocks = (self._arguments, packed), (self._picks, picked)
        after = partial(self._append, packed)
        bound = BoundPass(
            context, self._device, *blocks, after, is_kept=keep, fetches=fetches and bool(picks)
        )
        if keep:
            self._kept[key] = bound
        return bound

    def pick_addresses(self, picks: Layout) -> Mapping[str, int]:
        """Where passes with these outputs leave them on the device."""
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
        # A graph holds on to its context's shapes, so a context is recorded once at most.
        if keep:
            return self._engine.new_context(profile, self._scratch)
        if profile not in self._contexts:
            self._contexts[profile] = self._engine.new_context(profile, self._scratch)
        return self._contexts[profile]

    def _profile(self, shapes: Mapping[str, Shape]) -> int:
        """The first that takes the shapes: they ascend."""
        for profile in range(self._engine.num_profiles):
            if all(self._takes(profile, name, shape) for name, shape in shapes.items()):
                return profile
        shown = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise LimitError(
            f"the engine takes no pass of {shown}",
            hint="build it with a larger --maxInputLen, --maxVerifyTreeSize or --maxDraftTreeSize",
        )

    def _takes(self, profile: int, name: str, shape: Shape) -> bool:
        least, maximum = self._engine.shape_range(name, profile)
        return len(shape) == len(least) and all(
            low <= size <= high for low, size, high in zip(least, shape, maximum, strict=True)
        )

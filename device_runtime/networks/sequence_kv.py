"""KV caches of several sequences in one network.

If the runner's sequences share blocks, each has its own cache, and switching is free of cost.
Otherwise all sequences use one cache in turn, and the previous one is copied to the host.
Sequences are also copied to the host when no block is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.errors import LimitError
from edgellm.device_runtime.arrays import (
    ImageRows,
    LoadedAdapter,
    RowKey,
)
from edgellm.device_runtime.networks.recurrent_state_pool import StateMemory
from edgellm.device_runtime.runners import Cache, Outputs, Runner, SharedRunner, require_cache
from edgellm.device_runtime.runners.device_speculation import Asked


class Context:
    """The KV cache of one sequence, with the keys of its positions."""

    def __init__(self) -> None:
        self.keys: list[RowKey] = []  # of the first positions
        self.written: list[RowKey] = []  # by the last pass
        self.num_rows = 0  # positions to keep
        self.images: ImageRows | None = None  # of the prompt
        self.adapter: LoadedAdapter | None = None  # of its tokens
        self.cache: Cache | None = None  # None: swapped out or empty
        self.saved: NDArray[Any] | None = None  # host copy while it is swapped out
        # Minimum prefix length, other than 0, that can be continued: windows free earlier positions
        self.least_rows = 0
        self.memory: StateMemory | None = None  # states of recurrent layers
        self.is_spare = False  # not continued: any sequence may take the cache

    def cut(self, length: int) -> None:
        """Truncate to the first `length` positions."""
        del self.keys[length:]
        self.num_rows = min(self.num_rows, length)


class Begun(NamedTuple):
    """Where the device is about to write."""

    start: tuple[int, int]  # number of positions before, and the first position id
    cache: Cache


class Contexts:
    """All contexts of a network that have caches."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._only = runner, require_cache(runner)
        self._shared = runner if isinstance(runner, SharedRunner) else None
        # Maximum sequences of a pass
        self.max_together = self._shared.num_sequences if self._shared is not None else 1
        # Maximum tokens of a sequence in a pass, if windows limit its blocks; 0: no limit
        self.pass_rows = self._shared.pass_rows if self._shared is not None else 0
        self._is_begun = False
        self._resident: list[Context] = []  # with caches; the least recently used first
        # Called before others are swapped out; frees blocks of finished sequences, if any.
        self.forget_one: Callable[[], bool] = lambda: False

    @property
    def page_rows(self) -> int:
        """Positions of a KV block."""
        return self._shared.page_rows if self._shared is not None else 1

    @property
    def free_rows(self) -> int | None:
        """Positions in free blocks; None without blocks."""
        return self._shared.free_rows if self._shared is not None else None

    def free_rows_without(self, contexts: Iterable[Context]) -> int:
        """Positions in free blocks if these contexts were freed."""
        assert self._shared is not None
        return self._shared.free_rows_without(
            [one.cache for one in contexts if one.cache is not None]
        )

    def admit(self, context: Context) -> Cache:
        """Swap in a context, and return its cache."""
        return self._bring_in(context, [context])

    def reserve(self, parts: Sequence[tuple[Context, int, int]]) -> None:
        """Allocate positions for a pass of several contexts.

        Args:
            parts: contexts, positions to keep of each, and new tokens.

        Raises:
            LimitError: blocks do not suffice, even with all others swapped out.
        """
        staying: tuple[Context, ...]
        staying, _, _ = zip(*parts, strict=True)
        for context, begin, rows in parts:
            cache = self._bring_in(context, staying)
            if self._shared is not None:
                self._with_room(staying, self._shared.reserve, cache, begin, rows)
                if self.pass_rows:
                    context.least_rows = self._shared.least_rows(cache)
            context.num_rows = begin

    def ask(
        self, parts: Sequence[tuple[Context, dict[str, NDArray[Any]]]]
    ) -> list[tuple[Outputs, int | None]]:
        """As `run`, without waiting; see `Asked`."""
        assert isinstance(self._runner, Asked)
        return self._runner.ask_many([(_cache(one), given) for one, given in parts])

    def run(self, parts: Sequence[tuple[Context, dict[str, NDArray[Any]]]]) -> list[Outputs]:
        """One pass for all, or one for each; results must be used before the next pass.

        Args:
            parts: contexts with allocated positions, and inputs by name.
        """
        if self._shared is None and len(parts) == 1:
            return [self._runner.run(parts[0][1])]
        if self._shared is not None:
            return self._shared.run_many([(_cache(one), given) for one, given in parts])
        found: list[Outputs] = []
        for context, inputs in parts:
            self.admit(context)
            outputs = self._runner.run(inputs)
            found.append({name: np.array(outputs[name]) for name in outputs})
            context.num_rows += inputs[graph_io.INPUT_IDS].shape[1]
        return found

    def write_rows(self, context: Context, rows: NDArray[Any], least_rows: int = 0) -> None:
        """See `runners.Cache` and `least_rows`; others may be swapped out."""
        self._bring_in(context, [context])
        context.num_rows, context.least_rows = 0, least_rows
        self._write(context, rows, [context])
        context.num_rows = rows.shape[-2]

    def _write(self, context: Context, rows: NDArray[Any], staying: Sequence[Context]) -> None:
        cache = _cache(context)
        if self._shared is None:
            cache.write_rows(rows)
            return
        self._with_room(staying, self._shared.write_rows, cache, rows, context.least_rows)
        context.least_rows = self._shared.least_rows(cache)

    def fork(self, context: Context) -> Context:
        """Copy a context, sharing its positions; both may be extended."""
        new = Context()
        new.keys, new.num_rows = list(context.keys), context.num_rows
        new.least_rows = context.least_rows
        if self._shared is not None and context.cache is not None:
            new.cache = self._shared.fork(context.cache)
            self._resident.append(new)
        elif context.cache is not None:
            self._evict(context)
            new.cache = self._only
            self._resident.append(new)
        else:
            new.saved = context.saved
        return new

    def close(self, context: Context) -> None:
        """Free a context."""
        if context in self._resident:
            self._resident.remove(context)
            if self._shared is not None and context.cache is not None:
                self._shared.release(context.cache)
        context.cache = context.saved = context.memory = None
        context.keys, context.num_rows, context.least_rows = [], 0, 0

    def save(self, context: Context) -> None:
        """Swap out a context, so that others can use its memory."""
        if context in self._resident:
            self._evict(context)

    def _bring_in(self, context: Context, staying: Sequence[Context]) -> Cache:
        if context.cache is not None:
            if self._resident[-1] is not context:
                self._resident.remove(context)
                self._resident.append(context)
            return context.cache
        if self._shared is None:
            for other in list(self._resident):
                self._evict(other)
        cache = context.cache = self._new_cache()
        self._resident.append(context)
        if (rows := context.saved) is not None:
            self._write(context, rows, [*staying, context])
            context.saved = None
        return cache

    def _new_cache(self) -> Cache:
        if self._shared is None or not self._is_begun:
            self._is_begun = True  # earlier timing passes have left data in the first cache
            return self._only
        return self._shared.new_cache()

    def _with_room(
        self, staying: Sequence[Context], action: Callable[..., None], *arguments: Any
    ) -> None:
        """Swap out others until blocks suffice for `action`."""
        try:
            return action(*arguments)
        except LimitError:
            if self._shared is None:
                raise
            if not self.forget_one():
                others = [one for one in self._resident if one not in staying]
                if not others:
                    raise
                self._evict(others[0])
        return self._with_room(staying, action, *arguments)

    def _evict(self, context: Context) -> None:
        assert context.cache is not None
        if context.num_rows:
            context.saved = context.cache.read_rows(context.num_rows)
        self._resident.remove(context)
        if self._shared is not None:
            self._shared.release(context.cache)
        context.cache = None


def _cache(context: Context) -> Cache:
    assert context.cache is not None
    return context.cache

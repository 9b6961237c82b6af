"""The rows of several sequences in the caches of one network.

On a runner whose sequences share pages, each has a cache of its own, and to turn from one to
another costs nothing. On any other all take turns with the one cache: the rows of the one before
are copied out. They are, too, where no page is free.
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
    """The rows of one sequence, and what they stand for."""

    def __init__(self) -> None:
        self.keys: list[RowKey] = []  # of the rows from the first on that are known
        self.written: list[RowKey] = []  # by the last pass
        self.num_rows = 0  # that are to be kept
        self.images: ImageRows | None = None  # of the prompt
        self.adapter: LoadedAdapter | None = None  # that its rows are computed with
        self.cache: Cache | None = None  # that holds the rows
        self.saved: NDArray[Any] | None = None  # a copy of them, while nothing does
        # The fewest of its rows that can be gone on from, but for none: windows have no more
        self.least_rows = 0
        self.memory: StateMemory | None = None  # what recurrent layers keep of them
        self.is_spare = False  # no answer goes on behind the rows; whoever comes may have them

    def cut(self, length: int) -> None:
        """Rows behind the first `length` need not be kept."""
        del self.keys[length:]
        self.num_rows = min(self.num_rows, length)


class Begun(NamedTuple):
    """Where a device is about to write rows."""

    start: tuple[int, int]  # rows before them, and the position of the first
    cache: Cache


class Contexts:
    """Those of a session, and which of them have caches."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._only = runner, require_cache(runner)
        self._shared = runner if isinstance(runner, SharedRunner) else None
        # Sequences of a pass
        self.max_together = self._shared.num_sequences if self._shared is not None else 1
        # Rows of a sequence in a pass at most, where windows bound its pages; 0: any number
        self.pass_rows = self._shared.pass_rows if self._shared is not None else 0
        self._is_begun = False
        self._resident: list[Context] = []  # with caches; the least recently used first
        # Asked before others are copied out: gives rows back that nobody goes on with, if it can.
        self.forget_one: Callable[[], bool] = lambda: False

    @property
    def page_rows(self) -> int:
        """Rows that a sequence gets at a time."""
        return self._shared.page_rows if self._shared is not None else 1

    @property
    def free_rows(self) -> int | None:
        """Rows for which pages are free; None where there are no pages."""
        return self._shared.free_rows if self._shared is not None else None

    def free_rows_without(self, contexts: Iterable[Context]) -> int:
        """Rows for which pages were free if these gave theirs back."""
        assert self._shared is not None
        return self._shared.free_rows_without(
            [one.cache for one in contexts if one.cache is not None]
        )

    def admit(self, context: Context) -> Cache:
        """Its cache, with its rows."""
        return self._bring_in(context, [context])

    def reserve(self, parts: Sequence[tuple[Context, int, int]]) -> None:
        """Before a pass: make room for rows of several contexts.

        Args:
            parts: contexts, rows of each that stay, and new rows behind them.

        Raises:
            LimitError: all others copied out, the pages do not suffice.
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
        """As `run`, without a wait; see `Asked`."""
        assert isinstance(self._runner, Asked)
        return self._runner.ask_many([(_cache(one), given) for one, given in parts])

    def run(self, parts: Sequence[tuple[Context, dict[str, NDArray[Any]]]]) -> list[Outputs]:
        """A pass for all of them, or one for each; what it gives is to be read before the next.

        Args:
            parts: contexts with reserved rows, and inputs by contract name.
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
        """See `runners.Cache` and `least_rows`; others make way."""
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
        """Another with the same rows, which both may go on from."""
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
        """Give its rows up."""
        if context in self._resident:
            self._resident.remove(context)
            if self._shared is not None and context.cache is not None:
                self._shared.release(context.cache)
        context.cache = context.saved = context.memory = None
        context.keys, context.num_rows, context.least_rows = [], 0, 0

    def save(self, context: Context) -> None:
        """Copy its rows out, so that others may have their memory."""
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
            self._is_begun = True  # passes before the session's have left rows in the first
            return self._only
        return self._shared.new_cache()

    def _with_room(
        self, staying: Sequence[Context], action: Callable[..., None], *arguments: Any
    ) -> None:
        """Copy others out until pages suffice for `action`."""
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

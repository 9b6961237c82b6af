"""States of recurrent layers, by sequence.

States belong to a number of positions. A pass does not change them: accepted tokens of the latest
pass are committed before the next pass. So a sequence that ends within these tokens, or a
prompt that shares some of them, can still use the states before the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.errors import LimitError
from edgellm.device_runtime.arrays import I64
from edgellm.device_runtime.runners.outputs import Outputs
from edgellm.device_runtime.runners.state_store import StateMemory, StateStore

CHECKPOINT_BYTES = 256 << 20  # limit for all sequences of a pass
CHECKPOINT_ROWS = 1024  # tokens between checkpoints of a long prompt


class States:
    """States of a network's sequences."""

    def __init__(self, store: StateStore, num_sequences: int = 1) -> None:
        """`store` has the memory; a pass has at most `num_sequences`."""
        self._store, self._num_sequences = store, num_sequences
        self._latest: list[tuple[StateMemory, Outputs]] = []  # not committed yet

    @property
    def num_bytes(self) -> int:
        """Size of a sequence's states, without checkpoints."""
        return self._store.num_bytes

    def new(self) -> StateMemory:
        """States of a new, empty sequence."""
        return StateMemory(place=self._store.new())

    def release(self, memory: StateMemory | None) -> None:
        """Free the states of a sequence, if it has any."""
        if memory is None:
            return
        self._latest = [latest for latest in self._latest if latest[0] is not memory]
        self._store.release(memory)

    def begin(self, memory: StateMemory, length: int) -> Mapping[str, NDArray]:
        """As `begin_together`, for one sequence."""
        return self.begin_together([(memory, length)])[0][0]

    def begin_together(
        self, asked: Sequence[tuple[StateMemory, int]]
    ) -> list[tuple[Mapping[str, NDArray], int]]:
        """Commit or truncate before a pass; return the states and the index of each sequence.

        The length may exceed the computed positions, since timing passes start after them.

        Args:
            asked: states of sequences, and the number of positions to keep of each.

        Returns:
            For each sequence the states that are inputs, [B, ...], and its index in B.
        """
        for memory, length in asked:
            if length < memory.end:
                if memory.reach(length) != length:
                    raise ValueError(f"states of {memory.end} tokens cannot go back to {length}")
                self.cut(memory, length)
        self.commit_accepted()
        return self._store.enter([memory for memory, _ in asked])

    def give(
        self, asked: Sequence[tuple[StateMemory, int]], inputs: Sequence[dict[str, NDArray[Any]]]
    ) -> None:
        """Add the states of sequences to the inputs of their pass, see `begin_together`."""
        for (states, at), given in zip(self.begin_together(asked), inputs, strict=True):
            parents = given[graph_io.PARENT_ROWS]
            parents[parents < 0] -= at
            given |= states

    def ran(self, memory: StateMemory, outputs: Outputs, rows: int) -> None:
        """Record the outputs of a pass; its first `rows` tokens are accepted, as a chain."""
        self._latest.append((memory, outputs))
        memory.accepted = np.arange(rows)
        for mark in sorted(each for each in memory.marks if memory.num_rows < each <= memory.end):
            self._advance(memory, outputs, mark - memory.num_rows)
            self._keep_checkpoint(memory)

    def accept(self, memory: StateMemory, rows: I64) -> None:
        """Accept these tokens of the latest pass, which was a tree."""
        memory.accepted = rows

    def commit_accepted(self) -> None:
        """Commit accepted tokens, before the next pass overwrites its outputs."""
        for memory, outputs in self._latest:
            self._advance(memory, outputs, len(memory.accepted))
        self._latest = []

    def cut(self, memory: StateMemory, length: int) -> None:
        """Truncate to the first `length` positions, as far as `StateMemory.reach` can.

        Without a state at `length` it falls back to the last checkpoint before.
        """
        found = memory.reach(length)
        if found < memory.num_rows:
            memory.forget()
            self._store.replace(memory.place, memory.checkpoints.get(found))
            memory.num_rows = found
        memory.accepted = memory.accepted[: found - memory.num_rows]
        for rows in [each for each in memory.checkpoints if each > found]:
            del memory.checkpoints[rows]

    def fork(self, memory: StateMemory) -> StateMemory:
        """Copy the states of a sequence."""
        self.commit_accepted()
        place, kept = self._store.copy(memory.place), {**memory.checkpoints}
        return StateMemory(place=place, num_rows=memory.num_rows, checkpoints=kept)

    def read(self, memory: StateMemory, length: int) -> tuple[NDArray[Any], ...]:
        """Copies of the states after `length` positions, which must be reachable."""
        for latest, outputs in self._latest:
            if latest is memory and memory.num_rows <= length:
                self._advance(memory, outputs, length - memory.num_rows)
        found = memory.place if memory.num_rows == length else memory.checkpoints.get(length)
        return self._store.read(found or self._store.new())

    def write(self, memory: StateMemory, states: tuple[NDArray[Any], ...], length: int) -> None:
        """Replace all states by those that `read` returned, after `length` positions."""
        self._store.write(memory.place, states)
        memory.forget()
        memory.num_rows, memory.checkpoints = length, {}

    def _advance(self, memory: StateMemory, outputs: Outputs, count: int) -> None:
        """Commit the next `count` accepted tokens."""
        if not count:
            return
        self._store.advance(memory, outputs, count)
        memory.num_rows, memory.accepted = memory.num_rows + count, memory.accepted[count:]

    def _keep_checkpoint(self, memory: StateMemory) -> None:
        try:
            memory.checkpoints[memory.num_rows] = self._store.copy(memory.place)
        except LimitError:
            return  # a later prompt is computed from an earlier one on
        maximum = max(CHECKPOINT_BYTES // (self.num_bytes * self._num_sequences), 1)
        while len(memory.checkpoints) > maximum:
            del memory.checkpoints[_least_missed(memory.checkpoints)]


def _least_missed(checkpoints: Iterable[int]) -> int:
    """The checkpoint, except the newest, whose loss costs the fewest recomputed tokens."""
    older = [0, *sorted(checkpoints)][:-1]
    return min(itertools.pairwise(older), key=lambda pair: pair[1] - pair[0])[1]

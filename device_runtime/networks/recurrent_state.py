"""States of recurrent layers, by sequence.

States belong to a number of positions. A pass does not change them: accepted tokens of the latest
pass are committed before the next pass. So a sequence that ends within these tokens, or a
prompt that shares some of them, can still use the states before the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.model_spec import RecurrentSpec
from edgellm.device_runtime.arrays import I64
from edgellm.device_runtime.networks.recurrent_state_pool import (
    Arrays,
    StateMemory,
    StatePool,
    StateSlot,
    copied,
)
from edgellm.device_runtime.runners.outputs import Outputs
from edgellm.device_runtime.runners.runner import Runner

CHECKPOINT_BYTES = 256 << 20  # limit for all sequences of a pass
CHECKPOINT_ROWS = 1024  # tokens between checkpoints of a long prompt


class States:
    """States of a network's sequences."""

    def __init__(self, commit: Runner, spec: RecurrentSpec, num_sequences: int = 1) -> None:
        """`commit` runs the graph that advances states; a pass has at most `num_sequences`."""
        self._commit, self._spec, self._num_sequences = commit, spec, num_sequences
        self._pool = StatePool(spec, num_sequences) if num_sequences > 1 else None
        # The next commit writes here.
        self._spare = StateSlot(self._zeros()) if self._pool is None else self._pool.take()
        self._latest: list[tuple[StateMemory, Outputs]] = []  # not committed yet

    @property
    def num_bytes(self) -> int:
        """Size of a sequence's states, without checkpoints."""
        return sum(array.nbytes for array in self._spare.arrays.values())

    def new(self) -> StateMemory:
        """States of a new, empty sequence."""
        return StateMemory(place=StateSlot(self._zeros()))

    def release(self, memory: StateMemory | None) -> None:
        """Free the states of a sequence, if it has any."""
        if memory is None:
            return
        self._latest = [latest for latest in self._latest if latest[0] is not memory]
        if self._pool is not None:
            self._pool.release(memory)

    def _zeros(self) -> Arrays:
        return {name: np.zeros(shape, np.float32) for name, shape in self._spec.states.items()}

    def begin(self, memory: StateMemory, length: int) -> Arrays:
        """As `begin_together`, for one sequence."""
        return self.begin_together([(memory, length)])[0][0]

    def begin_together(self, asked: Sequence[tuple[StateMemory, int]]) -> list[tuple[Arrays, int]]:
        """Commit or truncate before a pass; return the states and the index of each sequence.

        The length may exceed the computed positions, since timing passes start after them.

        Args:
            asked: states of sequences, and the number of positions to keep of each.

        Returns:
            For each sequence the states by input name, [B, ...], and its index in B.
        """
        for memory, length in asked:
            if length < memory.end:
                if memory.reach(length) != length:
                    raise ValueError(f"states of {memory.end} tokens cannot go back to {length}")
                self.cut(memory, length)
        self.commit_accepted()
        if self._pool is None:
            return [(memory.arrays, 0) for memory, _ in asked]
        self._pool.bring_in([memory for memory, _ in asked])
        return [(self._pool.arrays, memory.place.slot or 0) for memory, _ in asked]

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
            kept = memory.checkpoints.get(found)
            for name, array in memory.arrays.items():
                array[...] = 0 if kept is None else kept[name]
            memory.num_rows = found
        memory.accepted = memory.accepted[: found - memory.num_rows]
        for rows in [each for each in memory.checkpoints if each > found]:
            del memory.checkpoints[rows]

    def fork(self, memory: StateMemory) -> StateMemory:
        """Copy the states of a sequence."""
        self.commit_accepted()
        place, kept = StateSlot(copied(memory.arrays)), {**memory.checkpoints}
        return StateMemory(place=place, num_rows=memory.num_rows, checkpoints=kept)

    def read(self, memory: StateMemory, length: int) -> tuple[NDArray[Any], ...]:
        """Copies of the states after `length` positions, which must be reachable."""
        for latest, outputs in self._latest:
            if latest is memory and memory.num_rows <= length:
                self._advance(memory, outputs, length - memory.num_rows)
        found = memory.arrays if memory.num_rows == length else memory.checkpoints.get(length)
        return tuple(copied(found or self._zeros()).values())

    def write(self, memory: StateMemory, states: tuple[NDArray[Any], ...], length: int) -> None:
        """Replace all states by those that `read` returned, after `length` positions."""
        for array, state in zip(memory.arrays.values(), states, strict=True):
            array[...] = state
        memory.forget()
        memory.num_rows, memory.checkpoints = length, {}

    def _advance(self, memory: StateMemory, outputs: Outputs, count: int) -> None:
        """Commit the next `count` accepted tokens."""
        if not count:
            return
        self._commit.run(
            {
                **memory.arrays,
                **{name: outputs[name] for name in self._spec.rows},
                **{
                    graph_io.next_state_name(name): into
                    for name, into in self._spare.arrays.items()
                },
                graph_io.COMMIT_ROWS: memory.accepted[:count],
            }
        )
        memory.place, self._spare = self._spare, memory.place
        memory.num_rows, memory.accepted = memory.num_rows + count, memory.accepted[count:]

    def _keep_checkpoint(self, memory: StateMemory) -> None:
        memory.checkpoints[memory.num_rows] = copied(memory.arrays)
        maximum = max(CHECKPOINT_BYTES // (self.num_bytes * self._num_sequences), 1)
        while len(memory.checkpoints) > maximum:
            del memory.checkpoints[_least_missed(memory.checkpoints)]


def _least_missed(checkpoints: Iterable[int]) -> int:
    """The checkpoint, except the newest, whose loss costs the fewest recomputed tokens."""
    older = [0, *sorted(checkpoints)][:-1]
    return min(itertools.pairwise(older), key=lambda pair: pair[1] - pair[0])[1]

"""What the recurrent layers of a decoder keep of each sequence.

States stand for a number of rows. A pass leaves them as they were; the rows of the latest pass that
were accepted are committed when the next pass is about to begin, so that an answer which ends
within them, or a prompt that shares some of them, can still do without the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm import contract
from edgellm.device_runtime.runners import Outputs, Runner
from edgellm.device_runtime.sessions import I64
from edgellm.manifest import RecurrentSpec

Arrays = dict[str, NDArray[np.float32]]
_NO_ROWS = np.zeros(0, np.int64)
CHECKPOINT_BYTES = 256 << 20  # of all checkpoints of a sequence
CHECKPOINT_ROWS = 1024  # of a long prompt, from one to the next


@dataclass(slots=True)
class Memory:
    """What is kept of one sequence."""

    arrays: Arrays  # by contract name
    num_rows: int = 0  # that they stand for
    accepted: I64 = field(default_factory=lambda: _NO_ROWS)  # of the latest pass, not committed
    marks: set[int] = field(default_factory=set)  # numbers of rows to keep a checkpoint of
    checkpoints: dict[int, Arrays] = field(default_factory=dict)  # by number of rows

    @property
    def end(self) -> int:
        """Rows, with those that are accepted."""
        return self.num_rows + len(self.accepted)

    def reach(self, length: int) -> int:
        """The most rows, up to `length`, that it can go back to."""
        if self.num_rows <= length:
            return min(length, self.end)
        return max((rows for rows in self.checkpoints if rows <= length), default=0)


class States:
    """Those of a session's sequences."""

    def __init__(self, commit: Runner, spec: RecurrentSpec) -> None:
        """`commit` runs the graph that moves states on."""
        self._commit, self._spec = commit, spec
        self._spare = self._zeros()  # where the next commit writes
        self._latest: tuple[Memory, Outputs] | None = None  # whose rows are not committed

    @property
    def num_bytes(self) -> int:
        """Of a sequence, without its checkpoints."""
        return sum(array.nbytes for array in self._spare.values())

    def new(self) -> Memory:
        """Of a sequence without rows."""
        return Memory(self._zeros())

    def _zeros(self) -> Arrays:
        return {name: np.zeros(shape, np.float32) for name, shape in self._spec.states.items()}

    def begin(self, memory: Memory, length: int) -> Arrays:
        """Before a pass behind `length` rows of a sequence: its states.

        Rows that no pass has computed are nobody's: measurements begin behind them.
        """
        if length < memory.end:
            if memory.reach(length) != length:
                raise ValueError(f"states of {memory.end} rows cannot go back to {length}")
            self.cut(memory, length)
        self.settle()
        return memory.arrays

    def ran(self, memory: Memory, outputs: Outputs, rows: int) -> None:
        """A pass gave `outputs`; its first `rows` rows are accepted, each the next one's parent."""
        self._latest = memory, outputs
        memory.accepted = np.arange(rows)
        for mark in sorted(each for each in memory.marks if memory.num_rows < each <= memory.end):
            self._advance(memory, outputs, mark - memory.num_rows)
            self._keep_checkpoint(memory)

    def accept(self, memory: Memory, rows: I64) -> None:
        """Of the latest pass, which was a tree, these rows are accepted."""
        memory.accepted = rows

    def settle(self) -> None:
        """Commit what was accepted: the next pass overwrites its rows."""
        if self._latest is not None:
            memory, outputs = self._latest
            self._advance(memory, outputs, len(memory.accepted))
            self._latest = None

    def cut(self, memory: Memory, length: int) -> None:
        """Forget the rows behind the first `length`, as far as `Memory.reach` can.

        Behind the last checkpoint before them nothing is left.
        """
        found = memory.reach(length)
        if found < memory.num_rows:
            memory.accepted, kept = _NO_ROWS, memory.checkpoints.get(found)
            for name, array in memory.arrays.items():
                array[...] = 0 if kept is None else kept[name]
            memory.num_rows = found
        memory.accepted = memory.accepted[: found - memory.num_rows]
        for rows in [each for each in memory.checkpoints if each > found]:
            del memory.checkpoints[rows]

    def fork(self, memory: Memory) -> Memory:
        """Another with the same rows."""
        self.settle()
        return Memory(_copied(memory.arrays), memory.num_rows, checkpoints={**memory.checkpoints})

    def read(self, memory: Memory, length: int) -> tuple[NDArray[Any], ...]:
        """Copies of the states behind `length` rows, which `Memory.reach` says can be had."""
        if memory.num_rows <= length and self._latest is not None and self._latest[0] is memory:
            self._advance(*self._latest, length - memory.num_rows)
        found = memory.arrays if memory.num_rows == length else memory.checkpoints.get(length)
        return tuple(_copied(found or self._zeros()).values())

    def write(self, memory: Memory, states: tuple[NDArray[Any], ...], length: int) -> None:
        """States that `read` gave, behind `length` rows, in the place of all that is there."""
        for array, state in zip(memory.arrays.values(), states, strict=True):
            array[...] = state
        memory.num_rows, memory.accepted, memory.checkpoints = length, _NO_ROWS, {}

    def _advance(self, memory: Memory, outputs: Outputs, count: int) -> None:
        """Commit the next `count` accepted rows."""
        if not count:
            return
        self._commit.run(
            {
                **memory.arrays,
                **{name: outputs[name] for name in self._spec.rows},
                **{contract.next_state_name(name): into for name, into in self._spare.items()},
                contract.COMMIT_ROWS: memory.accepted[:count],
            }
        )
        memory.arrays, self._spare = self._spare, memory.arrays
        memory.num_rows, memory.accepted = memory.num_rows + count, memory.accepted[count:]

    def _keep_checkpoint(self, memory: Memory) -> None:
        memory.checkpoints[memory.num_rows] = _copied(memory.arrays)
        most = max(CHECKPOINT_BYTES // self.num_bytes, 1)
        while len(memory.checkpoints) > most:
            del memory.checkpoints[_least_missed(memory.checkpoints)]


def _least_missed(checkpoints: Iterable[int]) -> int:
    """Of all but the newest, the one without which the fewest rows are computed again."""
    older = [0, *sorted(checkpoints)][:-1]
    return min(itertools.pairwise(older), key=lambda pair: pair[1] - pair[0])[1]


def _copied(arrays: Arrays) -> Arrays:
    return {name: array.copy() for name, array in arrays.items()}

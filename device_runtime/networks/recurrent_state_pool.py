"""Memory of recurrent states: those of a batch are contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgellm.core.model_spec import RecurrentSpec
from edgellm.device_runtime.arrays import I64

Arrays = dict[str, NDArray[np.float32]]
_NO_ROWS = np.zeros(0, np.int64)


@dataclass(slots=True, eq=False)
class StateSlot:
    """Memory for the states of one sequence."""

    arrays: Arrays  # by input name, [1, ...]
    slot: int | None = None  # index in the pool; None: separate memory


@dataclass(slots=True, eq=False, kw_only=True)
class StateMemory:
    """States of one sequence."""

    place: StateSlot
    num_rows: int = 0  # positions that the states include
    accepted: I64 = field(default_factory=lambda: _NO_ROWS)  # of the latest pass, not committed
    marks: set[int] = field(default_factory=set)  # prefix lengths that get a checkpoint
    checkpoints: dict[int, Arrays] = field(default_factory=dict)  # by prefix length

    @property
    def arrays(self) -> Arrays:
        """By input name."""
        return self.place.arrays

    @property
    def end(self) -> int:
        """Positions, including accepted ones."""
        return self.num_rows + len(self.accepted)

    def reach(self, length: int) -> int:
        """The longest prefix, up to `length`, to which it can go back."""
        if self.num_rows <= length:
            return min(length, self.end)
        return max((rows for rows in self.checkpoints if rows <= length), default=0)

    def forget(self) -> None:
        """Drop accepted tokens."""
        self.accepted = _NO_ROWS


class StatePool:
    """Slots for all sequences of a pass, and a spare one; the longest resident is evicted."""

    def __init__(self, spec: RecurrentSpec, num_sequences: int) -> None:
        """Allocate slots for `count` sequences and a spare one."""
        count = num_sequences + 1
        self.arrays: Arrays = {
            name: np.zeros((count, *shape[1:]), np.float32) for name, shape in spec.states.items()
        }
        self._free = [
            StateSlot({name: array[slot : slot + 1] for name, array in self.arrays.items()}, slot)
            for slot in range(count)
        ]
        self._held: list[StateMemory] = []  # the least recently used first

    def take(self) -> StateSlot:
        """Take a slot permanently."""
        return self._free.pop()

    def bring_in(self, memories: Sequence[StateMemory]) -> None:
        """Move the sequences of a pass into slots."""
        for memory in memories:
            if memory.place.slot is None:
                place = self._free.pop() if self._free else self._evicted(memories)
                for name, array in memory.arrays.items():
                    place.arrays[name][...] = array
                memory.place = place
            else:
                self._held.remove(memory)
            self._held.append(memory)

    def _evicted(self, staying: Sequence[StateMemory]) -> StateSlot:
        memory = next(one for one in self._held if one not in staying)
        self._held.remove(memory)
        place, memory.place = memory.place, StateSlot(copied(memory.arrays))
        return place

    def release(self, memory: StateMemory) -> None:
        """Free the slot of a sequence."""
        if memory in self._held:
            self._held.remove(memory)
            self._free.append(memory.place)


def copied(arrays: Arrays) -> Arrays:
    """Copies of arrays."""
    return {name: array.copy() for name, array in arrays.items()}

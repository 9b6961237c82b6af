"""Memory of recurrent states on the host: those of a batch are contiguous."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellm.core import graph_io
from edgellm.core.model_spec import RecurrentSpec
from edgellm.device_runtime.runners.outputs import Outputs
from edgellm.device_runtime.runners.runner import Runner
from edgellm.device_runtime.runners.state_store import StateMemory

Arrays = dict[str, NDArray[np.float32]]


@dataclass(slots=True, eq=False)
class StateSlot:
    """Memory for the states of one sequence."""

    arrays: Arrays  # by input name, [1, ...]
    slot: int | None = None  # index in the pool; None: separate memory


class HostStates:
    """See `StateStore`: arrays, which a graph advances."""

    def __init__(self, commit: Runner | None, spec: RecurrentSpec, num_sequences: int = 1) -> None:
        """`commit` runs the graph; a pass has at most `num_sequences`."""
        self._commit, self._spec = commit, spec
        self._pool = StatePool(spec, num_sequences) if num_sequences > 1 else None
        # The next commit writes here.
        self._spare = self.new() if self._pool is None else self._pool.take()

    @property
    def num_bytes(self) -> int:
        """See `StateStore`."""
        return sum(array.nbytes for array in self._spare.arrays.values())

    def new(self) -> StateSlot:
        """See `StateStore`."""
        shapes = self._spec.states.items()
        return StateSlot({name: np.zeros(shape, np.float32) for name, shape in shapes})

    def copy(self, place: StateSlot) -> StateSlot:
        """See `StateStore`."""
        return StateSlot(copied(place.arrays))

    def replace(self, place: StateSlot, source: StateSlot | None) -> None:
        """See `StateStore`."""
        for name, array in place.arrays.items():
            array[...] = 0 if source is None else source.arrays[name]

    def read(self, place: StateSlot) -> tuple[NDArray[np.float32], ...]:
        """See `StateStore`."""
        return tuple(copied(place.arrays).values())

    def write(self, place: StateSlot, states: Sequence[NDArray]) -> None:
        """See `StateStore`."""
        for array, state in zip(place.arrays.values(), states, strict=True):
            array[...] = state

    def enter(self, memories: Sequence[StateMemory]) -> list[tuple[Mapping[str, NDArray], int]]:
        """See `StateStore`."""
        if self._pool is None:
            return [(memory.place.arrays, 0) for memory in memories]
        self._pool.bring_in(memories)
        return [(self._pool.arrays, memory.place.slot or 0) for memory in memories]

    def advance(self, memory: StateMemory, outputs: Outputs, count: int) -> None:
        """See `StateStore`."""
        assert self._commit is not None
        self._commit.run(
            {
                **memory.place.arrays,
                **{name: outputs[name] for name in self._spec.rows},
                **{
                    graph_io.next_state_name(name): into
                    for name, into in self._spare.arrays.items()
                },
                graph_io.COMMIT_ROWS: memory.accepted[:count],
            }
        )
        memory.place, self._spare = self._spare, memory.place

    def release(self, memory: StateMemory) -> None:
        """See `StateStore`."""
        if self._pool is not None:
            self._pool.release(memory)


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
                for name, array in memory.place.arrays.items():
                    place.arrays[name][...] = array
                memory.place = place
            else:
                self._held.remove(memory)
            self._held.append(memory)

    def _evicted(self, staying: Sequence[StateMemory]) -> StateSlot:
        memory = next(one for one in self._held if one not in staying)
        self._held.remove(memory)
        place, memory.place = memory.place, StateSlot(copied(memory.place.arrays))
        return place

    def release(self, memory: StateMemory) -> None:
        """Free the slot of a sequence."""
        if memory in self._held:
            self._held.remove(memory)
            self._free.append(memory.place)


def copied(arrays: Arrays) -> Arrays:
    """Copies of arrays."""
    return {name: array.copy() for name, array in arrays.items()}

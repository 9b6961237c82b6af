"""Protocol of the memory of recurrent states, which a runner or the host may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgellm.device_runtime.arrays import I64
from edgellm.device_runtime.runners.outputs import Outputs

_NO_ROWS = np.zeros(0, np.int64)


@dataclass(slots=True, eq=False, kw_only=True)
class StateMemory:
    """States of one sequence."""

    place: Any  # memory of the store
    num_rows: int = 0  # positions that the states include
    accepted: I64 = field(default_factory=lambda: _NO_ROWS)  # of the latest pass, not committed
    marks: set[int] = field(default_factory=set)  # prefix lengths that get a checkpoint
    checkpoints: dict[int, Any] = field(default_factory=dict)  # places by prefix length

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


class StateStore(Protocol):
    """Memory of the states of sequences and checkpoints, and what advances them.

    A place is the memory of all states of one sequence.
    """

    @property
    def num_bytes(self) -> int:
        """Size of a place."""
        ...

    def new(self) -> Any:
        """A place with zeros; raises `LimitError` if the memory is full."""
        ...

    def copy(self, place: Any) -> Any:
        """A copy in another place; raises `LimitError` if the memory is full."""
        ...

    def replace(self, place: Any, source: Any | None) -> None:
        """Overwrite the states by those of another place; None: by zeros."""
        ...

    def read(self, place: Any) -> tuple[NDArray[np.float32], ...]:
        """Copies of the states on the host, in the order of the spec."""
        ...

    def write(self, place: Any, states: Sequence[NDArray[Any]]) -> None:
        """Overwrite the states by those that `read` returned."""
        ...

    def enter(self, memories: Sequence[StateMemory]) -> list[tuple[Mapping[str, NDArray], int]]:
        """Prepare the states of the sequences of a pass.

        Returns:
            For each sequence further inputs of the pass, and its index in their first axis.
        """
        ...

    def advance(self, memory: StateMemory, outputs: Outputs, count: int) -> None:
        """Advance the states by the first `count` accepted tokens of the latest pass.

        Args:
            memory: of a sequence; only its place may change.
            outputs: of the pass.
            count: at least 1.
        """
        ...

    def release(self, memory: StateMemory) -> None:
        """Free the place of a sequence that has ended."""
        ...

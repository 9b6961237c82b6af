"""Milliseconds of passes by their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import overload

import numpy as np

from edgellm.device_runtime.arrays import I64
from edgellm.device_runtime.runners.batch_costs import SharedCosts
from edgellm.device_runtime.speculate.tree import F64


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds by rows (index), from the engine's measurements."""

    verify: F64
    step: F64
    extend: F64
    host_ms: float = 0.0  # of asking for a tree, whoever grows it, beyond passes and a plain token
    tree_ms: float = 0.0  # of verifying a tree, beyond the pass
    together: SharedCosts | None = None  # of passes that several answers verify in, if measured
    levels: SharedCosts | None = None  # of steps of drafts of several answers, if measured

    @classmethod
    def of(
        cls,
        verify: Mapping[str, float],
        step: Mapping[str, float] | None = None,
        extend: Mapping[str, float] | None = None,
        host_ms: float = 0.0,
        tree_ms: float = 0.0,
        together: SharedCosts | None = None,
        levels: SharedCosts | None = None,
    ) -> Costs:
        """From measured {rows: ms}; what lies between is interpolated.

        Without a network `step` and `extend` are None: drafting costs nothing.
        """
        nothing = {"1": 0.0}
        tables = _table(verify), _table(step or nothing), _table(extend or nothing)
        return cls(*tables, host_ms, tree_ms, together, levels)

    def share(self, batch_load: BatchLoad) -> F64:
        """What an answer's rows cost it of the passes that verify, see `BatchLoad.share`.

        Passes of several are taken for those of one with as many rows where nobody measured them.
        """
        return _share(self.verify, self.together, batch_load)

    def step_share(self, answers: int) -> F64:
        """The same of a level that so many draft together, each with a row at least."""
        return _share(self.step, self.levels, BatchLoad(answers, answers - 1))


def _share(alone: F64, together: SharedCosts | None, batch_load: BatchLoad) -> F64:
    if batch_load.answers == 1 or together is None:
        return batch_load.share(alone)
    return batch_load.share(together.by_rows(batch_load.answers))[: len(alone)]


def _table(measured: Mapping[str, float]) -> F64:
    rows = sorted(int(key) for key in measured)
    # More rows never take less: what seems to was disturbed, which only adds.
    times = np.minimum.accumulate([measured[str(key)] for key in reversed(rows)])[::-1]
    return np.interp(np.arange(rows[-1] + 1), rows, times)


@dataclass(frozen=True, slots=True)
class BatchLoad:
    """Who shares the passes of an answer."""

    answers: int = 1  # that decode, it among them
    rows: int = 0  # of the others in a pass, and of prompts

    def share(self, verify: F64) -> F64:
        """What an answer's rows cost it, by their number, of what passes cost.

        All pay alike for the pass in which each has a row; further rows cost what they add. So
        tokens per millisecond of a share are those of the whole batch.
        """
        if self.answers == 1 and not self.rows:
            return verify
        last, rows = len(verify) - 1, np.arange(len(verify)) + self.rows
        row_ms = (verify[last] - verify[last // 2]) / max(last - last // 2, 1)
        passes = verify[np.minimum(rows, last)] + np.maximum(rows - last, 0) * row_ms
        return np.concatenate([[0.0], passes[1:] - passes[1] * (1 - 1 / self.answers)])


ALONE = BatchLoad()


def shared(table: F64, answers: int) -> F64:
    """What rows of one answer cost it of passes that so many share, each with one at least."""
    return BatchLoad(answers, answers - 1).share(table)


@overload
def price(table: F64, rows: int) -> float: ...
@overload
def price(table: F64, rows: I64) -> F64: ...
def price(table: F64, rows: int | I64) -> float | F64:
    """What a pass of `rows` costs by a table of `Costs`, beyond its end as passes of its length."""
    last = len(table) - 1
    return table[np.minimum(rows, last)] * np.ceil(rows / last)

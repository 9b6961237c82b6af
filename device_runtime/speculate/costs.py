"""Milliseconds of passes by their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import overload

import numpy as np

from edgellm.device_runtime.sessions import I64
from edgellm.device_runtime.speculate.tree import F64


@dataclass(frozen=True, slots=True)
class Costs:
    """Milliseconds by rows (index), from the engine's measurements."""

    verify: F64
    step: F64
    extend: F64

    @classmethod
    def of(
        cls,
        verify: Mapping[str, float],
        step: Mapping[str, float] | None = None,
        extend: Mapping[str, float] | None = None,
    ) -> Costs:
        """From measured {rows: ms}; what lies between is interpolated.

        Without a network `step` and `extend` are None: drafting costs nothing.
        """
        nothing = {"1": 0.0}
        return cls(*(_table(measured or nothing) for measured in (verify, step, extend)))


def _table(measured: Mapping[str, float]) -> F64:
    rows = sorted(int(key) for key in measured)
    # More rows never take less: what seems to was disturbed, which only adds.
    times = np.minimum.accumulate([measured[str(key)] for key in reversed(rows)])[::-1]
    return np.interp(np.arange(rows[-1] + 1), rows, times)


@dataclass(frozen=True, slots=True)
class Company:
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
        rows = np.arange(len(verify)) + self.rows
        alone = price(verify, self.rows + 1)
        shared = price(verify, rows) - alone * (1 - 1 / self.answers)
        shared[0] = 0.0
        return shared


ALONE = Company()


@overload
def price(table: F64, rows: int) -> float: ...
@overload
def price(table: F64, rows: I64) -> F64: ...
def price(table: F64, rows: int | I64) -> float | F64:
    """What a pass of `rows` costs by a table of `Costs`, beyond its end as passes of its length."""
    last = len(table) - 1
    return table[np.minimum(rows, last)] * np.ceil(rows / last)

"""Costs of forward passes in milliseconds, by number of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import overload

import numpy as np

from edgellm.device_runtime.arrays import I64
from edgellm.device_runtime.runners.batch_costs import SharedCosts
from edgellm.device_runtime.speculate.tree import F64


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Milliseconds by number of tokens (index), as the engine's build measured them."""

    verify: F64
    step: F64
    extend: F64
    host_ms: float = 0.0  # host time of a proposal, without passes and a plain token's time
    tree_ms: float = 0.0  # host time of verifying a tree, without the pass
    together: SharedCosts | None = None  # `verify` in batches, if measured
    levels: SharedCosts | None = None  # `step` in batches, if measured

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
        """Costs from measured {tokens: ms}, interpolated linearly.

        Without a network `step` and `extend` are None: drafting costs nothing.
        """
        nothing = {"1": 0.0}
        return cls(
            verify=_table(verify),
            step=_table(step or nothing),
            extend=_table(extend or nothing),
            host_ms=host_ms,
            tree_ms=tree_ms,
            together=together,
            levels=levels,
        )

    def share(self, batch_load: BatchLoad) -> F64:
        """A sequence's share of the cost of verification, see `BatchLoad.share`.

        Unmeasured batches cost as much as one sequence with equally many tokens.
        """
        return _share(self.verify, self.together, batch_load)

    def step_share(self, answers: int) -> F64:
        """A sequence's share of a level that `answers` sequences draft in a batch."""
        return _share(self.step, self.levels, BatchLoad(answers, answers - 1))


def _share(alone: F64, together: SharedCosts | None, batch_load: BatchLoad) -> F64:
    if batch_load.answers == 1 or together is None:
        return batch_load.share(alone)
    return batch_load.share(together.by_rows(batch_load.answers))[: len(alone)]


def _table(measured: Mapping[str, float]) -> F64:
    rows = sorted(int(key) for key in measured)
    # More tokens never take less time; noise only adds to a measurement.
    times = np.minimum.accumulate([measured[str(key)] for key in reversed(rows)])[::-1]
    return np.interp(np.arange(rows[-1] + 1), rows, times)


@dataclass(frozen=True, slots=True)
class BatchLoad:
    """The batch of a sequence."""

    answers: int = 1  # sequences that decode, this one included
    rows: int = 0  # tokens of the other sequences in a pass, and of prompts

    def share(self, verify: F64) -> F64:
        """A sequence's share of the cost of passes, by its number of tokens.

        A sequence is charged 1/N of the pass with one token each, plus the extra cost of its
        further tokens. So the tokens per millisecond of a share are those of the whole batch.
        """
        if self.answers == 1 and not self.rows:
            return verify
        last, rows = len(verify) - 1, np.arange(len(verify)) + self.rows
        row_ms = (verify[last] - verify[last // 2]) / max(last - last // 2, 1)
        passes = verify[np.minimum(rows, last)] + np.maximum(rows - last, 0) * row_ms
        return np.concatenate([[0.0], passes[1:] - passes[1] * (1 - 1 / self.answers)])


ALONE = BatchLoad()


def shared(table: F64, answers: int) -> F64:
    """A sequence's share of passes of a batch of `answers`, each with at least one token."""
    return BatchLoad(answers, answers - 1).share(table)


@overload
def price(table: F64, rows: int) -> float: ...
@overload
def price(table: F64, rows: I64) -> F64: ...
def price(table: F64, rows: int | I64) -> float | F64:
    """Cost of a pass of `rows` by a table of `Costs`; beyond its end, of several full passes."""
    last = len(table) - 1
    return table[np.minimum(rows, last)] * np.ceil(rows / last)

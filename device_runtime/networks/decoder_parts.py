"""Input and output of one sequence in a pass of a language model."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from edgellm.core import graph_io
from edgellm.device_runtime.arrays import (
    F32,
    I64,
    Bool,
)
from edgellm.device_runtime.networks.sequence_kv import Context
from edgellm.device_runtime.runners import Outputs


class PassResult:
    """Outputs of one pass; a device's are fetched on access, before the next pass."""

    __slots__ = ("_outputs", "_rows", "_token_ids")

    def __init__(self, outputs: Outputs, rows: int) -> None:
        self._outputs, self._rows = outputs, rows
        self._token_ids: I64 | None = None  # until it is asked for

    @property
    def token_ids(self) -> I64:
        """[R], the argmax at each position with logits."""
        found = self._token_ids
        if found is None:
            if graph_io.TOKEN_IDS in self._outputs:
                found = self._outputs[graph_io.TOKEN_IDS][0]
            else:  # numpy finds the argmax in a fifth of an operator's time
                found = self.logits.argmax(axis=-1)
            self._token_ids = found
        return found

    def highest_of(self, row: int) -> float:
        """The logit of a position's argmax, which is in `token_ids`."""
        if graph_io.TOP_LOGITS in self._outputs:
            return float(self._outputs[graph_io.TOP_LOGITS][0, row])
        return float(self.logits[row, self.token_ids[row]])

    @property
    def logits(self) -> F32:
        """[R, V]."""
        return self._outputs[graph_io.LOGITS][0]

    @property
    def taps(self) -> F32:
        """[S, T*H], auxiliary hidden states for a draft; [S, 0] if the engine has none."""
        if graph_io.HIDDEN_TAPS not in self._outputs:
            return np.zeros((self._rows, 0), np.float32)
        return self._outputs[graph_io.HIDDEN_TAPS][0]


class SequencePart(NamedTuple):
    """Input of one sequence; see `DecoderNetwork.run`."""

    context: Context
    token_ids: I64
    write_index: int
    logits_index: I64
    position_ids: I64 | None = None
    tree_mask: Bool | None = None

    @property
    def end(self) -> int:
        """Number of positions after the pass."""
        return self.write_index + len(self.token_ids)

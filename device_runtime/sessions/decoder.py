"""Passes of a language model, and what the rows of its KV cache stand for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm import contract
from edgellm.device_runtime import runners
from edgellm.device_runtime.engine.prefix_cache import count_common, row_keys
from edgellm.device_runtime.pass_costs import fastest_each_ms, measured_rows
from edgellm.device_runtime.runners import Outputs, Runner, require_cache
from edgellm.device_runtime.runners.rounds import GrowsTrees, Growth, Rounds
from edgellm.device_runtime.sessions import F32, I64, Bool, ImageRows, RowKey
from edgellm.device_runtime.sessions.pass_inputs import PassInputs
from edgellm.manifest import DecoderSpec, Engine
from edgellm.roles import DECODER, PASS


class PassResult:
    """Outputs of one pass; a device's are fetched when they are read, before the next pass."""

    def __init__(self, outputs: Outputs, rows: int) -> None:
        self._outputs, self._rows = outputs, rows

    @functools.cached_property
    def token_ids(self) -> I64:
        """[R], the likeliest token behind each row."""
        if contract.TOKEN_IDS in self._outputs:
            return self._outputs[contract.TOKEN_IDS][0]
        # numpy finds the largest logit of a row in a fifth of an operator's time
        return self.logits.argmax(axis=-1)

    def highest_of(self, row: int) -> float:
        """The logit of a row's token of `token_ids`, which are the argmax."""
        if contract.TOP_LOGITS in self._outputs:
            return float(self._outputs[contract.TOP_LOGITS][0, row])
        return float(self.logits[row, self.token_ids[row]])

    @property
    def logits(self) -> F32:
        """[R, V]."""
        return self._outputs[contract.LOGITS][0]

    @property
    def taps(self) -> F32:
        """[S, T*H], features for a draft; [S, 0] when the engine gives none."""
        if contract.HIDDEN_TAPS not in self._outputs:
            return np.zeros((self._rows, 0), np.float32)
        return self._outputs[contract.HIDDEN_TAPS][0]


class DecoderSession:
    """A loaded decoder with one KV cache of `capacity` rows.

    The record of what the rows stand for is cut before rows are overwritten and grows after they
    are written, so that it is true whatever fails in between and whoever runs the passes.
    """

    def __init__(self, runner: Runner, spec: DecoderSpec, capacity: int) -> None:
        self.capacity = capacity
        self._runner, self._cache = runner, require_cache(runner)
        self._inputs = PassInputs(runner, spec, capacity)
        self._image_keys: Mapping[int, RowKey] = {}
        self._rows: list[RowKey] = []
        self._written: list[RowKey] = []  # by the last pass
        # Asked before every pass; what it raises leaves the cache as it was.
        self.before_pass: Callable[[], None] | None = None

    def run(
        self,
        token_ids: I64,
        write_index: int,
        logits_index: I64,
        *,
        position_ids: I64 | None = None,
        tree_mask: Bool | None = None,
    ) -> PassResult:
        """Compute S new rows and write their keys and values at `write_index`.

        Args:
            token_ids: int64 [S].
            write_index: rows of the cache that are valid; the new ones follow.
            logits_index: int64 [R], the new rows that get logits.
            position_ids: int64 [S], counted as in text also where images give rows others; None
                counts on from `write_index`.
            tree_mask: bool [S, S], row i may see new row j; None is causal. What rows of a tree
                stand for is known when `compact` has chosen a path.

        Raises:
            LimitError: the rows do not fit into the cache.
        """
        if self.before_pass is not None:
            self.before_pass()
        inputs = self._inputs.of(token_ids, write_index, logits_index, position_ids, tree_mask)
        del self._rows[write_index:]
        result = PassResult(self._runner.run(inputs), len(token_ids))
        self._written = row_keys(token_ids.tolist(), self._image_keys)
        if position_ids is None and tree_mask is None:
            self._append(write_index, self._written)
        return result

    def begin_round(self, length: int, nodes: int) -> tuple[int, int]:
        """A device is about to run a tree of `nodes` nodes behind `length` rows.

        Returns:
            Where its rows go, and the position of the first.

        Raises:
            LimitError: as `run`.
        """
        if self.before_pass is not None:
            self.before_pass()
        start = self._inputs.start(length, nodes)
        del self._rows[length:]
        return start

    def end_round(self, token_ids: I64, outputs: Outputs) -> PassResult:
        """It did, with these tokens; as `run` with a mask, before `compact`."""
        self._written = row_keys(token_ids.tolist(), self._image_keys)
        return PassResult(outputs, len(token_ids))

    def open_rounds(self, draft: Runner, growth: Growth) -> Rounds | None:
        """See `runners.rounds.GrowsTrees`; most backends need the host."""
        runner = self._runner
        return runner.open_rounds(draft, growth) if isinstance(runner, GrowsTrees) else None

    def set_images(self, images: ImageRows) -> None:
        """Say what image rows of the next prompt stand for; holds until it is said again."""
        self._image_keys = images.keys
        self._inputs.set_images(images)

    def compact(self, length: int, rows: I64) -> None:
        """Compact the cache: the rows `length + rows` become `length`, `length + 1`, ...

        Args:
            length: rows before, which stay.
            rows: int64, ascending; the accepted rows of the last pass.
        """
        del self._rows[length:]
        self._cache.compact(length, rows)
        self._append(length, [self._written[row] for row in rows.tolist()])

    def read_rows(self, length: int) -> NDArray[Any]:
        """See `runners.Cache`."""
        return self._cache.read_rows(length)

    def write_rows(self, rows: NDArray[Any], keys: Sequence[RowKey] = ()) -> None:
        """See `prefix_cache.RowCache`."""
        self._rows = []
        self._cache.write_rows(rows)
        self._rows = list(keys[: rows.shape[-2]])

    @property
    def num_rows(self) -> int:
        """Rows that are known."""
        return len(self._rows)

    def held(self, keys: Sequence[RowKey]) -> int:
        """See `prefix_cache.RowCache`."""
        return count_common(self._rows, keys)

    def _append(self, length: int, keys: list[RowKey]) -> None:
        if len(self._rows) == length:  # not behind rows that nobody knows
            self._rows += keys


def open_decoder(folder: Path, engine: Engine) -> DecoderSession:
    """Load an engine of a language model; raises as `runners.Backend.open_engine`."""
    opened = runners.find(engine.backend).open_engine(folder, engine)
    return session(opened, engine.decoder, engine.max_kv_cache_capacity)


def session(opened: Mapping[str, Runner], spec: DecoderSpec, capacity: int) -> DecoderSession:
    """See `sessions.Module`."""
    return DecoderSession(opened[DECODER], spec, capacity)


def costs(
    session: DecoderSession, spec: DecoderSpec, most_rows: int = 0
) -> dict[str, dict[str, float]]:
    """See `sessions.Module`: of passes whose rows all get logits."""
    context, measured = measured_rows(session.capacity, most_rows)

    def run(rows: int) -> None:
        session.run(np.arange(rows) % spec.vocab_size, context, np.arange(rows))

    return {PASS: fastest_each_ms({str(rows): partial(run, rows) for rows in measured})}

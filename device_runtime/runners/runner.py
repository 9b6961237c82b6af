"""The base class of runners, with the capabilities that a backend may add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgellm.device_runtime.runners.batch_costs import SharedCosts
from edgellm.device_runtime.runners.device_speculation import Growth, Rounds
from edgellm.device_runtime.runners.kv_cache import KVCache, KVPool
from edgellm.device_runtime.runners.outputs import Outputs
from edgellm.device_runtime.runners.state_store import StateStore

Inputs = Mapping[str, NDArray[Any]]  # by graph I/O name, with the shapes of `core.graph_io`


class Runner:
    """Runs the loaded graphs of a role.

    A backend implements `run`, and `kv_pool` for graphs with a KV cache. The other attributes
    and methods are capabilities; by default a runner has none of them.

    Attributes:
        kv_pool: memory of the KV caches; None: the graphs have no cache.
        max_batch_size: maximum sequences of a pass.
        batch_limits: maximum tokens of a sequence, and of all, in a batch of trees, if the runner
            splits a batch into the cheapest passes; zeros: it needs no costs.
        runs_async: whether `run_async` is implemented, for a draft.
        states: memory of recurrent states; None: they are inputs, and the host has them.
        num_windows: of audio, whose keys and values are held for passes of a speech model.
    """

    kv_pool: KVPool | None = None
    max_batch_size: int = 1
    batch_limits: tuple[int, int] = (0, 0)
    runs_async: bool = False
    states: StateStore | None = None
    num_windows: int = 1

    def hold(self, inputs: Inputs) -> None:
        """Set inputs of all later passes, until they are replaced: images."""
        raise NotImplementedError

    def hold_window(self, cross: Inputs, place: int) -> None:
        """Set the keys and values of a window of audio, after `hold` has set all once.

        Args:
            cross: by `cross_name`.
            place: below `num_windows`; passes select it by the input `WINDOW_PLACES`.
        """
        raise NotImplementedError

    def run(self, inputs: Inputs) -> Outputs:
        """Run one forward pass of one sequence.

        Args:
            inputs: without `TREE_MASK` attention is causal. Inputs that the graph does not have
                are ignored.

        Raises:
            LimitError: the inputs exceed the engine's limits.
        """
        raise NotImplementedError

    def run_batch(self, parts: Sequence[tuple[KVCache, Inputs]]) -> list[Outputs]:
        """Run one forward pass of at most `max_batch_size` sequences.

        Args:
            parts: KV caches with allocated positions, each with inputs as in `run`.

        Returns:
            The outputs of `run` for each sequence.
        """
        ((_, inputs),) = parts
        return [self.run(inputs)]

    def num_packable(self, lengths: Sequence[int]) -> int:
        """Number of whole new sequences, the first of these, for one pass that changes no bits.

        Args:
            lengths: tokens of each sequence.

        Returns:
            At least 1; also more than `max_batch_size`, if short ones fit.
        """
        del lengths
        return 1

    def run_async(
        self, parts: Sequence[tuple[KVCache, Inputs]]
    ) -> list[tuple[Outputs, int | None]]:
        """Run a batch of a draft without waiting; each sequence has candidates of one row.

        Returns:
            The outputs of `run` for each, fetched when read, and its row of the candidates on the
            device. The row is None if the batch took several passes: candidates are then on the
            host.
        """
        raise NotImplementedError

    def learn_costs(self, costs: SharedCosts) -> None:
        """Set the measured costs of batched passes; only with `batch_limits`."""
        raise NotImplementedError

    def hold_adapters(self, weights: NDArray[np.float32], table: NDArray[np.int64]) -> None:
        """Set all LoRA adapters of later passes, as `ADAPTER_WEIGHTS` and `ADAPTER_TABLE`.

        Passes select one by the input `ADAPTER`; only for graphs with LoRA.
        """
        raise NotImplementedError

    def open_rounds(self, draft: Runner, growth: Growth) -> Rounds | None:
        """Prepare rounds of this base and its draft on the device.

        Returns:
            None if these runners, or this GPU, need the host between passes.
        """
        del draft, growth
        return None


def require_pool(runner: Runner) -> KVPool:
    """The KV pool of a role that has one."""
    assert runner.kv_pool is not None
    return runner.kv_pool

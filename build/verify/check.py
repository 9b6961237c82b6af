"""Compares a lowered graph with the portable one on a few random passes.

The limit comes from the model itself, see `build.verify.reference`: three times the error that the
engine's rounding causes in the portable graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgellm.build.verify.check_inputs import Inputs, audio_of, held_inputs
from edgellm.build.verify.reference import Numbers, Reference, Source, as_floats
from edgellm.core import graph_io
from edgellm.core.errors import EdgeLLMError
from edgellm.core.graph_roles import CROSS_KV
from edgellm.device_runtime.networks.decoder_io import parent_rows
from edgellm.device_runtime.networks.recurrent_state import States
from edgellm.device_runtime.networks.recurrent_state_pool import HostStates
from edgellm.device_runtime.runners.kv_cache import KVCache
from edgellm.device_runtime.runners.outputs import Outputs
from edgellm.device_runtime.runners.runner import Runner

# Rounding errors are sums of many small ones with random signs: two roundings of a model give
# errors of similar size. A normal error exceeds three deviations in 0.3 %.
DEVIATIONS = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a check."""

    text: str
    seconds: float = 0.0


def run_passes(runner: Runner, source: Source, passes: Sequence[Inputs]) -> Numbers:
    """What a runner gives for passes one after the other, with all their rows."""
    runner.hold(held_inputs(source.role, source.bundle))
    found: list[Numbers] = []
    states = _Moved(source) if source.commit is not None else None
    cache = None if runner.kv_pool is None else runner.kv_pool.new_cache()
    audio = None if source.role != CROSS_KV else audio_of(source.bundle)
    positions = None if audio is None else audio.num_positions
    for inputs in passes:
        outputs = _run(runner, cache, inputs if states is None else states.begin(inputs))
        arrays = {name: np.array(outputs[name]) for name in outputs}
        found.append(as_floats(arrays, positions))
        if states is not None:
            states.end(inputs, outputs)
    if cache is not None:
        cache.free()
    if len(found) == 1:
        return found[0]
    return {name: np.concatenate([each[name] for each in found], axis=1) for name in found[0]}


def _run(runner: Runner, cache: KVCache | None, inputs: Inputs) -> Outputs:
    """One pass of one sequence."""
    if cache is None:
        return runner.run(inputs)
    count = inputs[graph_io.INPUT_IDS].shape[1]
    cache.allocate(int(inputs[graph_io.WRITE_INDEX][0]), count)
    return runner.run_batch([(cache, inputs)])[0]


class _Moved:
    """Recurrent states of a decoder over several passes."""

    def __init__(self, source: Source) -> None:
        spec = source.bundle.decoder.recurrent
        assert source.commit is not None
        assert spec is not None
        self._states = States(HostStates(source.commit, spec))
        self._memory = self._states.new()

    def begin(self, inputs: Inputs) -> Inputs:
        rows, mask = inputs[graph_io.INPUT_IDS].shape[1], inputs.get(graph_io.TREE_MASK)
        states = self._states.begin(self._memory, int(inputs[graph_io.WRITE_INDEX][0]))
        return {**inputs, **states, graph_io.PARENT_ROWS: parent_rows(rows, mask)}

    def end(self, inputs: Inputs, outputs: Outputs) -> None:
        rows = 0 if graph_io.TREE_MASK in inputs else inputs[graph_io.INPUT_IDS].shape[1]
        self._states.ran(self._memory, outputs, rows)


def row_errors(
    found: NDArray[np.float32], expected: NDArray[np.float32], *, of_middle: bool = False
) -> float:
    """The largest relative error of a row, without the mean of the row.

    `of_middle`: the median error, for rounding that may route some rows to other experts.
    """
    if not np.isfinite(found).all():
        return float("inf")
    wanted = expected - expected.mean(axis=-1, keepdims=True)
    given = found - found.mean(axis=-1, keepdims=True)
    sizes = np.linalg.norm(wanted, axis=-1)
    errors = np.linalg.norm(given - wanted, axis=-1) / np.maximum(sizes, 1e-6)
    return float(np.median(errors) if of_middle else errors.max())


def largest_error(found: Numbers, expected: Numbers) -> float:
    """The largest error of all outputs that both have."""
    return max(row_errors(found[name], expected[name]) for name in found.keys() & expected.keys())


def bound_of(reference: Reference, name: str) -> float:
    """Limit of the relative error of an output's rows."""
    bound = reference.float_error
    if name in reference.rounded:
        bound += row_errors(
            reference.rounded[name], reference.exact[name], of_middle=reference.may_reroute
        )
    return DEVIATIONS * bound


def require_alike(
    reference: Reference, runner: Runner, open_lowered: Callable[[Callable[[], ir.Model]], Runner]
) -> Verdict:
    """Reject a lowered graph that differs from the portable one.

    Args:
        reference: of the role.
        runner: of the built graph.
        open_lowered: lowers a model given by its loader, to locate the error.

    Returns:
        The result for users.

    Raises:
        EdgeLLMError: with the error and the first layer that has it.
    """
    role = reference.source.role
    if reference.why_not:
        return Verdict(f"{role}: not compared with the portable graph: {reference.why_not}")
    start = time.perf_counter()
    found = run_passes(runner, reference.source, reference.passes)
    outputs = found.keys() & reference.exact.keys()
    off = {name: _off(reference, name, found[name]) for name in outputs}
    bounds = {name: bound_of(reference, name) for name in outputs}
    worst = max(off, key=lambda name: off[name] / bounds[name])
    if off[worst] > bounds[worst]:
        raise EdgeLLMError(
            f"the lowered {role} graph computes something else than the portable one: {worst} has "
            f"a relative error of {off[worst]:.2g}, the limit is {bounds[worst]:.2g}; it begins "
            f"{_place(reference, open_lowered)}",
            hint="report it with the bundle's manifest; --noCheck builds without this comparison",
        )
    rows = max(array.shape[-2] for array in found.values())
    return Verdict(
        f"{role} passed: {rows} tokens, relative error {off[worst]:.2g} "
        f"(limit {bounds[worst]:.2g})",
        reference.seconds + time.perf_counter() - start,
    )


def _off(reference: Reference, name: str, found: NDArray[np.float32]) -> float:
    return row_errors(found, reference.exact[name], of_middle=reference.may_reroute)


def _place(reference: Reference, open_lowered: Callable[[Callable[[], ir.Model]], Runner]) -> str:
    """Norms between which rows begin to differ, from a lowered graph that outputs norm inputs."""
    runner = open_lowered(lambda: reference.source.load()[0])
    found = run_passes(runner, reference.source, reference.passes)
    before = "the inputs"
    for name, norm in reference.layers.items():
        if _off(reference, name, found[name]) > bound_of(reference, name):
            return f"between {before} and {norm}"
        before = norm
    return f"behind {before}"

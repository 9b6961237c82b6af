"""Triton's kernels on the CPU, in its interpreter (`conftest`); the tests' arrays are numpy's."""

from __future__ import annotations

import numpy as np
import pytest
from attention_references import host_memory
from kernel_references import REFERENCES

pytest.importorskip("triton", reason="kernels are interpreted by triton: pip install '.[kernels]'")
torch = pytest.importorskip("torch")


def launch(kernel, grid: tuple[int, ...], *arguments, **constants) -> None:
    """Run a kernel; arrays are read and written in place."""
    given = [torch.from_numpy(each) if isinstance(each, np.ndarray) else each for each in arguments]
    kernel[grid](*given, **constants)


def by_reference(kernel, grid: tuple[int, ...], *arguments, **constants) -> None:
    """Run the reference that the fake GPU runs."""
    flat = [each.reshape(-1) if isinstance(each, np.ndarray) else each for each in arguments]
    facts = {**constants, "grid": (*grid, 1, 1)[:3], "memory": host_memory}
    REFERENCES[kernel.__name__](*flat, constants=facts)


def run_both(kernel, *arguments, grid: tuple[int, ...] = (1,), **constants) -> None:
    """Run a kernel, and its reference on copies: the results must be equal."""
    copies = [each.copy() if isinstance(each, np.ndarray) else each for each in arguments]
    launch(kernel, grid, *arguments, **constants)
    flat = [each.reshape(-1) if isinstance(each, np.ndarray) else each for each in copies]
    reference = REFERENCES[kernel.__name__]
    reference(*flat, constants={**constants, "grid": (*grid, 1, 1)[:3]})
    for one, other in zip(arguments, copies, strict=True):
        if isinstance(one, np.ndarray) and one.dtype.kind == "f":
            np.testing.assert_allclose(one, other, rtol=1e-6)
        elif isinstance(one, np.ndarray):
            np.testing.assert_array_equal(one, other)

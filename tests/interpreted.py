"""Triton's kernels on the CPU, in its interpreter (`conftest`); the tests' arrays are numpy's."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton", reason="kernels are interpreted by triton: pip install '.[kernels]'")
torch = pytest.importorskip("torch")


def launch(kernel, grid: tuple[int, ...], *arguments, **constants) -> None:
    """Run a kernel; arrays are read and written where they lie."""
    given = [torch.from_numpy(each) if isinstance(each, np.ndarray) else each for each in arguments]
    kernel[grid](*given, **constants)

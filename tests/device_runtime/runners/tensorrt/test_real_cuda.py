"""`CudaDevice` through the real cuda-python and pycuda, on a driver that copies late and fails."""

from __future__ import annotations

import json

import pytest
import real_bindings

from edgellm.device_runtime.kernels.triton import catalog


@pytest.mark.parametrize(
    ("major", "pycuda"),
    [
        ("12", ""),
        ("13", ""),
        ("13", "2026.1"),
        pytest.param("12", "2025.1.2", marks=pytest.mark.nightly),
    ],
)
def test_calls_of_the_driver(tmp_path, major, pycuda):
    """Their results, all kernels by name, and what happens if any one of them fails."""
    libraries = real_bindings.make_libraries(tmp_path)
    board = {"STUB_CUDA": {"12": "12060", "13": "13000"}[major]}
    board["STUB_SM"] = {"12": "87", "13": "110"}[major]
    printed = real_bindings.run(
        "stub_cuda_child.py", libraries, None, cuda=major, pycuda=pycuda, variables=board
    )
    found = json.loads(printed)
    assert found["pycuda"] == pycuda
    assert found["failures"] == {"device": [], "plugin": [], "machine": []}
    assert found["calls"]["device"] > 100
    assert found["kernels"] == sum(len([*catalog.variants(sm)]) for sm in catalog.TARGETS)

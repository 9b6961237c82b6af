"""`CudaDevice` through NVIDIA's own cuda-python, on a driver that copies late and may fail."""

from __future__ import annotations

import json

import pytest
import real_bindings

from edgellm.device_runtime.kernels.triton import catalog


@pytest.mark.parametrize(("major", "driver", "sm"), [("12", "12060", "87"), ("13", "13000", "110")])
def test_calls_of_the_driver(tmp_path, major, driver, sm):
    """Their results, all kernels by name, and what happens if any one of them fails."""
    libraries = real_bindings.make_libraries(tmp_path)
    board = {"STUB_CUDA": driver, "STUB_SM": sm}
    printed = real_bindings.run("stub_cuda_child.py", libraries, None, cuda=major, variables=board)
    found = json.loads(printed)
    assert found["failures"] == {"device": [], "plugin": [], "machine": []}
    assert found["calls"]["device"] > 100
    assert found["kernels"] == sum(len([*catalog.variants(sm)]) for sm in catalog.TARGETS)

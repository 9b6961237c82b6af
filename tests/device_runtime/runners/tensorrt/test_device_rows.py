"""Arrays that stay on the device equal NumPy's, and raise after they are freed."""

from __future__ import annotations

import numpy as np
import pytest
from fake_gpu import FakeDevice

from edgellm.device_runtime.runners.tensorrt import device_tensors
from edgellm.device_runtime.runners.tensorrt.device_tensors import DeviceRows, RowMemory

WIDTH = 8


@pytest.fixture
def matrix(request):
    """The same rows on the device and on the host."""
    del request
    device = FakeDevice()
    host = np.random.default_rng(0).standard_normal((6, WIDTH)).astype(np.float32)
    buffer, pinned = device.allocate(host.nbytes), device.pinned(host.nbytes)
    pinned[:] = host.reshape(-1).view(np.uint8)
    device.upload(buffer.address, pinned)
    rows = DeviceRows(
        memory=RowMemory(device),
        address=buffer.address,
        rows=np.arange(6),
        width=WIDTH,
        dtype=np.dtype(np.float32),
        lead=1,
    )
    return rows, host, buffer, device


def test_rows_are_taken_in_any_order(matrix):
    rows, host, _, device = matrix
    assert rows.shape == (1, 6, WIDTH)
    path = np.array([0, 3, 4])
    waits = device.waits
    taken = rows[0][path].copy()
    parts = [taken[1:], taken[-1], taken[None], taken[None, None][0]]
    assert device.waits <= waits + 1  # of what is allocated for the first time
    expected = host[path]
    for found, wanted in zip(
        parts, [expected[1:], expected[-1], expected[None], expected[None]], strict=True
    ):
        assert found.shape == wanted.shape
        np.testing.assert_array_equal(np.asarray(found), wanted)
    assert np.asarray(taken, np.float16).dtype == np.float16


def test_storing_and_concatenating_device_rows_equals_numpy(matrix):
    rows, host, _, _ = matrix
    store = np.zeros_like(rows[0], shape=(5, WIDTH))
    store[0] = rows[0][5]
    store[np.array([1, 2])] = rows[0][:2]
    store[np.arange(3, 5)] = host[2:4]
    expected = host[[5, 0, 1, 2, 3]]
    np.testing.assert_array_equal(np.asarray(store), expected)
    joined = np.concatenate([store[np.array([4, 0])], rows[0]])
    assert isinstance(joined, DeviceRows)
    np.testing.assert_array_equal(np.asarray(joined), np.concatenate([expected[[4, 0]], host]))
    mixed = np.concatenate([store, host])
    assert isinstance(mixed, np.ndarray)
    np.testing.assert_array_equal(mixed, np.concatenate([expected, host]))


def test_buffers_are_reused(matrix):
    rows, *_, device = matrix
    rows[0].copy()
    free, waits = device.free_bytes(), device.waits
    for _ in range(5):
        rows[0].copy()
    assert (device.free_bytes(), device.waits) == (free, waits)


def test_a_prompts_rows_go_to_the_host_where_the_device_is_full(matrix, monkeypatch, caplog):
    rows, host, _, device = matrix
    monkeypatch.setattr(device, "_free", 100)
    found = rows[0].copy()
    assert isinstance(found, np.ndarray)
    assert "hidden states go to the host" in caplog.text
    np.testing.assert_array_equal(found, host)


def test_large_buffers_are_freed(matrix, monkeypatch):
    rows, *_, device = matrix
    monkeypatch.setattr(device_tensors, "_LARGEST_KEPT_BYTES", 100)
    free = device.free_bytes()
    copied = rows[0].copy()
    assert device.free_bytes() < free
    del copied
    assert device.free_bytes() == free


def test_rows_of_an_earlier_pass_are_rejected(matrix):
    rows, _, buffer, _ = matrix

    def gone() -> None:
        raise ValueError("read after the next one")

    late = DeviceRows(
        memory=rows.memory,
        address=buffer.address,
        rows=np.arange(2),
        width=WIDTH,
        dtype=np.dtype(np.float32),
        require=gone,
    )
    for use in (late.copy, late[:1].copy, lambda: np.asarray(late)):
        with pytest.raises(ValueError, match="after the next one"):
            use()

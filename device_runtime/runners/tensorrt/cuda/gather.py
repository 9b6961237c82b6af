"""Rows of a matrix in an order, copied within the device; PTX as in `compaction.py`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgellm.device_runtime.runners.tensorrt.cuda.protocols import Device

_BYTES = 64 << 10  # of indices that wait

KERNEL = "gather_rows"

# gather_rows(target, source, rows, row_words): block i writes row i of the target, which is row
# rows[i] of the source. Words have 16 bytes.
PTX = """
.version 7.0
.target sm_75
.address_size 64

.visible .entry gather_rows(
    .param .u64 target, .param .u64 source, .param .u64 rows, .param .u32 row_words)
{
    .reg .pred %p<2>;
    .reg .b32 %r<12>;
    .reg .b64 %rd<12>;

    ld.param.u64 %rd1, [target];
    ld.param.u64 %rd2, [source];
    ld.param.u64 %rd3, [rows];
    ld.param.u32 %r1, [row_words];
    cvta.to.global.u64 %rd1, %rd1;
    cvta.to.global.u64 %rd2, %rd2;
    cvta.to.global.u64 %rd3, %rd3;
    mov.u32 %r2, %ctaid.x;
    mul.wide.u32 %rd4, %r2, 4;
    add.u64 %rd3, %rd3, %rd4;
    ld.global.s32 %r3, [%rd3];         // row of the source
    mul.wide.u32 %rd5, %r2, %r1;
    shl.b64 %rd5, %rd5, 4;
    add.u64 %rd1, %rd1, %rd5;
    mul.wide.u32 %rd6, %r3, %r1;
    shl.b64 %rd6, %rd6, 4;
    add.u64 %rd2, %rd2, %rd6;
    mov.u32 %r4, %tid.x;
    mov.u32 %r5, %ntid.x;

WORDS:
    setp.ge.u32 %p1, %r4, %r1;
    @%p1 bra DONE;
    mul.wide.u32 %rd7, %r4, 16;
    add.u64 %rd8, %rd2, %rd7;
    add.u64 %rd9, %rd1, %rd7;
    ld.global.v4.u32 {%r6, %r7, %r8, %r9}, [%rd8];
    st.global.v4.u32 [%rd9], {%r6, %r7, %r8, %r9};
    add.u32 %r4, %r4, %r5;
    bra WORDS;

DONE:
    ret;
}
"""


class Indices:
    """Rows that the next kernels gather; the memory is reused after a synchronization."""

    def __init__(self, device: Device) -> None:
        self._device, self._used = device, 0
        self._on_device, self._on_host = device.allocate(_BYTES), device.pinned(_BYTES)

    def upload(self, rows: NDArray[np.int64]) -> int:
        """Where they will lie, int32; waits if all memory is in use."""
        size = 4 * len(rows)
        assert size <= _BYTES, "rows of a prompt are not gathered, they follow one another"
        if self._used + size > _BYTES:
            self._device.synchronize()
        start, self._used = self._used, self._used + size
        host = self._on_host[start : start + size]
        host.view(np.int32)[:] = rows
        self._device.upload(self._on_device.address + start, host)
        return self._on_device.address + start

    def waited(self) -> None:
        """The device has read them all."""
        self._used = 0


def is_run(rows: NDArray[np.int64]) -> bool:
    """Whether rows follow one another."""
    return len(rows) < 2 or bool((np.diff(rows) == 1).all())

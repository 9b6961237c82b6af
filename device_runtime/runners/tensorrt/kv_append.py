"""Appends new positions to the KV cache, for engines that output keys and values.

The kernel is PTX, as in `kv_compaction.py`. It reads the write index from device memory, so a
recorded pass can be replayed.
"""

from __future__ import annotations

KERNEL = "append_rows"

# append_rows(cache, rows, write_index, count, planes, stride, plane_words, row_words): block x is
# a plane, one of `planes` of its tensor; tensors of rows [planes, count, row] lie `stride` bytes
# apart. Row i of a plane goes to row write_index[0] + i of the cache's. Words have 16 bytes; rows
# of a plane follow one another on both sides, so that a plane is one run of words.
PTX = """
.version 7.0
.target sm_75
.address_size 64

.visible .entry append_rows(
    .param .u64 cache, .param .u64 rows, .param .u64 write_index, .param .u32 count,
    .param .u32 planes, .param .u64 stride, .param .u64 plane_words, .param .u32 row_words)
{
    .reg .pred %p<2>;
    .reg .b32 %r<16>;
    .reg .b64 %rd<16>;

    ld.param.u64 %rd1, [cache];
    ld.param.u64 %rd2, [rows];
    ld.param.u64 %rd3, [write_index];
    ld.param.u32 %r1, [count];
    ld.param.u32 %r2, [planes];
    ld.param.u64 %rd4, [stride];
    ld.param.u64 %rd5, [plane_words];
    ld.param.u32 %r3, [row_words];
    cvta.to.global.u64 %rd1, %rd1;
    cvta.to.global.u64 %rd2, %rd2;
    cvta.to.global.u64 %rd3, %rd3;
    mov.u32 %r4, %ctaid.x;
    div.u32 %r5, %r4, %r2;             // tensor
    rem.u32 %r6, %r4, %r2;             // plane of it
    mul.lo.u32 %r7, %r1, %r3;          // words of a run

    cvt.u64.u32 %rd6, %r5;
    mul.lo.u64 %rd6, %rd6, %rd4;
    mul.wide.u32 %rd7, %r6, %r7;
    shl.b64 %rd7, %rd7, 4;
    add.u64 %rd2, %rd2, %rd6;
    add.u64 %rd2, %rd2, %rd7;          // the run

    ld.global.u64 %rd8, [%rd3];
    cvt.u64.u32 %rd9, %r3;
    mul.lo.u64 %rd8, %rd8, %rd9;       // words before it in its plane
    cvt.u64.u32 %rd10, %r4;
    mul.lo.u64 %rd10, %rd10, %rd5;
    add.u64 %rd8, %rd8, %rd10;
    shl.b64 %rd8, %rd8, 4;
    add.u64 %rd1, %rd1, %rd8;          // its place

    mov.u32 %r8, %tid.x;
    mov.u32 %r9, %ntid.x;

WORDS:
    setp.ge.u32 %p1, %r8, %r7;
    @%p1 bra DONE;
    mul.wide.u32 %rd11, %r8, 16;
    add.u64 %rd12, %rd2, %rd11;
    add.u64 %rd13, %rd1, %rd11;
    ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd12];
    st.global.v4.u32 [%rd13], {%r10, %r11, %r12, %r13};
    add.u32 %r8, %r8, %r9;
    bra WORDS;

DONE:
    ret;
}
"""

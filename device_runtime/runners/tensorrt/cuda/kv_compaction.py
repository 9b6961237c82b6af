"""A kernel for GPUs that edgellm brings along: accepted rows of a KV cache move together.

It is written in PTX, which the driver compiles, so that a device needs neither nvcc nor NVRTC.
"""

from __future__ import annotations

from collections.abc import Sequence

KERNEL = "move_rows"
WORD_BYTES = 16  # rows of a cache are moved in words

# move_rows(cache, rows, count, first, plane_words, row_words): in every plane, a block's, row
# first + i takes what row first + rows[i] holds, i ascending. A thread moves the same word of all
# rows, one after the other, and rows[i] >= i: so no row is overwritten before it was read.
PTX = """
.version 7.0
.target sm_75
.address_size 64

.visible .entry move_rows(
    .param .u64 cache, .param .u64 rows, .param .u32 count, .param .u32 first,
    .param .u64 plane_words, .param .u32 row_words)
{
    .reg .pred %p<4>;
    .reg .b32 %r<16>;
    .reg .b64 %rd<16>;

    ld.param.u64 %rd1, [cache];
    ld.param.u64 %rd2, [rows];
    ld.param.s32 %r1, [count];
    ld.param.s32 %r2, [first];
    ld.param.s64 %rd3, [plane_words];
    ld.param.s32 %r3, [row_words];
    cvta.to.global.u64 %rd1, %rd1;
    cvta.to.global.u64 %rd2, %rd2;
    mov.u32 %r4, %ctaid.x;
    cvt.u64.u32 %rd4, %r4;
    mul.lo.s64 %rd4, %rd4, %rd3;
    shl.b64 %rd4, %rd4, 4;
    add.s64 %rd4, %rd1, %rd4;          // plane
    mul.wide.s32 %rd5, %r3, 16;        // bytes of a row
    mul.wide.s32 %rd6, %r2, 16;
    cvt.s64.s32 %rd7, %r3;
    mul.lo.s64 %rd6, %rd6, %rd7;
    add.s64 %rd6, %rd4, %rd6;          // row `first`
    mov.u32 %r5, %tid.x;               // word
    mov.u32 %r6, %ntid.x;
    setp.lt.s32 %p2, %r1, 1;
    @%p2 bra DONE;

WORDS:
    setp.ge.s32 %p1, %r5, %r3;
    @%p1 bra DONE;
    mul.wide.s32 %rd8, %r5, 16;
    add.s64 %rd9, %rd6, %rd8;          // this word of row `first`
    mov.u64 %rd10, %rd9;               // where the next row goes
    mov.u64 %rd11, %rd2;               // its entry in rows
    mov.u32 %r7, 0;

ROWS:
    ld.global.s32 %r8, [%rd11];
    cvt.s64.s32 %rd12, %r8;
    mul.lo.s64 %rd12, %rd12, %rd5;
    add.s64 %rd12, %rd9, %rd12;
    ld.global.v4.u32 {%r9, %r10, %r11, %r12}, [%rd12];
    st.global.v4.u32 [%rd10], {%r9, %r10, %r11, %r12};
    add.s64 %rd10, %rd10, %rd5;
    add.s64 %rd11, %rd11, 4;
    add.s32 %r7, %r7, 1;
    setp.lt.s32 %p3, %r7, %r1;
    @%p3 bra ROWS;

    add.s32 %r5, %r5, %r6;
    bra WORDS;

DONE:
    ret;
}
"""


def displaced(rows: Sequence[int]) -> bool:
    """Whether rows do not stand where they belong yet; `rows` ascend from 0 on."""
    return rows[-1] + 1 > len(rows)

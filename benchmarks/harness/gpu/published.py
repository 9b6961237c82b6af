"""Published rows of TensorRT Edge-LLM on a Jetson AGX Thor and AGX Orin, and their models' shapes.

Rows are those of its page "Performance Benchmarks" (0.4.0, 0.7.0, 0.7.1). Of 0.9.0 only the plain
and EAGLE3 rows of the AGX Orin are here, without prompts: they test the share of Orin's bandwidth.
A published time of a prompt is that of all sequences of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

# Release, model, precision, way, batch, tokens of all prompts, their ms, tokens/s, accepted tokens
# of a round. "vit-fp8": another precision of the image encoder, which no figure here includes.
_THOR = """
0.4.0 Llama-3.1-8B int4 plain 1 383 215.5 50.8
0.4.0 Llama-3.1-8B int4 plain 8 3064 2737.4 135.3
0.4.0 Llama-3.1-8B nvfp4 plain 1 383 31.0 54.9
0.4.0 Llama-3.1-8B nvfp4 plain 8 3064 387.6 308.7
0.4.0 Qwen3-0.6B int4 plain 1 366 21.0 270.2
0.4.0 Qwen3-0.6B int4 plain 8 2927 241.8 828.0
0.4.0 Qwen3-0.6B nvfp4 plain 1 366 8.8 318.6
0.4.0 Qwen3-0.6B nvfp4 plain 8 2927 95.4 1562.4
0.4.0 Qwen3-4B int4 plain 1 364 116.2 76.4
0.4.0 Qwen3-4B int4 plain 8 2911 1502.3 240.3
0.4.0 Qwen3-4B nvfp4 plain 1 364 22.9 90.2
0.4.0 Qwen3-4B nvfp4 plain 8 2911 301.9 507.4
0.4.0 Qwen3-8B int4 plain 1 366 212.0 47.7
0.4.0 Qwen3-8B int4 plain 8 2927 2719.1 162.3
0.4.0 Qwen3-8B nvfp4 plain 1 366 32.8 53.7
0.4.0 Qwen3-8B nvfp4 plain 8 2927 425.8 372.2
0.4.0 Qwen2.5-VL-7B int4 plain 1 376 195.1 53.1
0.4.0 Qwen2.5-VL-7B int4 plain,vit-fp8 1 376 195.1 53.1
0.4.0 Qwen2.5-VL-7B nvfp4 plain 1 376 25.7 57.7
0.4.0 Qwen2.5-VL-7B nvfp4 plain,vit-fp8 1 376 25.7 57.6
0.4.0 Qwen3-VL-2B int4 plain 1 283 39.4 144.4
0.4.0 Qwen3-VL-2B int4 plain,vit-fp8 1 283 39.4 144.7
0.4.0 Qwen3-VL-2B nvfp4 plain 1 283 10.1 180.8
0.4.0 Qwen3-VL-2B nvfp4 plain,vit-fp8 1 283 10.1 181.0
0.4.0 Llama-3.1-8B int4 eagle3 1 382 215.2 81.0 5.25
0.4.0 Llama-3.1-8B int4 eagle3 8 3056 2735.5 118.0 5.21
0.4.0 Llama-3.1-8B nvfp4 eagle3 1 382 30.8 189.2 5.21
0.4.0 Llama-3.1-8B nvfp4 eagle3 8 3056 413.1 484.7 5.15
0.4.0 Qwen3-8B int4 eagle3 1 366 212.2 66.1 4.36
0.4.0 Qwen3-8B int4 eagle3 8 2927 2719.1 99.1 4.31
0.4.0 Qwen3-8B nvfp4 eagle3 1 366 33.1 151.7 4.26
0.4.0 Qwen3-8B nvfp4 eagle3 8 2927 429.1 457.7 4.25
0.4.0 Qwen2.5-VL-7B int4 eagle3 1 376 195.1 57.3 3.66
0.4.0 Qwen2.5-VL-7B nvfp4 eagle3 1 376 25.8 149.6 3.82
0.4.0 Qwen2.5-VL-7B nvfp4 eagle3,vit-fp8 1 376 32.8 117.3 3.76
0.7.0 Qwen3-1.7B nvfp4 plain 1 370 13.9 170.4
0.7.0 Qwen3-1.7B nvfp4 plain 8 2959 150.5 798.8
0.7.0 Qwen3-30B-A3B int4 plain 1 370 125.3 81.3
0.7.0 Qwen3-30B-A3B int4 plain 8 2959 1342.2 223.2
0.7.0 Nemotron-3-Nano-4B nvfp4 plain 1 383 126.8 65.4
0.7.0 Nemotron-3-Nano-4B nvfp4 plain 8 3062 1017.6 315.4
0.7.0 Qwen3.5-0.8B nvfp4 plain 1 753 7.0 232.2
0.7.0 Qwen3.5-2B nvfp4 plain 1 753 13.8 111.0
0.7.0 Qwen3.5-27B nvfp4 plain 1 753 122.6 10.5
0.7.0 Nemotron-3-Nano-Omni-30B-A3B nvfp4 plain 1 1663 846.7 24.5
0.7.0 Qwen3-1.7B nvfp4 eagle3 1 370 14.5 312.4 3.75
0.7.0 Qwen3-1.7B nvfp4 eagle3 8 2959 153.5 828.8 3.73
0.7.1 Qwen3-1.7B nvfp4 plain 1 370 11.2 173.2
0.7.1 Qwen3-1.7B nvfp4 plain 8 2959 132.5 935.8
0.7.1 Qwen3-30B-A3B int4 plain 1 370 133.2 72.6
0.7.1 Qwen3-30B-A3B int4 plain 8 2959 1344.5 215.9
0.7.1 Nemotron-3-Nano-4B nvfp4 plain 1 383 127.4 64.7
0.7.1 Nemotron-3-Nano-4B nvfp4 plain 8 3062 986.6 312.9
0.7.1 Qwen2.5-VL-7B nvfp4 plain 1 376 31.0 49.5
0.7.1 Qwen3.5-0.8B nvfp4 plain 1 287 9.4 287.0
0.7.1 Qwen3.5-2B nvfp4 plain 1 287 12.7 164.4
0.7.1 Qwen3.5-27B nvfp4 plain 1 287 103.3 16.1
0.7.1 Nemotron-3-Nano-Omni-30B-A3B nvfp4 plain 1 1663 226.0 31.3
0.7.1 Qwen3-1.7B nvfp4 eagle3 1 370 12.2 339.0 3.7
0.7.1 Qwen3-1.7B nvfp4 eagle3 8 2959 132.3 984.9 3.7
0.7.1 Qwen3.5-0.8B nvfp4 mtp 1 287 9.2 348.5 2.1
0.7.1 Qwen3.5-0.8B nvfp4 mtp 8 2227 69.0 1056.7 2.2
0.7.1 Qwen3.5-2B nvfp4 mtp 1 287 13.8 236.9 2.4
0.7.1 Qwen3.5-2B nvfp4 mtp 8 2227 89.7 787.2 2.4
0.7.1 Qwen3.5-27B nvfp4 mtp 1 287 111.1 34.2 2.8
0.7.1 Qwen3.5-27B nvfp4 mtp 8 2227 811.0 146.7 2.8
"""
_ORIN = """
0.9.0 Qwen3-1.7B int4 plain 1 0 0 98.6
0.9.0 Qwen3-8B int4 plain 1 0 0 32.5
0.9.0 Qwen3-VL-4B int4 plain 1 0 0 52.4
0.9.0 Qwen3-1.7B int4 eagle3 1 0 0 128.2 3.18
0.9.0 Qwen3-8B int4 eagle3 1 0 0 59.3 4.22
0.9.0 Qwen3-VL-4B int4 eagle3 1 0 0 96.2 4.95
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published row."""

    board: str
    release: str
    model: str
    precision: str
    way: str  # plain, eagle3 or mtp; with ",vit-fp8" if the image encoder is FP8
    batch: int
    prompt_tokens: int  # of all sequences; 0: not published
    prompt_ms: float
    rate: float  # tokens/s of all sequences
    accepted: float  # tokens of a round; 1: plain decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a decoder. `linear` counts the weights of all layers, without the head."""

    layers: int
    hidden: int
    linear: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    attentions: int = 0  # layers with a KV cache; 0: all
    state_bytes: int = 0  # of all recurrent layers

    @property
    def caches(self) -> int:
        """Return the number of layers with a KV cache."""
        return self.attentions or self.layers

    @property
    def width(self) -> int:
        """Return the numbers of a token's queries in a layer."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Return the numbers of a token's keys in a layer."""
        return self.kv_heads * self.head_dim

    @property
    def kv_token_bytes(self) -> int:
        """Return the bytes of a token in a float16 KV cache."""
        return 2 * self.caches * self.kv_width * 2


def transformer(
    layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocab: int
) -> Shape:
    """Return the shape of a dense decoder with heads of 128 and a gated feed-forward network."""
    width, kv_width = heads * 128, kv_heads * 128
    linear = layers * (hidden * (2 * width + 2 * kv_width) + 3 * hidden * inner)
    return Shape(
        layers=layers, hidden=hidden, linear=linear, vocab=vocab, heads=heads, kv_heads=kv_heads
    )


def qwen3_5(layers: int, hidden: int, heads: int, kv_heads: int, inner: int, states: int) -> Shape:
    """Return the shape of a Qwen3.5: three layers of gated delta nets, one of gated attention.

    `states` is the number of value heads of a delta net; there are 16 key heads, all of 128.
    """
    width, kv_width, keys, values = heads * 256, kv_heads * 256, 16 * 128, states * 128
    attention = hidden * (3 * width + 2 * kv_width)
    delta = hidden * (2 * keys + 3 * values + 2 * states)
    full = layers // 4
    linear = full * attention + (layers - full) * delta + layers * 3 * hidden * inner
    return Shape(
        layers=layers,
        hidden=hidden,
        linear=linear,
        vocab=248320,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=256,
        attentions=full,
        state_bytes=(layers - full) * states * 128 * 128 * 4,
    )


def _nemotron_3_nano_4b() -> Shape:
    """21 layers of Mamba 2, 17 of a feed-forward network without gate, 4 of attention."""
    hidden, inner, values = 3136, 12544, 96 * 80
    mamba = hidden * (2 * values + 2 * 8 * 128 + 96) + values * hidden
    attention = hidden * 128 * (2 * 40 + 2 * 8)
    return Shape(
        layers=42,
        hidden=hidden,
        linear=21 * mamba + 17 * 2 * hidden * inner + 4 * attention,
        vocab=131072,
        heads=40,
        kv_heads=8,
        attentions=4,
        state_bytes=21 * values * 128 * 4,
    )


LLAMA_8B = transformer(32, 4096, 32, 8, 14336, 128256)
SHAPES = {
    "Llama-3.1-8B": LLAMA_8B,
    "Qwen3-0.6B": transformer(28, 1024, 16, 8, 3072, 151936),
    "Qwen3-1.7B": transformer(28, 2048, 16, 8, 6144, 151936),
    "Qwen3-4B": transformer(36, 2560, 32, 8, 9728, 151936),
    "Qwen3-8B": transformer(36, 4096, 32, 8, 12288, 151936),
    "Qwen2.5-VL-7B": transformer(28, 3584, 28, 4, 18944, 152064),
    "Qwen3-VL-2B": transformer(28, 2048, 16, 8, 6144, 151936),
    "Qwen3-VL-4B": transformer(36, 2560, 32, 8, 9728, 151936),
    "Qwen3.5-0.8B": qwen3_5(24, 1024, 8, 2, 3584, 16),
    "Qwen3.5-2B": qwen3_5(24, 2048, 8, 2, 6144, 16),
    "Qwen3.5-27B": qwen3_5(64, 5120, 24, 4, 17408, 48),
    "Nemotron-3-Nano-4B": _nemotron_3_nano_4b(),
}


def why_not(row: Row) -> str:
    """Return why the model has no figure for a row; "" if it has one."""
    if row.model not in SHAPES:
        return "a mixture of experts: the model has no time of its products"
    if SHAPES[row.model].state_bytes and row.batch > 1:
        return "recurrent layers take one sequence"
    return ""


def why_no_prompt(row: Row) -> str:
    """Return why the model has no time of a row's prompts; "" if it has one."""
    if reason := why_not(row):
        return reason
    if SHAPES[row.model].state_bytes:
        return "recurrent layers: their time over a prompt is not known"
    return ""


def _read(board: str, text: str) -> list[Row]:
    rows = []
    for line in text.split("\n"):
        if not line:
            continue
        release, model, precision, way, batch, tokens, ms, rate, *accepted = line.split()
        rows.append(
            Row(
                board=board,
                release=release,
                model=model,
                precision=precision,
                way=way,
                batch=int(batch),
                prompt_tokens=int(tokens),
                prompt_ms=float(ms),
                rate=float(rate),
                accepted=float(accepted[0]) if accepted else 1.0,
            )
        )
    return rows


ROWS = [*_read("Thor", _THOR), *_read("Orin", _ORIN)]

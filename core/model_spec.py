"""The facts of networks that manifests state. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

ROW_CODES = ("int8_rows", "fp8_rows")  # types of a cache whose rows have a scale each, fp16


@dataclass(frozen=True, slots=True)
class CacheRanges:
    """The largest magnitudes that a calibration found in a KV cache, layer by layer."""

    calibrated_for: str  # "fp8" or "int8": what the checkpoint's cache is meant to hold
    keys: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PageSpec:
    """How the caches of several sequences share memory."""

    rows: int  # of a page
    windows: tuple[int, ...]  # by layer: rows that a row sees, its own included; 0: all
    pass_rows: int = 0  # of a sequence in a pass at most, so that windows bound pages; 0: any


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Keys and values [1, num_kv_heads, C, head_dim] of each layer that attends, or of pages."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    ranges: CacheRanges | None = None  # None: the KV cache has no calibrated ranges
    pages: PageSpec | None = None  # None: one sequence, whose rows lie in one piece

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all layers' keys and values of one token."""
        itemsize = {"float32": 4, "float16": 2}.get(self.dtype, 1)
        scale_bytes = 2 if self.dtype in ROW_CODES else 0
        row_bytes = self.head_dim * itemsize + scale_bytes
        return 2 * self.num_layers * self.num_kv_heads * row_bytes


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """How a decoder takes images: as token ids from `vocab_size` on, rows of IMAGE_EMBEDS."""

    model_type: str  # of the vision-language model, whose encoder makes the rows
    token_id: int  # the placeholder that a processor repeats for every row of an image
    num_deepstack: int = 0  # L of DEEPSTACK_EMBEDS


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """What recurrent layers keep of a sequence, and what a pass gives of its rows, by name."""

    states: dict[str, tuple[int, ...]]  # shapes; of zeros before the first row
    rows: dict[str, int]  # numbers of a row


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The facts about a decoder that a builder or a runtime needs."""

    model_type: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    num_parameters: int
    kv: KVCacheSpec
    sliding_window: int | None = None
    position_axes: int = 1  # 3: time, row and column (M-RoPE)
    images: ImageSpec | None = None  # None: text only
    recurrent: RecurrentSpec | None = None  # None: all layers attend
    rotation: str = ""  # of the residual stream since it was trained; "": none
    num_layers: int = 0  # 0: those of the cache


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """A block that one forward pass predicts: the newest token, then mask tokens."""

    size: int  # rows
    mask_token_id: int
    from_newest: bool  # position i predicts the next token; else its own, and position 0 none
    is_causal: bool  # rows see those before them; if not, all of the block
    links: int  # likeliest candidates of a row with scores by the candidate before; 0: none
    window: int | None = None  # tokens of the text that the draft was trained to see; None: all

    @property
    def levels(self) -> int:
        """Of a tree that is made of it."""
        return self.size if self.from_newest else self.size - 1


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """The facts about a draft network, and about the base that it was trained for.

    A tap is a residual stream of the base: i < num_layers enters layer i (Hugging Face's
    `hidden_states[i]`), i = num_layers is the output of the final norm.
    """

    method: str  # as its authors call it; of "medusa" `decoder` has no layers and no cache
    decoder: DecoderSpec  # the draft's own sizes and KV cache; `vocab_size` is the base's
    draft_vocab_size: int
    base_hidden_size: int
    base_num_layers: int
    hidden_taps: tuple[int, ...]
    fuses: bool  # features pass through the `fuse` graph; if not, they are `draft_hidden`
    num_heads: int = 0  # of "medusa" and "peagle": head, or masked row, d gives level d + 1
    mask_token_id: int | None = None  # of such rows
    base_rotation: str = ""  # of the base's residual stream, which fc reads as it is
    block: BlockSpec | None = None  # of drafts of blocks

    @property
    def taps_width(self) -> int:
        """Numbers of the base's features of a row, T*H."""
        return len(self.hidden_taps) * self.base_hidden_size


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """The facts about a visual encoder that a runtime needs; images are RGB.

    With `image_size` 0 an image is a grid of patches of any size whose sides are multiples of
    `merge_size`; else it is cut into square tiles, all of the same number of tokens.
    """

    model_type: str
    hidden_size: int  # H of the language model, the width of `image_embeds`
    patch_size: int  # pixels
    merge_size: int  # M: a token is a block of M * M patches
    temporal_patch_size: int  # frames of a patch; an image is repeated as often
    window_size: int  # side of an attention window in patches (Z is its square); 0: no windows
    position_grid: int  # side of the learned table of positions; 0: there is none to interpolate
    num_deepstack: int  # L
    image_size: int  # E of tiles, 0 without
    tokens_per_tile: int  # 0 without tiles
    num_parameters: int

    @property
    def patch_values(self) -> int:
        """Numbers of one flattened patch: channel, frame, row, column."""
        return 3 * self.temporal_patch_size * self.patch_size**2

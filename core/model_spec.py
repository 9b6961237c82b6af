"""Facts of networks in manifests, and sizes of their KV caches. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field

POOLINGS = ("last", "mean", "cls")  # of hidden states: the last token's, their mean, the first's
POOLER_FILE = "pooler.safetensors"  # of bundles and engines: weights of `PoolerSpec.dense`
# Cache type: codes with one fp16 scale for each block of a rotated head. Pages have bytes. A token
# attends to the last positions, its own included, in fp16; further layers of the pages have them.
INT4, INT4_BLOCK, INT4_RECENT = "int4", 32, 128
BFLOAT16 = "bfloat16"  # cache type on CPUs, whose attention rounds queries and weights, too
ROW_CODES = ("int8_rows", "fp8_rows")  # cache types with one fp16 scale for each row
# Tokens before the window that stay cached: a later prompt may diverge this far back.
SPARE_ROWS = 64


@dataclass(frozen=True, slots=True)
class CacheRanges:
    """Calibrated maximum magnitudes of keys and values, by layer."""

    calibrated_for: str  # "fp8" or "int8": intended type of the checkpoint's cache
    keys: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PageSpec:
    """Pages of the KV cache, which the sequences of a batch share."""

    rows: int  # of a page
    # By layer: tokens that a token attends to, itself included; 0: all. INT4: then INT4_RECENT each
    windows: tuple[int, ...]
    pass_rows: int = 0  # maximum of a sequence in a pass, so that windows bound pages; 0: any


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """Keys and values [1, num_kv_heads, C, head_dim] of each attention layer, or of pages."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    ranges: CacheRanges | None = None  # None: the KV cache has no calibrated ranges
    pages: PageSpec | None = None  # None: one sequence, whose rows lie in one piece
    heads: tuple[tuple[int, int], ...] = ()  # num_kv_heads, head_dim of each layer; (): all alike

    def heads_of(self, layer: int) -> tuple[int, int]:
        """KV heads of a layer, and their size."""
        return self.heads[layer] if self.heads else (self.num_kv_heads, self.head_dim)

    @property
    def array_dtype(self) -> str:
        """NumPy's type of the arrays that hold the cache."""
        return {INT4: "uint8", BFLOAT16: "uint16"}.get(self.dtype, self.dtype)

    def array_heads(self, layer: int) -> tuple[int, int]:
        """KV heads of a layer, and the elements that a position of a head takes in an array."""
        if self.dtype != INT4:
            return self.heads_of(layer)
        num_kv_heads, head_dim = self.heads_of(layer % self.num_layers)
        block_bytes = INT4_BLOCK // 2 + 2 if layer < self.num_layers else 2 * INT4_BLOCK
        return num_kv_heads, -(-head_dim // INT4_BLOCK) * block_bytes

    def layer_bytes(self, layer: int) -> int:
        """Bytes of keys and values of one token in a layer."""
        num_kv_heads, elements = self.array_heads(layer)
        itemsize = {"float32": 4, "float16": 2, BFLOAT16: 2}.get(self.dtype, 1)
        scale_bytes = 2 if self.dtype in ROW_CODES else 0
        return 2 * num_kv_heads * (elements * itemsize + scale_bytes)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        return sum(map(self.layer_bytes, range(self.num_layers)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """A linear layer after pooling: activation(x W^T + b), then a layer norm if it has one.

    Layer i has the tensors `i.weight` [out, in], `i.bias` [out], `i.norm_weight` and `i.norm_bias`
    [out] of `POOLER_FILE`; absent biases are zeros.
    """

    in_features: int
    out_features: int
    activation: str = ""  # "": none
    norm_epsilon: float = 0.0  # of the layer norm; 0: it has none


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankSpec:
    """Input of a reranker; its pooled vector [1] is the score of a document for a query.

    Without a body, the input is a pair of texts, as the tokenizer's post-processor joins them.
    Prefix and suffix are tokenized alone, and a body that is too long is cut between them.
    """

    prefix: str = ""
    body: str = ""  # with {instruction}, {query} and {document}
    suffix: str = ""
    instruction: str = ""  # of requests that give none


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolerSpec:
    """What follows the pooling of an embedding model or reranker, and its prompts."""

    dense: tuple[DenseSpec, ...] = ()
    normalize: bool = True  # to length 1
    dimensions: int = 0  # first elements of the vector that are kept; 0: all
    prompts: dict[str, str] = field(default_factory=dict)  # texts before the input, by name
    default_prompt: str | None = None  # name of the prompt of inputs that name none
    pools_prompt: bool = True  # False: the tokens of the prompt are not pooled
    max_tokens: int = 0  # of a text; 0: those of the engine
    rerank: RerankSpec | None = None  # None: the vector is an embedding


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """Images and audio of a decoder: token ids from `vocab_size` on are rows of IMAGE_EMBEDS."""

    model_type: str  # of the whole model, whose encoders compute the rows
    # The placeholder that a processor repeats for every row of an image; None: takes no images
    token_id: int | None
    audio_token_id: int | None = None  # that of audio; None: takes none
    # Ids before and after the tokens of a clip, where a template writes the placeholder alone
    audio_ends: tuple[int, ...] = ()
    num_deepstack: int = 0  # L of DEEPSTACK_EMBEDS
    # Maximum consecutive image tokens, which all attend to each other; 0: attention is causal.
    bidirectional_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioSpec:
    """Audio that a decoder transcribes: windows of log-mel features, and tokens of its prompts.

    A frame has 10 ms, a position of the encoder two frames, and so has a step of timestamps.
    """

    num_mel_bins: int
    num_positions: int  # A of a window
    num_heads: int  # of attention to audio
    start_id: int  # first token of a prompt
    languages: dict[str, int]  # token ids by code; {}: English only
    tasks: dict[str, int]  # token ids of "transcribe" and "translate"; {}: transcribes only
    no_timestamps_id: int  # asks for plain text; the next ids are timestamps
    max_initial_timestamp: int | None  # steps; None: any
    suppressed: tuple[int, ...]  # tokens that are never chosen
    suppressed_first: tuple[int, ...]  # that are not chosen as the first of a window
    # Layers and heads whose attention to audio follows the words, ascending
    alignment_heads: tuple[tuple[int, int], ...]
    median_filter_width: int  # positions of that attention that are smoothed together, odd

    @property
    def num_frames(self) -> int:
        """F, frames of a window."""
        return 2 * self.num_positions

    @property
    def first_timestamp_id(self) -> int:
        """The token of the window's begin."""
        return self.no_timestamps_id + 1

    @property
    def no_speech_id(self) -> int:
        """The token whose probability at the start is that of a window without speech."""
        return self.no_timestamps_id - 1

    @property
    def previous_id(self) -> int:
        """The token before the text of earlier windows."""
        return self.no_timestamps_id - 2


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """States of recurrent layers, and outputs of a pass by token, by name."""

    states: dict[str, tuple[int, ...]]  # shapes; zeros before the first token
    rows: dict[str, int]  # numbers of a token


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Facts of a decoder for builders and the runtime."""

    model_type: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    num_parameters: int
    kv: KVCacheSpec
    sliding_window: int | None = None
    position_axes: int = 1  # 3: time, row and column (M-RoPE)
    images: ImageSpec | None = None  # None: text only, or a speech model
    audio: AudioSpec | None = None  # None: no speech model
    recurrent: RecurrentSpec | None = None  # None: all layers are attention layers
    rotation: str = ""  # of the residual stream after training; "": none
    num_layers: int = 0  # 0: those of the cache
    is_causal: bool = True  # False: an encoder, whose passes are whole texts; it has no logits
    token_types: int = 1  # ids from `vocab_size` on are of the second text of a pair

    @property
    def has_uniform_layers(self) -> bool:
        """Whether each attention layer has its own KV cache, all of the same shape."""
        is_shared = self.recurrent is None and self.num_layers > self.kv.num_layers
        return not self.kv.heads and not is_shared

    @property
    def min_chunk(self) -> int:
        """Tokens that a prefill chunk must hold at least: those of an image, if not causal."""
        return 1 if self.images is None else max(self.images.bidirectional_tokens, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """A block that one forward pass predicts: the newest token, then mask tokens."""

    size: int  # rows
    mask_token_id: int
    from_newest: bool  # position i predicts the next token; else its own, and position 0 none
    is_causal: bool  # rows see those before them; if not, all of the block
    links: int  # likeliest candidates of a row with scores by the candidate before; 0: none
    # Maximum text tokens that the draft attends to, in artifacts of earlier versions: their layers
    # have no windows. None: all, or those of the layers.
    window: int | None = None

    @property
    def levels(self) -> int:
        """Levels of a tree that is made from it."""
        return self.size if self.from_newest else self.size - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """Facts of a draft network, and of the base that it was trained for.

    A tap is an auxiliary hidden state of the base: i < num_layers is the input of layer i (Hugging
    Face's `hidden_states[i]`), i = num_layers is the output of the final norm.
    """

    method: str  # its published name; with "medusa" `decoder` has no layers and no cache
    decoder: DecoderSpec  # the draft's own sizes and KV cache; `vocab_size` is the base's
    draft_vocab_size: int
    base_hidden_size: int
    base_num_layers: int
    hidden_taps: tuple[int, ...]
    fuses: bool  # hidden states pass through the `fuse` graph; else they are `draft_hidden`
    num_heads: int = 0  # "medusa" and "peagle": head, or masked position, d predicts level d + 1
    mask_token_id: int | None = None  # of masked positions
    base_rotation: str = ""  # of the base's residual stream, which fc reads unchanged
    block: BlockSpec | None = None  # of block drafters
    num_candidates: int = 0  # of a position, which a low-rank head retrieves; 0: all tokens

    @property
    def max_candidates(self) -> int:
        """Maximum candidates of a position."""
        return self.num_candidates or self.draft_vocab_size

    @property
    def num_trailing(self) -> int:
        """Maximum block or mask tokens after the text of a pass, whose KV is not kept."""
        return self.block.size if self.block is not None else max(self.num_heads - 1, 0)

    @property
    def taps_width(self) -> int:
        """Width of the base's auxiliary hidden states of a token, T*H."""
        return len(self.hidden_taps) * self.base_hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """Facts of a visual encoder for the runtime; images are RGB.

    With `image_size` 0, an image is a grid of patches of any size with sides that are multiples of
    `merge_size`. Else it is cut into square tiles, all with the same number of tokens.
    """

    model_type: str
    hidden_size: int  # H of the language model, the width of `image_embeds`
    patch_size: int  # pixels
    merge_size: int  # M: a token is a block of M * M patches
    temporal_patch_size: int  # frames of a patch; an image is repeated this often
    window_size: int  # side of an attention window in patches (Z is its square); 0: no windows
    position_grid: int  # side of the table of learned positions; 0: none to interpolate
    num_deepstack: int  # L
    image_size: int  # E of tiles, 0 without
    tokens_per_tile: int  # 0 without tiles
    num_parameters: int
    # The table is interpolated with antialiasing: `POS_EMBED_SHARES`, not four neighbours
    antialiases_positions: bool = False
    # A patch has the nearest position of the table: `POS_EMBED_INDEX` has one row, without weights
    has_nearest_positions: bool = False
    # The table is resized to columns by rows, with zeros around it, and read row by row
    exchanges_positions: bool = False

    @property
    def patch_values(self) -> int:
        """Numbers of one flattened patch: channel, frame, row, column."""
        return 3 * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioEncoderSpec:
    """Facts of the encoder of a chat model's audio, which is mono at 16 kHz.

    A clip is cut into chunks of features with the same number of tokens; the last may have fewer.
    """

    model_type: str  # of the whole model; it names a module of `edgellm.multimodal.audio_features`
    hidden_size: int  # H of the language model, the width of `audio_embeds`
    num_parameters: int
    num_mel_bins: int  # of a frame; 0: frames are samples
    chunk_frames: int  # of a chunk; of samples if there are no mel bins
    chunk_tokens: int  # of a whole chunk
    window_chunks: int = 1  # whose tokens attend to each other
    min_samples: int = 1  # of a clip; zeros follow a shorter one
    max_s: int = 0  # of a clip; 0: any
    block_rows: int = 0  # C of a conformer's blocks
    past_slots: int = 0  # of a block, before its rows
    future_slots: int = 0  # after them


# ------------------------------------------------------------------ pages and bytes of KV caches
def table_pages(pages: PageSpec, window: int, capacity: int) -> int:
    """Maximum pages of a sequence in layers with a window, 0: without.

    Args:
        pages: of the cache.
        window: tokens that a token attends to, itself included.
        capacity: tokens of a sequence.
    """
    whole = -(-capacity // pages.rows)
    if not (window and pages.pass_rows):
        return whole
    rows = window + SPARE_ROWS + pages.pass_rows
    return min(whole, -(-rows // pages.rows) + 1)  # the first may start anywhere in a page


def is_bounded(pages: PageSpec, capacity: int) -> bool:
    """Whether layers free the pages before their windows."""
    whole = table_pages(pages, 0, capacity)
    return any(table_pages(pages, window, capacity) < whole for window in pages.windows)


def pool_pages(pages: PageSpec, window: int, capacity: int, num_sequences: int) -> int:
    """Pages of all sequences together in layers with a window, 0: without.

    Bounded windows get the same number once more: for the end of a prompt, or a finished request.
    """
    held, whole = table_pages(pages, window, capacity), table_pages(pages, 0, capacity)
    return num_sequences * min(2 * held, whole)


def cache_bytes(cache: KVCacheSpec, capacity: int, num_sequences: int = 1) -> int:
    """Bytes of the caches of `num_sequences`, in whole pages if it has pages."""
    if cache.pages is None:
        return cache.bytes_per_token * capacity * num_sequences
    pages = cache.pages
    return sum(
        cache.layer_bytes(layer) * pages.rows * pool_pages(pages, window, capacity, num_sequences)
        for layer, window in enumerate(pages.windows)
    )


def held_bytes(cache: KVCacheSpec, length: int) -> int:
    """Bytes that a sequence of this length holds; windows hold more than is attended to."""
    if cache.pages is None:
        return cache.bytes_per_token * length
    pages = cache.pages
    return sum(
        cache.layer_bytes(layer) * min(table_pages(pages, window, length) * pages.rows, length)
        for layer, window in enumerate(pages.windows)
    )


def seen_bytes(cache: KVCacheSpec, length: int) -> int:
    """Bytes of the cache that a pass of one token reads after `length` positions."""
    windows = cache.pages.windows if cache.pages is not None else (0,) * cache.num_layers
    return sum(
        cache.layer_bytes(layer) * min(window or length, length)
        for layer, window in enumerate(windows)
    )

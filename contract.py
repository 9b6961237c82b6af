"""What host and device agree on: manifests, graph inputs and outputs, errors.

Standard library only, so that every other module may import it. Symbols used in shapes:
S query rows of one pass, R rows that get logits, C KV capacity, V vocabulary, H hidden size,
T hidden taps, D hidden size of a draft, K candidates of one row. Of a visual encoder: P patches of
an image, M their merge size, W windows of Z patches, N tiles of E pixels a side, L deepstack
levels.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from edgellm.strict_json import parse

CONTRACT_VERSION = 1
MANIFEST_NAME = "manifest.json"


class EdgeLLMError(Exception):
    """A failure that the user can mend: one line that says what, one that says how."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UnsupportedModelError(EdgeLLMError):
    """The checkpoint is sound, but edgellm does not know how to compute it."""


class BrokenArtifactError(EdgeLLMError):
    """A checkpoint, bundle or engine on disk is damaged, incomplete or of another version."""


class LimitError(EdgeLLMError):
    """Something does not fit: memory, prompt length, KV capacity."""


class RequestError(EdgeLLMError):
    """One request is malformed; the others of the file still run."""


# ------------------------------------------------------------------ graph inputs and outputs
INPUT_IDS = "input_ids"  # int64 [1, S]
POSITION_IDS = "position_ids"  # int64 [A, S], A axes; depth positions for tree nodes
WRITE_INDEX = "write_index"  # int64 [1]; rows already in the KV cache
TREE_MASK = "tree_mask"  # bool [S, S]; row i may see new row j; a draft's is [S, M], M >= S,
# and rules the last M slots: the tree grows by passes whose rows see some of the rows before
LOGITS_INDEX = "logits_index"  # int64 [R]; the rows that get logits
LOGITS = "logits"  # float32 [1, R, V]
TOKEN_IDS = "token_ids"  # int64 [1, R]; argmax of the logits
TOP_LOGITS = "top_logits"  # float32 [1, R]; the logits of `token_ids`; of engines on a GPU only
HIDDEN_TAPS = "hidden_taps"  # activations [1, S, T*H]; features that the base gives to a draft

# A draft has the decoder's inputs and these; its rows of logits stay inside the graph.
DRAFT_HIDDEN = "draft_hidden"  # activations [1, S, D]; fused features, or recycled rows
TOP_K = "top_k"  # int64 [1]; K, candidates wanted for each row
# Medusa heads take HIDDEN_TAPS [1, 1, H] of the newest committed row, and R are the heads.
CANDIDATE_IDS = "candidate_ids"  # int64 [1, R, K]; of the base's vocabulary, best first
CANDIDATE_LOG_PROBS = "candidate_log_probs"  # float32 [1, R, K]; log-softmax, draft vocabulary
RECYCLED_HIDDEN = "recycled_hidden"  # activations [1, R, D]; `draft_hidden` of a row's children

# A visual encoder. One image is one run; its patches come in merge-block order: the M * M patches
# of a block one after another, row by row, then the next block of the row of blocks.
PIXEL_VALUES = "pixel_values"  # activations [P, patch_values], or of tiles [N, 3, E, E]
PATCH_POSITIONS = "patch_positions"  # int64 [P, 2]; row and column of each patch
WINDOW_SLOTS = "window_slots"  # int64 [W * Z]; the patch in each slot of the padded windows
WINDOW_MASK = "window_mask"  # bool [W, Z]; false: padding, whose slot may name any patch
WINDOW_ROWS = "window_rows"  # int64 [P]; the slot of each patch
POS_EMBED_INDEX = "pos_embed_index"  # int64 [4, P]; neighbours in the table of positions
POS_EMBED_WEIGHT = "pos_embed_weight"  # float32 [4, P]; how much of each neighbour
IMAGE_EMBEDS = "image_embeds"  # activations [P / M^2, H], or of tiles [N * tokens_per_tile, H]
DEEPSTACK_EMBEDS = "deepstack_embeds"  # activations [L, P / M^2, H]; level i goes behind layer i
# A decoder takes both of all images of a prompt as inputs: its token id V + n stands for row n.


def past_name(layer: int, part: str) -> str:
    """Name of a KV-cache input, `part` is "key" or "value": [1, num_kv_heads, C, head_dim]."""
    return f"past_key_values.{layer}.{part}"


def present_name(layer: int, part: str) -> str:
    """Name of the KV-cache output that shares its buffer with `past_name(layer, part)`."""
    return f"present.{layer}.{part}"


# ------------------------------------------------------------------------------- manifests
@dataclass(frozen=True, slots=True)
class CacheRanges:
    """The largest magnitudes that a calibration found in a KV cache, layer by layer."""

    calibrated_for: str  # "fp8" or "int8": what the checkpoint's cache is meant to hold
    keys: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Linear KV cache: per layer one key and one value tensor [1, num_kv_heads, C, head_dim]."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    ranges: CacheRanges | None = None  # None: nobody calibrated a cache of bytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of all layers' keys and values of one token."""
        itemsize = {"float32": 4, "float16": 2, "int8": 1}[self.dtype]
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """How a decoder takes images: as token ids from `vocab_size` on, rows of IMAGE_EMBEDS."""

    model_type: str  # of the vision-language model, whose encoder makes the rows
    token_id: int  # the placeholder that a processor repeats for every row of an image
    num_deepstack: int = 0  # L of DEEPSTACK_EMBEDS


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


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """The facts about a draft network, and about the base that it was trained for.

    A tap is a residual stream of the base: i < num_layers enters layer i (Hugging Face's
    `hidden_states[i]`), i = num_layers is the output of the final norm.
    """

    method: str  # "eagle3", "eagle", or "medusa", whose `decoder` has no layers and no cache
    decoder: DecoderSpec  # the draft's own sizes and KV cache; `vocab_size` is the base's
    draft_vocab_size: int
    base_hidden_size: int
    base_num_layers: int
    hidden_taps: tuple[int, ...]
    fuses: bool  # features pass through the `fuse` graph; if not, they are `draft_hidden`
    num_heads: int = 0  # of "medusa": head d gives the candidates of a tree's level d + 1


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


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and hash of one file of an artifact."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class BundleManifest:
    """What `edgellm-export` wrote: a portable ONNX graph, its weights and the tokenizer."""

    decoder: DecoderSpec
    dtype: str  # activations: "float16" or "float32"
    quantization: str  # "none" or the scheme of the linear layers
    opset: int
    eos_token_ids: tuple[int, ...]
    options: dict[str, Any]
    provenance: dict[str, Any]
    hidden_taps: tuple[int, ...] = ()  # see DraftSpec; empty: no draft can be attached
    files: dict[str, FileRecord] = field(default_factory=dict)
    kind: str = "llm_bundle"
    contract_version: int = CONTRACT_VERSION


@dataclass(frozen=True, slots=True)
class DraftBundleManifest:
    """What `edgellm-export draft` wrote: the draft's graph, the fuse graph and their weights."""

    draft: DraftSpec
    dtype: str  # activations: "float16" or "float32"
    quantization: str
    opset: int
    options: dict[str, Any]
    provenance: dict[str, Any]
    files: dict[str, FileRecord] = field(default_factory=dict)
    kind: str = "draft_bundle"
    contract_version: int = CONTRACT_VERSION


@dataclass(frozen=True, slots=True)
class VisualBundleManifest:
    """What `edgellm-export visual` wrote: the encoder's graph, weights and image processing."""

    vision: VisionSpec
    dtype: str  # activations: "float16" or "float32"
    quantization: str
    opset: int
    options: dict[str, Any]
    provenance: dict[str, Any]
    files: dict[str, FileRecord] = field(default_factory=dict)
    kind: str = "visual_bundle"
    contract_version: int = CONTRACT_VERSION


@dataclass(frozen=True, slots=True)
class PassGraph:
    """One compiled graph of an engine and the most query rows it is meant for."""

    path: str
    max_rows: int
    precision: str


@dataclass(frozen=True, slots=True)
class EngineManifest:
    """What `llm_build` wrote: compiled graphs for one backend and one machine."""

    decoder: DecoderSpec  # `kv.dtype` is the engine's own
    backend: str
    backend_version: str
    machine: str  # what the compiled graphs depend on, e.g. the CPU's instruction sets
    max_input_len: int
    max_kv_cache_capacity: int
    graphs: tuple[PassGraph, ...]  # ascending `max_rows`
    pass_cost_ms: dict[str, float]  # query rows of one pass -> milliseconds
    prefill_rows: int  # rows per pass at which a long prompt is fastest
    quantization: str
    eos_token_ids: tuple[int, ...]
    options: dict[str, Any]
    provenance: dict[str, Any]
    hidden_taps: tuple[int, ...] = ()  # see DraftSpec
    max_verify_tree_size: int = 0  # rows of a token tree, root included; 0: plain decoding only
    files: dict[str, FileRecord] = field(default_factory=dict)
    kind: str = "llm_engine"
    contract_version: int = CONTRACT_VERSION


@dataclass(frozen=True, slots=True)
class DraftEngineManifest:
    """What `llm_build --eagleDraft` wrote into the folder `DRAFT_FOLDER` of a base's engine."""

    draft: DraftSpec  # `decoder.kv.dtype` is the engine's own
    backend: str
    backend_version: str
    machine: str
    max_kv_cache_capacity: int
    max_draft_tree_size: int  # rows that may be drafted in one round; of heads 0, as the cache
    graphs: tuple[PassGraph, ...]
    fuse_graph: str  # path, "" when the features need no fusing
    step_cost_ms: dict[str, float]  # rows of one growth pass -> milliseconds; {} of heads
    extend_cost_ms: dict[str, float]  # rows fused and committed -> milliseconds
    quantization: str
    options: dict[str, Any]
    provenance: dict[str, Any]
    files: dict[str, FileRecord] = field(default_factory=dict)
    kind: str = "draft_engine"
    contract_version: int = CONTRACT_VERSION


@dataclass(frozen=True, slots=True)
class VisualEngineManifest:
    """What `visual_build` wrote: a compiled encoder and the files of its image processor."""

    vision: VisionSpec
    backend: str
    backend_version: str
    machine: str
    graph: str  # path
    precision: str
    min_image_tokens: int  # of an image
    max_image_tokens: int  # of all images of a request together
    max_image_tokens_per_image: int
    quantization: str
    options: dict[str, Any]
    provenance: dict[str, Any]
    files: dict[str, FileRecord] = field(default_factory=dict)
    kind: str = "visual_engine"
    contract_version: int = CONTRACT_VERSION


DRAFT_FOLDER = "draft"

Manifest = TypeVar(
    "Manifest",
    BundleManifest,
    DraftBundleManifest,
    VisualBundleManifest,
    EngineManifest,
    DraftEngineManifest,
    VisualEngineManifest,
)
_MAKERS = {
    "llm_bundle": "edgellm-export llm",
    "draft_bundle": "edgellm-export draft",
    "visual_bundle": "edgellm-export visual",
    "llm_engine": "llm_build",
    "draft_engine": "llm_build --eagleDraft",
    "visual_engine": "visual_build",
}


def load_manifest(folder: Path, kind: type[Manifest]) -> Manifest:
    """Read `folder/manifest.json` as a `kind`.

    Raises:
        BrokenArtifactError: no such folder or manifest, another kind of artifact, a newer
            contract, or fields that do not parse.
    """
    path = folder / MANIFEST_NAME
    expected = kind.__dataclass_fields__["kind"].default
    maker = _MAKERS[expected]
    if not folder.is_dir():
        fault = f"{folder} is not a folder" if folder.exists() else f"no such folder: {folder}"
        raise BrokenArtifactError(fault, hint=f"make it with {maker}")
    try:
        raw = parse(path.read_text("utf-8"))
        found = raw["kind"]
        version = raw["contract_version"]
    except FileNotFoundError:
        raise BrokenArtifactError(
            f"{folder} holds no {MANIFEST_NAME}", hint=f"make the folder with {maker}"
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BrokenArtifactError(
            f"{path} is damaged: {error}", hint=f"make the folder again with {maker}"
        ) from None
    if found != expected:
        raise BrokenArtifactError(
            f"{folder} is a {found}, not a {expected}", hint=f"give the folder that {maker} made"
        )
    if version != CONTRACT_VERSION:
        raise BrokenArtifactError(
            f"{folder} has contract version {version}, this edgellm reads {CONTRACT_VERSION}",
            hint="update edgellm here" if version > CONTRACT_VERSION else f"run {maker} again",
        )
    try:
        return _parse(kind, raw)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BrokenArtifactError(
            f"{path} is damaged: {error!r}", hint=f"make the folder again with {maker}"
        ) from None


def _parse(kind: Any, raw: Any) -> Any:
    """`raw` (from JSON) as the annotated type `kind`: dataclass, tuple, dict, union or scalar."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _parse(hints[name], value) for name, value in raw.items()})
    if origin is tuple:
        return tuple(_parse(args[0], item) for item in raw)
    if origin is dict:
        return {key: _parse(args[1], value) for key, value in raw.items()}
    if origin is types.UnionType:
        return None if raw is None else _parse(args[0], raw)
    if kind is float and isinstance(raw, int):
        return float(raw)
    if kind is not Any and not isinstance(raw, kind):
        raise TypeError(f"expected {kind.__name__}, found {raw!r}")
    return raw

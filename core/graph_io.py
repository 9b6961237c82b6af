"""Names, dtypes and shapes of graph inputs and outputs, which host and device share.

Symbols used in shapes:
S query rows of one pass, R rows that get logits, C KV capacity, V vocabulary, H hidden size,
T hidden taps, D hidden size of a draft, K candidates of one row. Of a visual encoder: P patches of
an image, M their merge size, W windows of Z patches, N tiles of E pixels a side, L deepstack
levels. Of speech models: F frames of a window of audio, A = F / 2 positions of its encoder.
"""

from __future__ import annotations

from collections.abc import Sequence

# Symbols of sizes in shapes.
ROWS, CAPACITY, HEAD_ROWS, IMAGE_ROWS = "rows", "kv_capacity", "head_rows", "image_rows"

INPUT_IDS = "input_ids"  # int64 [1, S]
POSITION_IDS = "position_ids"  # int64 [A, S], A axes; depth positions for tree nodes
WRITE_INDEX = "write_index"  # int64 [1]; rows already in the KV cache
TREE_MASK = "tree_mask"  # bool [S, S]; new token i attends to new token j, also to later tokens of
# the same image if `ImageSpec.bidirectional_tokens` is positive; a draft's is [S, M],
# M >= S, for the last M positions: each pass adds tokens that attend to some of the earlier ones
LOGITS_INDEX = "logits_index"  # int64 [R]; the rows that get logits
LOGITS = "logits"  # float32 [1, R, V]
TOKEN_IDS = "token_ids"  # int64 [1, R]; argmax of the logits
TOP_LOGITS = "top_logits"  # float32 [1, R]; the logits of `token_ids`; engines on a GPU only
HIDDEN_TAPS = "hidden_taps"  # activations [1, S, T*H]; auxiliary hidden states for a draft

# A draft has the decoder's inputs and these; its logits stay inside the graph.
DRAFT_HIDDEN = "draft_hidden"  # activations [1, S, D]; fused or recycled hidden states
TOP_K = "top_k"  # int64 [1]; K, candidates wanted for each row
CANDIDATES = "candidates"  # K as a symbol in shapes of outputs
ANSWERS = "answers"  # batch size, as a symbol in shapes of heads
CANDIDATE_IDS = "candidate_ids"  # int64 [1, R, K]; of the base's vocabulary, best first
CANDIDATE_LOG_PROBS = "candidate_log_probs"  # float32 [1, R, K]; log-softmax, draft vocabulary
# Block drafters: log-probabilities of the likeliest L candidates of a position, given each of the
# L of the position before it (or its token): float32 [1, R, L, L], L <= MAX_LINKED.
CANDIDATE_LINKS = "candidate_links"
LINKED, MAX_LINKED = "linked", 64  # L as a symbol in shapes of outputs
RECYCLED_HIDDEN = "recycled_hidden"  # activations [1, R, D]; `draft_hidden` of a node's children

# Engines with edgellm's kernels take several sequences in a pass, whose rows stand one after the
# other, and their caches in pages [pages, num_kv_heads, page rows, head_dim]. These stand in the
# place of WRITE_INDEX and TREE_MASK; B sequences, M columns of a sequence's mask, 0: causal.
SEQUENCES = "sequences"  # int64 [B, 3]; rows already in the cache, rows of the pass, M
TREE_MASKS = "tree_masks"  # bool [N]; [S, M] of one sequence after the other, then padding
# Of engines that take adapters. A sequence's own is ADAPTER, int64 [1]; 0 is none.
ADAPTER = "adapter"
ADAPTER_ROWS = "adapter_rows"  # int64 [S]; the adapter of each row of a pass
ADAPTER_WEIGHTS = "adapter_weights"  # float32; A [rank, in] and B [rank, out] of all layers of all
ADAPTER_TABLE = "adapter_table"  # int64 [adapters, layers, 3]; rank, offsets of A and of B

# Engines for GPUs hold adapters in places, which do not move; adapter n is in place n - 1. Products
# of concatenated weights of G layers have N columns for all places, one place after the other; a
# TensorRT engine also takes passes that are given one, for rows without adapters.
ADAPTER_COLUMNS = "adapter_columns."  # N as a symbol, before G
ADAPTER_MASK = "adapter_mask."  # before G: bool [1, S, N]; whether a token uses a column
ADAPTER_DOWN, ADAPTER_UP = "adapter_down.", "adapter_up."  # prefixes of `adapter_matrix`


def adapter_matrix(part: str, layers: Sequence[tuple[int, int]]) -> str:
    """Name of the adapters' part of a product with concatenated weights of layers.

    `ADAPTER_DOWN`: activations [N, in]; of a place A of one layer after that of the other.
    `ADAPTER_UP`: activations [N, out]; B of each layer at its outputs, between zeros.

    Args:
        part: one of these two.
        layers: indices in `ADAPTER_TABLE`, and widths.
    """
    return part + "+".join(f"{place}x{width}" for place, width in layers)


# TensorRT engines with edgellm's kernels have no caches among their inputs, but their addresses:
# int64 [2 + 4 * layers], see `device_runtime/kernels/triton/cache.py`.
CACHE_TABLE = "cache_table"
# Nor weights of experts, embeddings and heads: int64 [2 + 4 * matrices], see
# `device_runtime/kernels/triton/weights.py`.
WEIGHT_TABLE = "weight_table"


def page_table_name(window: int) -> str:
    """Name of the page tables of layers that attend to `window` tokens, 0: all; int64 [B, P].

    Page p of a sequence holds its positions from p * page rows on. Entries of pages that no token
    attends to are arbitrary.
    """
    return f"page_table.{window}"


# Decoders with recurrent layers. The state of a sequence covers all committed tokens; a pass reads
# it without changing it. The pass also returns the recurrence's inputs of each token; the graph of
# the role "commit" computes the next states from those of accepted tokens.
# int64 [S]; the parent of each new token, ascending; -1 - n: it follows state n. An engine with
# batches has several states.
PARENT_ROWS = "parent_rows"
# TensorRT engines have no states among their inputs, but their addresses: int64 [2 + 4 * states],
# see `device_runtime/kernels/triton/recurrent.py`.
STATE_TABLE = "state_table"
COMMIT_ROWS = "commit_rows"  # int64 [M]; the accepted tokens of a pass, each the parent of the next
STATE, STATE_ROWS, NEXT_STATE = STATES = "state.", "state_rows.", "next_state."  # prefixes


def state_name(layer: int, part: str) -> str:
    """Name of the input that holds a part of a layer's state, in both graphs: [1, ...].

    An engine's decoder takes states of several sequences, [B, ...].
    """
    return f"{STATE}{layer}.{part}"


def state_rows_name(layer: int, part: str) -> str:
    """Name of a pass's output by token that a commit takes: [1, S, numbers]."""
    return f"{STATE_ROWS}{layer}.{part}"


def next_state_name(state: str) -> str:
    """Name of a commit's output that replaces the state of this name."""
    return NEXT_STATE + state.removeprefix(STATE)


# Visual encoders. One image is one run; its patches are in merge-block order: the M * M patches of
# a block row by row, then the next block of the row of blocks.
PIXEL_VALUES = "pixel_values"  # activations [P, patch_values], or of tiles [N, 3, E, E]
PATCH_POSITIONS = "patch_positions"  # int64 [P, 2]; row and column of each patch
WINDOW_SLOTS = "window_slots"  # int64 [W * Z]; the patch in each slot of the padded windows
WINDOW_MASK = "window_mask"  # bool [W, Z]; false: padding, whose slot may hold any patch
WINDOW_ROWS = "window_rows"  # int64 [P]; the slot of each patch
# int64 [4, P]; neighbours in the table of positions, or [1, P]: the nearest one alone
POS_EMBED_INDEX = "pos_embed_index"
# float32 [P, G * G]; weights of all learned positions, of which G are along a side
POS_EMBED_SHARES = "pos_embed_shares"
POS_EMBED_WEIGHT = "pos_embed_weight"  # float32 [4, P]; weight of each neighbour
IMAGE_EMBEDS = "image_embeds"  # activations [P / M^2, H], or of tiles [N * tokens_per_tile, H]
DEEPSTACK_EMBEDS = "deepstack_embeds"  # activations [L, P / M^2, H]; level i is added after layer i
# A decoder takes both for all images of a prompt as inputs: token id V + n is row n.


# Encoders of a chat model's audio. One clip is one run. A module of
# `edgellm.multimodal.audio_features` makes its features; a decoder takes the rows as image rows.
# Attention is in W windows of T rows, or in B blocks of C rows, each to K slots. A row is a token,
# or padding.
AUDIO_ROWS = "audio_rows"  # int64 [W, T] or [B * C]; the token of each row
AUDIO_SLOTS = "audio_slots"  # int64 [B * K]; the row of each slot
AUDIO_MASK = "audio_mask"  # bool [W, T, T] or [B, C, K]; what each row attends to
AUDIO_EMBEDS = "audio_embeds"  # activations [rows, H]; rows after the clip's tokens are padding


# Speech models. The encoder computes hidden states of a window. A graph of its own computes from
# them the keys and values for each layer of a decoder, which takes them as inputs of the same
# names. So decoders may share an encoder.
INPUT_FEATURES = "input_features"  # activations [1, mel bins, F]; other sizes in chat models
ENCODER_HIDDEN = "encoder_hidden_states"  # activations [1, A, H], after the last norm
CROSS = "cross."  # prefix of `cross_name`
# int64 [sequences]; in graphs with edgellm's kernels, the place of each sequence's window among
# those whose keys and values are held
WINDOW_PLACES = "window_places"
# activations [1, S, N*D]; queries of `AudioSpec.alignment_heads` in this order, before the product
# with keys, from which the host computes what each token attends to
ALIGNMENT_QUERIES = "alignment_queries"


def cross_name(layer: int, part: str) -> str:
    """Name of a layer's keys or values of audio, `part` is "key" or "value": [1, heads, A, D]."""
    return f"{CROSS}{layer}.{part}"


PAST, PRESENT = "past_key_values.", "present."  # prefixes of caches


def past_name(layer: int, part: str) -> str:
    """Name of a KV-cache input, `part` is "key" or "value": [1, num_kv_heads, C, head_dim]."""
    return f"{PAST}{layer}.{part}"


def present_name(layer: int, part: str) -> str:
    """Name of the KV-cache output that shares its buffer with `past_name(layer, part)`."""
    return f"{PRESENT}{layer}.{part}"

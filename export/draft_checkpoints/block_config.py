"""The facts of a draft that predicts whole blocks, from the config of whichever trainer wrote it.

Public layouts: DFlash (arXiv 2602.06036) and DFlash2 as z-lab write them, JetSpec (2606.18394),
DSpark (2607.05147) as DeepSpec and SpecForge write it, all of them in speculators' layout, and the
assistant of Muse-Glimmer (`muse_glimmer.py`). A method's own keys are in `dflash_config`, which
takes precedence, or at the top level.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from edgellm.core.errors import UnsupportedModelError
from edgellm.core.graph_io import MAX_LINKED
from edgellm.core.model_spec import BlockSpec
from edgellm.export.checkpoints.checkpoint import Checkpoint
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.hidden_taps import check_taps
from edgellm.export.config.reader import ConfigReader
from edgellm.export.draft_checkpoints.config import DraftConfig, Infos, Norms, check_against
from edgellm.export.draft_checkpoints.windows import with_windows
from edgellm.export.layers.blocks import Convolution

MARKOV, SELECTOR, CONFIDENCE = "markov_head", "candidate_selector", "confidence_head"
_METHODS = ("dflash", "jetspec", "dspark", "dflash2")
_NAMES = {
    "DFlashDraftModel": "dflash",
    "JetSpecDraftModel": "jetspec",
    "DSparkDraftModel": "dspark",
    "Qwen3DSparkModel": "dspark",
    "DFlash2DraftModel": "dflash2",
}
_TRAINING = (
    "confidence_head_alpha",
    "loss_decay_gamma",
    "ce_loss_alpha",
    "l1_loss_alpha",
    "max_anchors",
    "num_anchors",
    "speculators_config",
    "speculators_version",
    "has_no_defaults_at_init",
    "head_type",
)
_IDS = "target_layer_ids"
_SPECULATORS_IDS = "aux_hidden_state_layer_ids"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """Facts of a block drafter, and of the base that it was trained for."""

    draft: DraftConfig  # its layers, taps and vocabulary
    block: BlockSpec
    kind: str  # "dflash", "jetspec", "dspark" or "dflash2"
    rank: int  # of the scores by the previous candidate; 0: none
    convolution: Convolution | None
    method: str = "dflash"  # the network's module

    @property
    def exporter(self) -> str:
        """See `drafts.OwnConfig`."""
        return self.draft.exporter

    @property
    def hidden_taps(self) -> tuple[int, ...]:
        """See `drafts.OwnConfig`."""
        return self.draft.hidden_taps

    @property
    def taps_meaning(self) -> str:
        """See `drafts.OwnConfig`."""
        return self.draft.taps_meaning


class _Own:
    """Reads the method's keys, in `dflash_config` or at the top level."""

    def __init__(self, outer: ConfigReader, nested: ConfigReader) -> None:
        self.outer, self.nested = outer, nested

    def read(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        outer = self.outer.optional(key, kind)
        nested = self.nested.optional(key, kind)
        return next((value for value in (nested, outer) if value is not None), default)

    def require(self, key: str, kind: type[T]) -> T:
        value = self.read(key, kind)
        if value is None:
            raise UnsupportedModelError(f"config.json has no {key}, nor has its dflash_config")
        return value

    def positive(self, key: str) -> int:
        value = self.require(key, int)
        if value < 1:
            raise UnsupportedModelError(f"config.json: {key} = {value} is not positive")
        return value

    def expect(self, key: str, *allowed: object) -> None:
        self.outer.expect(key, *allowed)
        self.nested.expect(key, *allowed)


def read_block(
    checkpoint: Checkpoint, base: DecoderConfig, ignored: tuple[str, ...] = ()
) -> BlockConfig:
    """Read a draft's config and tensor names, and check them against the base.

    Raises:
        UnsupportedModelError: an unsupported layout, or a draft for another base.
    """
    infos = checkpoint.tensors.infos()
    outer = ConfigReader(checkpoint.config)
    layer = outer.optional("transformer_layer_config", dict)
    inner = outer if layer is None else ConfigReader(layer)
    inner.assume(vocab_size=base.vocab_size)  # of a draft with its base's embedding
    own = _Own(outer, ConfigReader(outer.optional("dflash_config", dict) or {}))
    decoder = _decoder(inner, infos)
    sliding = [kind is not None and kind.window is not None for kind in decoder.kinds]
    is_causal = _is_causal(own, sliding, is_speculators=layer is not None)
    kind = _kind(checkpoint.config, infos, is_causal=is_causal)
    outer.expect("speculators_model_type", *_METHODS)
    own.expect("attention_mode", "gqa", "mha")
    own.expect("projector_type", "dflash", "dspark")
    own.expect("input_embedding_scale", 1.0)
    own.expect("output_multiplier", 1.0)
    own.expect("pure_draft_prefix_len", 1)
    own.expect("num_target_layers", base.num_hidden_layers)
    rank, links, convolution = _additions(own, kind, infos)
    taps, meaning = _taps(own, base.num_hidden_layers, decoder.num_hidden_layers)
    exporter = "speculators" if layer is not None else _exporter(checkpoint.config)
    draft = DraftConfig(
        method="dflash",
        exporter=exporter,
        decoder=decoder,
        draft_vocab_size=outer.positive("draft_vocab_size", decoder.vocab_size),
        base_hidden_size=outer.positive("target_hidden_size", decoder.hidden_size),
        base_num_layers=base.num_hidden_layers,
        hidden_taps=taps,
        taps_meaning=meaning,
        first_layer="layers.0",
        qk_norm="layers.0.self_attn.q_norm.weight" in infos,
        fc_bias="fc.bias" in infos,
        norms=Norms(before_residual=False, before_fc=False, fc_norm=False, output=False),
        mask_rows=None,
    )
    block = BlockSpec(
        size=own.positive("block_size"),
        mask_token_id=own.require("mask_token_id", int),
        from_newest=_from_newest(own, exporter, kind),
        is_causal=is_causal,
        links=links,
    )
    for reader in {id(each): each for each in (outer, inner, own.nested)}.values():
        reader.finish((*ignored, *_TRAINING))
    check_against(base, draft, infos["fc.weight"])
    _check_block(block, base)
    return BlockConfig(draft=draft, block=block, kind=kind, rank=rank, convolution=convolution)


def _decoder(reader: ConfigReader, infos: Infos) -> DecoderConfig:
    reader.expect("model_type", "qwen3", "llama", "qwen2")
    reader.expect("hidden_act", "silu", "swish")
    biased = reader.read("attention_bias", bool, False)
    first = "layers.0.self_attn"
    decoder = DecoderConfig.read(
        reader,
        qkv_bias=biased or f"{first}.q_proj.bias" in infos,
        o_proj_bias=f"{first}.o_proj.bias" in infos,
        mlp_bias=reader.read("mlp_bias", bool, False),
    )
    return with_windows(decoder, reader)


def _is_causal(own: _Own, sliding: list[bool], *, is_speculators: bool) -> bool:
    """Whether attention in a block is causal.

    Without a key in the config, layers with a window are causal.

    Raises:
        UnsupportedModelError: some layers are causal and others are not.
    """
    said = [own.read(key, bool) for key in ("causal_head", "causal", "is_causal")]
    opened = own.read("sliding_window_non_causal", bool)
    stated = next((value for value in said if value is not None), None)
    if own.outer.optional("speculators_model_type", str) == "jetspec":
        stated = True
    if stated is not None:
        return stated
    rules = {each and not (is_speculators and opened) for each in sliding}
    if len(rules) > 1:
        raise UnsupportedModelError(
            "config.json: blocks are causal in layers that slide, and in the others they are not",
            hint="only drafts whose layers are all alike are exported",
        )
    return rules.pop()


def _kind(config: Mapping[str, Any], infos: Infos, *, is_causal: bool) -> str:
    """The method by the tensors, which must match the config."""
    found = "jetspec" if is_causal else "dflash"
    if any(name.startswith(f"{MARKOV}.") for name in infos):
        found = "dspark"
    if any(name.startswith(f"{SELECTOR}.") for name in infos):
        found = "dflash2"
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    named = config.get("speculators_model_type") or next(
        (_NAMES[name] for name in names if name in _NAMES), None
    )
    if named in ("dspark", "dflash2") and named != found:
        raise UnsupportedModelError(f"config.json says {named}, the tensors are those of {found}")
    return found


def _additions(own: _Own, kind: str, infos: Infos) -> tuple[int, int, Convolution | None]:
    """Rank of the scores by previous candidate, number of candidates, DFlash2's convolution."""
    own.expect("final_logit_softcapping")
    own.read("enable_confidence_head", bool)  # replaced by acceptance measured at run time
    own.read("confidence_head_with_markov", bool)
    if kind == "dspark":
        own.expect("markov_head_type", "vanilla")
        return own.positive("markov_rank"), MAX_LINKED, None
    own.expect("markov_rank", 0)
    if kind != "dflash2":
        return 0, 0, None
    links = min(own.positive("selector_top_k"), MAX_LINKED)
    taps, group = own.positive("conv_kernel_size"), own.positive("conv_group_size")
    if "layers.0.attention_conv.base_kernel" not in infos:
        raise UnsupportedModelError("a dflash2 draft without convolutions is not understood")
    return own.positive("selector_rank"), links, Convolution(taps, group)


def _from_newest(own: _Own, exporter: str, kind: str) -> bool:
    """Whether the row of the newest token predicts one, too.

    Raises:
        UnsupportedModelError: the config does not say, and readers of such files differ.
    """
    said = own.read("sample_from_anchor", bool)
    own.expect("shift_label", said or False)
    if said is not None or kind != "dspark" or exporter == "speculators":
        return said or False
    if exporter != "DeepSpec":
        raise UnsupportedModelError(
            "config.json does not say whether the row of the newest token predicts the next one",
            hint='add "sample_from_anchor": true, or false where the mask tokens alone do',
        )
    return True


def _exporter(config: Mapping[str, Any]) -> str:
    """The exporter of the checkpoint."""
    names = config.get("architectures")
    names = names if isinstance(names, list) else []
    if "Qwen3DSparkModel" in names:
        return "DeepSpec"
    if "MuseGlimmerAssistantModel" in names:
        return "transformers"
    if {"DSparkDraftModel", "JetSpecDraftModel"} & {*map(str, names)}:
        return "SpecForge"
    return "z-lab"


def _taps(own: _Own, num_layers: int, draft_layers: int) -> tuple[tuple[int, ...], str]:
    """The base's hidden taps for the draft, and their origin."""
    inputs, outputs = own.outer.optional(_SPECULATORS_IDS, list), own.read(_IDS, list)
    ids = inputs or outputs
    if ids is None:
        return _spread(num_layers, draft_layers), "none configured: spread over the layers"
    if not all(isinstance(tap, int) and not isinstance(tap, bool) for tap in ids):
        raise UnsupportedModelError(f"config.json: layer ids {ids!r} are not a list of integers")
    if inputs:
        taps, meaning = tuple(ids), f"{_SPECULATORS_IDS} {ids}: inputs of these layers"
    else:
        taps = tuple(tap + 1 for tap in ids)
        meaning = f"{_IDS} {ids}: outputs of these layers, so one more"
    if num_layers in taps:
        raise UnsupportedModelError(
            f"the draft wants the last layer's output before the final norm ({ids}), which "
            "edgellm does not give"
        )
    return check_taps(taps, num_layers, "the draft's config.json"), meaning


def _spread(num_layers: int, count: int) -> tuple[int, ...]:
    """DFlash's default: the middle layer's output, or outputs spread from layer 1 to n - 3."""
    if count == 1:
        return (num_layers // 2 + 1,)
    step = (num_layers - 4) / (count - 1)
    taps = tuple(round(1 + index * step) + 1 for index in range(count))
    return check_taps(taps, num_layers, "the draft's layers")


def _check_block(block: BlockSpec, base: DecoderConfig) -> None:
    if block.levels < 1:
        raise UnsupportedModelError(f"config.json: block_size = {block.size} predicts no token")
    if not 0 <= block.mask_token_id < base.vocab_size:
        raise UnsupportedModelError(
            f"config.json: mask_token_id {block.mask_token_id} is not one of the base's "
            f"{base.vocab_size} tokens"
        )

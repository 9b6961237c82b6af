"""Config of EAGLE drafts in the layouts of all trainers.

Public layouts: SafeAILab/EAGLE, SpecForge, AngelSlim, NVIDIA Model-Optimizer, NeMo Automodel and
speculators. If tensors and config contradict each other, the export fails later: a tensor is
missing or unused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgellm.core.errors import (
    EdgeLLMError,
    UnsupportedModelError,
)
from edgellm.export.checkpoints.checkpoint import Checkpoint, TensorInfo
from edgellm.export.config.decoder import DecoderConfig
from edgellm.export.config.hidden_taps import check_taps, default_taps
from edgellm.export.config.reader import ConfigReader
from edgellm.export.draft_checkpoints import kinds
from edgellm.export.draft_checkpoints.kinds import OwnConfig
from edgellm.export.draft_checkpoints.low_rank_head import ARCHITECTURE, LowRankHead
from edgellm.export.draft_checkpoints.peagle_masks import FEATURE, MaskRows
from edgellm.export.draft_checkpoints.windows import with_windows

TAP_IDS = "eagle_aux_hidden_state_layer_ids"
_SPECULATORS = ("speculators_model_type", "speculators_config", "transformer_layer_config")
_MODELOPT = frozenset(
    ["use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm",
     "next_layer_regular", "parallel_draft_step", "parallel_draft_heads_num_layers"]
)  # fmt: skip
_NOTES = ("embed_requires_grad", "enable_sp_ulysses", "has_no_defaults_at_init", "modal_type",
          "speculators_config", "speculators_version", "target_model_type")  # fmt: skip

Infos = Mapping[str, TensorInfo]


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """Optional norms of an EAGLE-3 draft."""

    before_residual: bool  # the first residual is the normalized hidden state
    before_fc: bool  # one norm over all taps (`input_norm`)
    fc_norm: bool  # one norm for each tap
    output: bool  # recycled hidden states are outputs of the final norm

    @classmethod
    def read(cls, outer: ConfigReader, eagle: ConfigReader, exporter: str, infos: Infos) -> Norms:
        """Read the switches from the config, or else from tensor names."""
        before_fc = eagle.read("norm_before_fc", bool, "input_norm.weight" in infos)
        output = eagle.read("return_hidden_post_norm", bool, False)
        norms = cls(
            before_residual=outer.read("norm_before_residual", bool, exporter == "speculators"),
            before_fc=outer.read("norm_before_fc", bool, before_fc),
            fc_norm=outer.read("fc_norm", bool, "fc_norm.0.weight" in infos),
            output=outer.read("norm_output", bool, output),
        )
        if norms.before_fc and norms.fc_norm:
            raise UnsupportedModelError(
                "config.json: norm_before_fc and fc_norm exclude each other"
            )
        return norms


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """Facts of an EAGLE draft, and of the base that it was trained for."""

    method: str  # "eagle3", "peagle" or "eagle"; within `BlockConfig` "dflash"
    exporter: str
    decoder: DecoderConfig  # `vocab_size` is the base's
    draft_vocab_size: int
    base_hidden_size: int
    base_num_layers: int
    hidden_taps: tuple[int, ...]
    taps_meaning: str
    first_layer: str  # dotted name of the first layer: "midlayer" or "layers.0"
    qk_norm: bool
    fc_bias: bool
    norms: Norms
    mask_rows: MaskRows | None  # of P-EAGLE
    low_rank: LowRankHead | None = None

    @property
    def fuses(self) -> bool:
        """Whether a fuse graph computes the draft's input from hidden taps."""
        return self.method != "eagle"


def read_draft(
    checkpoint: Checkpoint, base: DecoderConfig, ignored: tuple[str, ...] = ()
) -> DraftConfig | OwnConfig:
    """Read a draft's config and tensor names, and check them against the base.

    Args:
        checkpoint: the draft.
        base: the model that it drafts for, with the exported layers.
        ignored: config keys that the user ignores.

    Raises:
        EdgeLLMError: the folder has no draft.
        UnsupportedModelError: an unsupported layout, or a draft for another base.
    """
    if (kind := kinds.kind_of(checkpoint.tensors.infos())) is not None:
        return kind.read(checkpoint, base, ignored)
    return _read_eagle(checkpoint, base, ignored)


def _read_eagle(
    checkpoint: Checkpoint, base: DecoderConfig, ignored: tuple[str, ...]
) -> DraftConfig:
    infos = checkpoint.tensors.infos()
    _refuse_other_models(checkpoint, infos)
    exporter = _exporter(checkpoint.config, infos)
    outer = ConfigReader(checkpoint.config)
    nested = outer.optional("transformer_layer_config", dict)
    inner = outer if nested is None else ConfigReader(nested)
    eagle = ConfigReader(outer.optional("eagle_config", dict) or {})
    outer.expect("speculators_model_type", "eagle3", "peagle")
    method = _method(checkpoint.config, infos, exporter)
    first = "midlayer" if any(name.startswith("midlayer.") for name in infos) else "layers.0"
    decoder = _decoder(inner, infos, first)
    base_hidden_size = outer.positive("target_hidden_size", decoder.hidden_size)
    _expect_plain_eagle(eagle)
    taps, meaning = _taps(method, exporter, outer, eagle, base.num_hidden_layers)
    outer.expect("num_aux_hidden_states", len(taps))
    masks = MaskRows.read(outer, infos, decoder.vocab_size)
    draft_vocab_size = outer.positive("draft_vocab_size", decoder.vocab_size)
    config = DraftConfig(
        method=method if masks is None else "peagle",
        exporter=exporter,
        decoder=decoder,
        draft_vocab_size=draft_vocab_size,
        base_hidden_size=base_hidden_size,
        base_num_layers=base.num_hidden_layers,
        hidden_taps=taps,
        taps_meaning=meaning,
        first_layer=first,
        qk_norm=outer.read("qk_norm", bool, f"{first}.self_attn.q_norm.weight" in infos),
        fc_bias=outer.read("bias", bool, method == "eagle" or "fc.bias" in infos),
        norms=Norms.read(outer, eagle, exporter, infos),
        mask_rows=masks,
        low_rank=LowRankHead.read(outer, infos, draft_vocab_size),
    )
    if method == "eagle" and config.norms != Norms(
        before_residual=False, before_fc=False, fc_norm=False, output=False
    ):
        raise UnsupportedModelError(
            "the tensors are those of an EAGLE-1 draft, but config.json asks for norms of EAGLE-3"
        )
    for reader in (outer, inner, eagle):
        reader.finish((*ignored, *_NOTES))
    check_against(base, config, infos["fc.weight"])
    return config


def _refuse_other_models(checkpoint: Checkpoint, infos: Infos) -> None:
    if "fc.weight" in infos:
        return
    whole = any(name.startswith("model.layers.") for name in infos)
    others = " or ".join(kind.TITLE for kind in kinds.kinds())
    raise EdgeLLMError(
        f"{checkpoint.label} is not a draft: it has neither fc.weight, which EAGLE drafts have, "
        f"nor {others}",
        hint="it looks like a whole language model; give the draft's folder"
        if whole
        else f"give the folder of an EAGLE-1, 2, 3 or 4 draft, or of {others}",
    )


def _exporter(config: Mapping[str, Any], infos: Infos) -> str:
    """The exporter whose conventions the checkpoint follows."""
    if any(key in config for key in _SPECULATORS):
        return "speculators"
    eagle = config.get("eagle_config")
    named = config.get("architectures")
    architectures = named if isinstance(named, list) else []
    if isinstance(eagle, dict) and _MODELOPT & eagle.keys():
        return "ModelOpt"
    if "Eagle3LlamaForCausalLM" in architectures:
        return "AngelSlim"
    if ARCHITECTURE in architectures:
        return "Automodel"
    if eagle or any(str(name).endswith("Eagle3") for name in architectures):
        midlayer = any(name.startswith("midlayer.") for name in infos)
        return "SpecForge" if midlayer else "ModelOpt"
    return "SafeAILab"


def _method(config: Mapping[str, Any], infos: Infos, exporter: str) -> str:
    """EAGLE-3 if there is a hidden norm, a draft vocabulary or another trainer, else EAGLE-1."""
    third = (
        exporter != "SafeAILab"
        or config.get("draft_vocab_size") is not None
        or any(name.startswith("midlayer.") or ".hidden_norm." in name for name in infos)
        or FEATURE in infos
    )
    return "eagle3" if third else "eagle"


def _decoder(reader: ConfigReader, infos: Infos, first: str) -> DecoderConfig:
    reader.expect("model_type", "llama", "mistral", "qwen2", "qwen3")
    reader.expect("hidden_act", "silu", "swish")
    biased = reader.read("attention_bias", bool, False) or reader.read("qkv_bias", bool, False)
    mlp_bias = reader.read("mlp_bias", bool, False)
    config = DecoderConfig.read(
        reader,
        qkv_bias=biased or f"{first}.self_attn.q_proj.bias" in infos,
        o_proj_bias=f"{first}.self_attn.o_proj.bias" in infos,
        mlp_bias=mlp_bias or f"{first}.mlp.gate_proj.bias" in infos,
    )
    layers = min(_num_layers(infos), config.num_hidden_layers)
    return with_windows(replace(config, num_hidden_layers=layers), reader)


def _num_layers(infos: Infos) -> int:
    """The number of layers by their tensors; some configs are copies of the base's."""
    found = (re.match(r"layers\.(\d+)\.", name) for name in infos)
    return max((int(each[1]) + 1 for each in found if each), default=1)


def _expect_plain_eagle(eagle: ConfigReader) -> None:
    """The switches of Model-Optimizer and TensorRT-LLM, at the values of an EAGLE-3 draft."""
    for key in (
        "use_aux_hidden_state",
        "use_input_layernorm_in_first_layer",
        "use_last_layernorm",
        "next_layer_regular",
    ):
        eagle.expect(key, True)
    for key in ("use_mtp_layernorm", "eh_proj_before_attn"):
        eagle.expect(key, False)
    eagle.expect("parallel_draft_step", 1)
    eagle.optional("parallel_draft_heads_num_layers", int)  # of the further parallel steps


def _taps(
    method: str, exporter: str, outer: ConfigReader, eagle: ConfigReader, num_layers: int
) -> tuple[tuple[int, ...], str]:
    """The base's hidden taps for the draft, and their origin."""
    above, below = outer.optional(TAP_IDS, list), eagle.optional(TAP_IDS, list)
    if method == "eagle":
        return (num_layers,), "EAGLE-1: output of the final norm"
    ids = above or below or []
    named = [*(above or ()), *(below or ())]
    if not all(isinstance(tap, int) and not isinstance(tap, bool) for tap in named):
        raise UnsupportedModelError(f"config.json: {TAP_IDS} = {ids!r} is not a list of integers")
    if above and below and above != [tap + 1 for tap in below]:
        raise UnsupportedModelError(
            f"config.json: {TAP_IDS} is {above} at the top and {below} in eagle_config, which name "
            "different streams",
            hint="outputs of layers in eagle_config, inputs at the top, hence + 1; keep the one "
            "that the draft was trained with",
        )
    if below:
        taps = tuple(tap + 1 for tap in below)
        meaning = f"{TAP_IDS} {below} in eagle_config: outputs of these layers, so one more"
    elif above:
        outputs = [1, num_layers // 2 - 1, num_layers - 4]
        if exporter != "speculators" and above == outputs:
            raise UnsupportedModelError(
                f"config.json: {TAP_IDS} {above} may count inputs or outputs of layers",
                hint="move the key into eagle_config if it names layers whose outputs are taken "
                "(as [1, n/2-1, n-4] suggests); speculators counts inputs: [2, n/2, n-3]",
            )
        taps = tuple(above)
        meaning = f"{TAP_IDS} {above} at the top: inputs of these layers, as they are"
    else:
        remedy = f"name the streams at the top of the draft's config.json: {TAP_IDS}"
        taps = default_taps(num_layers, f"{remedy} (i enters layer i)")
        return taps, "none configured: inputs of layers 2, n/2 and n-3"
    if num_layers in taps:
        raise UnsupportedModelError(
            f"the draft wants the last layer's output before the final norm ({TAP_IDS} {ids}), "
            "which edgellm does not give"
        )
    return check_taps(taps, num_layers, "the draft's config.json"), meaning


def check_against(base: DecoderConfig, config: DraftConfig, fc: TensorInfo) -> None:
    """Reject a draft that was trained for another base."""
    hint = "give the base that the draft was trained for"
    size = config.base_hidden_size if config.fuses else config.decoder.hidden_size
    if size != base.hidden_size:
        raise UnsupportedModelError(
            f"the draft is for a base of hidden size {size}, this base has {base.hidden_size}",
            hint=hint,
        )
    if config.decoder.vocab_size != base.vocab_size:
        raise UnsupportedModelError(
            f"the draft is for a vocabulary of {config.decoder.vocab_size} tokens, this base has "
            f"{base.vocab_size}",
            hint=hint,
        )
    if config.draft_vocab_size > base.vocab_size:
        raise UnsupportedModelError(
            f"config.json: draft_vocab_size {config.draft_vocab_size} is larger than vocab_size "
            f"{base.vocab_size}"
        )
    parts = len(config.hidden_taps) if config.fuses else 2
    if fc.shape[-1:] != (parts * size,):
        what = f"{parts} taps" if config.fuses else "embedding and feature"
        raise UnsupportedModelError(
            f"fc.weight of the draft takes {sum(fc.shape[-1:])} values, but {what} of {size} make "
            f"{parts * size}",
            hint=f"{TAP_IDS} in config.json does not belong to these weights"
            if config.fuses
            else "",
        )

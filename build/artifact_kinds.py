"""Kinds of bundles and the engines built from them: checks of plans, limits, copied files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgellm.build.plan import Plan
from edgellm.core.artifact import require_pair, verify_files, verify_sizes
from edgellm.core.errors import (
    BrokenArtifactError,
    EdgeLLMError,
    LimitError,
)
from edgellm.core.manifest import (
    AUDIO_BUNDLE,
    AUDIO_ENGINE,
    DRAFT_BUNDLE,
    DRAFT_ENGINE,
    DRAFT_FOLDER,
    LLM_BUNDLE,
    LLM_ENGINE,
    MANIFEST_NAME,
    VISUAL_BUNDLE,
    VISUAL_ENGINE,
    Bundle,
    FileRecord,
    load_bundle,
    load_engine,
)
from edgellm.core.model_spec import POOLER_FILE
from edgellm.multimodal.processors.settings import FILES as PROCESSOR_FILES

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
LLM, DRAFT, VISUAL, AUDIO = "llm", "draft", "visual", "audio"


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A kind of bundle and the engine that is built from it."""

    bundle: str  # kinds
    engine: str
    require: Callable[[Path, Bundle, Plan], None]  # checks the plan; raises `EdgeLLMError`
    suits: Callable[[Path, Path, Bundle], None]  # checks the contents of the engine's folder
    limits: Callable[[Bundle, Plan], dict[str, int]]  # fields of an engine
    files: tuple[str, ...] = ()  # of the bundle, copied to the engine
    folder: str = ""  # within the engine's
    options: tuple[str, ...] = ("threads", "quantize")  # of the plan, in the engine's manifest


def read_bundle(product: str, source: Path, plan: Plan) -> Bundle:
    """Read a bundle's manifest; check its files quickly and the plan's limits.

    Raises:
        BrokenArtifactError: incomplete, another contract version, or no hidden taps for a draft.
        UnsupportedModelError: unsupported settings of an image processor.
        LimitError: limits contradict each other or the model.
    """
    kind = PRODUCTS[product]
    bundle = load_bundle(source, kind.bundle)
    kind.require(source, bundle, plan)
    look_at(source, bundle.files)
    if product == VISUAL:
        from edgellm.multimodal.processors import load

        load(source)
    return bundle


def fitted(product: str, source: Path, plan: Plan) -> Plan:
    """The plan with the limits of an encoder of texts, or of a speech model.

    An encoder's KV cache holds one text, of any length; that of a speech model one window's.

    Raises:
        BrokenArtifactError: as `load_bundle`.
    """
    if product != LLM:
        return plan
    decoder = load_bundle(source, LLM_BUNDLE).decoder
    if decoder.is_causal and decoder.audio is None:
        return plan
    longest = min(plan.max_input_len, decoder.max_positions)
    return replace(plan, max_input_len=longest, kv_capacity=longest)


def look_at(source: Path, files: dict[str, FileRecord]) -> None:
    """Check that all files exist, and the hashes of the graphs, which are small.

    Raises:
        BrokenArtifactError: a file is missing or was changed.
    """
    verify_sizes(source, files)
    graphs = {name: record for name, record in files.items() if name.endswith(".onnx")}
    verify_files(source, graphs)


# ------------------------------------------------------------------------- language models
def _require_base(source: Path, bundle: Bundle, plan: Plan) -> None:
    _require_lengths(bundle.decoder.max_positions, plan)
    if plan.is_eagle_base and not bundle.hidden_taps:
        raise BrokenArtifactError(
            f"{source} has no hidden taps for a draft",
            hint="export it again with edgellm-export llm --is_eagle_base",
        )
    if not plan.max_lora_rank and "--maxLoras" in plan.options.given():
        raise EdgeLLMError("--maxLoras needs --maxLoraRank", hint="give --maxLoraRank, too")
    if plan.max_lora_rank and bundle.decoder.recurrent is not None:
        raise EdgeLLMError(
            "--maxLoraRank: models with recurrent layers take merged adapters only",
            hint="edgellm-export llm --lora_dir, and leave --maxLoraRank out",
        )
    if plan.max_lora_rank and not bundle.decoder.is_causal:
        raise EdgeLLMError("--maxLoraRank: an encoder takes no adapters", hint="leave it out")
    if bundle.decoder.audio is not None:
        _require_windows(plan)
    if plan.max_lora_rank and bundle.decoder.rotation:
        raise EdgeLLMError(
            f"--maxLoraRank: the residual stream of {source} was rotated, that of adapters was not",
            hint="quantize the base without --rotate residual",
        )


def _require_windows(plan: Plan) -> None:
    """Reject flags of trees and adapters: the windows of a speech model have neither."""
    given = {
        "--maxVerifyTreeSize": plan.max_verify_tree_size > 0,
        "--maxLoraRank": plan.max_lora_rank > 0,
    }
    for flag, is_given in given.items():
        if is_given:
            raise EdgeLLMError(
                f"{flag}: not for speech models, which draft texts and merge adapters",
                hint="leave it out",
            )


def _require_lengths(longest: int, plan: Plan) -> None:
    if plan.max_input_len > plan.kv_capacity:
        raise LimitError(
            f"--maxInputLen {plan.max_input_len} exceeds --maxKVCacheCapacity {plan.kv_capacity}",
            hint="the cache must hold the prompt and the output",
        )
    if plan.kv_capacity > longest:
        raise LimitError(
            f"--maxKVCacheCapacity {plan.kv_capacity} exceeds the model's {longest} positions",
            hint=f"give --maxKVCacheCapacity {longest} or less",
        )
    if plan.max_verify_tree_size >= plan.kv_capacity:
        raise LimitError(
            f"--maxVerifyTreeSize {plan.max_verify_tree_size} does not fit into "
            f"--maxKVCacheCapacity {plan.kv_capacity}",
            hint="the cache must hold the committed tokens and a tree",
        )


def _suits_its_draft(source: Path, engine: Path, bundle: Bundle) -> None:
    """Check that an earlier draft engine in the folder belongs to this base.

    A draft of another engine version is reported when it is loaded.
    """
    del source
    folder = engine / DRAFT_FOLDER
    if not bundle.hidden_taps or not (folder / MANIFEST_NAME).exists():
        return
    try:
        draft = load_engine(folder, DRAFT_ENGINE).draft
    except BrokenArtifactError:
        return
    require_pair(draft, bundle, str(folder))


def _base_limits(bundle: Bundle, plan: Plan) -> dict[str, int]:
    del bundle
    return {
        "max_input_len": plan.max_input_len,
        "max_kv_cache_capacity": plan.kv_capacity,
        "max_batch_size": plan.max_batch_size,
        "max_verify_tree_size": plan.max_verify_tree_size,
    }


# ---------------------------------------------------------------------------------- drafts
def _require_draft(source: Path, bundle: Bundle, plan: Plan) -> None:
    del source
    if plan.max_lora_rank:
        raise EdgeLLMError(
            "--maxLoraRank is for the base: adapters do not change its draft",
            hint="leave it out",
        )
    if bundle.cache is not None and plan.max_draft_tree_size >= plan.kv_capacity:
        raise LimitError(
            f"--maxDraftTreeSize {plan.max_draft_tree_size} does not fit into "
            f"--maxKVCacheCapacity {plan.kv_capacity}",
            hint="the cache must hold the committed tokens and those of a round",
        )


def _suits_its_base(source: Path, engine: Path, bundle: Bundle) -> None:
    """Check that a base engine in the folder belongs to the draft; it may be built later."""
    if (engine / MANIFEST_NAME).exists():
        require_pair(bundle.draft, load_engine(engine, LLM_ENGINE), str(source))


def require_base(engine: Path) -> None:
    """Check that the folder has a base engine for a draft.

    Raises:
        EdgeLLMError: it has none, or one that verifies no trees.
        BrokenArtifactError: its manifest is damaged.
    """
    if not (engine / MANIFEST_NAME).exists():
        raise EdgeLLMError(
            f"{engine} has no base engine for this draft",
            hint=f"build the base first: llm_build --onnxDir BUNDLE --engineDir {engine} "
            "--eagleBase",
        )
    base = load_engine(engine, LLM_ENGINE)
    if not base.max_verify_tree_size:
        raise EdgeLLMError(
            f"the engine in {engine} verifies no drafts: it was built without --eagleBase",
            hint="build the base again with --eagleBase --overwrite",
        )


def _draft_limits(bundle: Bundle, plan: Plan) -> dict[str, int]:
    if bundle.cache is None:
        return {"max_batch_size": plan.max_batch_size}
    return {
        "max_kv_cache_capacity": plan.kv_capacity,
        "max_batch_size": plan.max_batch_size,
        "max_draft_tree_size": plan.max_draft_tree_size,
    }


# ---------------------------------------------------------------------------------- images
def _require_images(source: Path, bundle: Bundle, plan: Plan) -> None:
    del source
    least, per_image, total = (
        plan.min_image_tokens, plan.max_image_tokens_per_image, plan.max_image_tokens
    )  # fmt: skip
    if not least <= per_image <= total:
        raise LimitError(
            f"--maxImageTokensPerImage {per_image} does not lie between --minImageTokens {least} "
            f"and --maxImageTokens {total}",
            hint="an image has at least the first and at most the second number of tokens",
        )
    tile = bundle.vision.tokens_per_tile
    if per_image < tile:
        raise LimitError(
            f"--maxImageTokensPerImage {per_image}: a tile of this encoder has {tile} tokens",
            hint=f"give --maxImageTokensPerImage {tile} or more",
        )


def _stands_alone(source: Path, engine: Path, bundle: Bundle) -> None:
    del source, engine, bundle


def _image_limits(bundle: Bundle, plan: Plan) -> dict[str, int]:
    del bundle
    return {
        "min_image_tokens": plan.min_image_tokens,
        "max_image_tokens": plan.max_image_tokens,
        "max_image_tokens_per_image": plan.max_image_tokens_per_image,
    }


def _require_audio(source: Path, bundle: Bundle, plan: Plan) -> None:
    del source, bundle, plan


def _audio_limits(bundle: Bundle, plan: Plan) -> dict[str, int]:
    longest = bundle.audio_encoder.max_s or plan.max_audio_s
    return {"max_audio_s": min(plan.max_audio_s, longest)}


def remembered(product: str, plan: Plan) -> dict[str, Any]:
    """The plan's options for the manifest of an engine of the product."""
    return {name: getattr(plan, name) for name in PRODUCTS[product].options}


PRODUCTS = {
    LLM: Product(
        bundle=LLM_BUNDLE,
        engine=LLM_ENGINE,
        require=_require_base,
        suits=_suits_its_draft,
        limits=_base_limits,
        files=(*TOKENIZER_FILES, POOLER_FILE),
        options=("threads", "prefill", "quantize"),
    ),
    DRAFT: Product(
        bundle=DRAFT_BUNDLE,
        engine=DRAFT_ENGINE,
        require=_require_draft,
        suits=_suits_its_base,
        limits=_draft_limits,
        folder=DRAFT_FOLDER,
    ),
    VISUAL: Product(
        bundle=VISUAL_BUNDLE,
        engine=VISUAL_ENGINE,
        require=_require_images,
        suits=_stands_alone,
        limits=_image_limits,
        files=PROCESSOR_FILES,
    ),
    AUDIO: Product(
        bundle=AUDIO_BUNDLE,
        engine=AUDIO_ENGINE,
        require=_require_audio,
        suits=_stands_alone,
        limits=_audio_limits,
    ),
}

"""Tiny bases of eight layers with drafts, exported and built."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import gemma4_assistants
from block_reference import Blocks, make_blocks
from conftest import make_checkpoint
from eagle_reference import VOCAB, Layout, make_draft
from medusa_heads import make_heads
from mtp_reference import make_base

from edgellm.build.engine import build_engine
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.plan import Plan
from edgellm.export import models
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint, open_draft

EAGLE3 = Layout({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40})
WINDOW = replace(
    EAGLE3,
    config={
        **EAGLE3.config,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    layers=2,
    window=8,
    sliding=(0,),
)
LOW_RANK = replace(EAGLE3, rank=12, candidates=14)
EAGLE1 = Layout(
    {"architectures": ["LlamaForCausalLM"]}, first="layers.0", eagle1=True, taps=(8,),
    own_embedding=True, own_head=False, draft_vocab=VOCAB, d2t=False, t2d=False, fc_bias=True,
    tied_base=False,
)  # fmt: skip
PEAGLE = Layout(
    {"draft_vocab_size": 40, "ptd_token_id": 95, "num_depths": 5},
    first="layers.0",
    layers=2,
    own_embedding=True,
    mask_shape=(1,),
)
PEAGLE_WINDOW = replace(
    PEAGLE,
    config={**PEAGLE.config, "sliding_window": 8, "layer_types": WINDOW.config["layer_types"]},
    window=8,
    sliding=(0,),
)
INPUT, CAPACITY, TREE = 64, 128, 60
BASE_PLAN = Plan(
    max_input_len=INPUT,
    kv_capacity=CAPACITY,
    threads=1,
    prefill="same",
    quantize="none",
    max_verify_tree_size=TREE,
)


@dataclass(frozen=True)
class EaglePair:
    """Checkpoints, bundles and engines of one base with its draft."""

    layout: Layout
    base_checkpoint: Path
    draft_checkpoint: Path
    bundle: Path
    draft_bundle: Path
    engine: Path


def draft_plan(precision: str = "none", rows: int = TREE) -> Plan:
    return Plan(
        max_input_len=INPUT,
        kv_capacity=CAPACITY,
        threads=1,
        prefill="auto",
        quantize=precision,
        max_draft_tree_size=rows,
    )


def export_pair(
    folder: Path,
    layout: Layout,
    model_type: str = "llama",
    int4: bool = False,
    dtype: str = "fp32",
    **config: object,
) -> EaglePair:
    """Checkpoints and bundles; the engine is not built yet."""
    sizes = {**models.find(model_type).TINY, "num_hidden_layers": 8, **config}
    sizes["tie_word_embeddings"] = layout.tied_base
    base = make_checkpoint(folder / "base", **sizes)
    if int4:
        from harness.models.checkpoints import round_checkpoint

        round_checkpoint(str(base), folder / "rounded", 16)
        base = folder / "rounded"
    draft = make_draft(folder / "draft", layout)
    options = ExportOptions(dtype=dtype, draft_model_dir=str(draft))
    export_llm(open_checkpoint(str(base)), folder / "bundle", options)
    checkpoints = (open_checkpoint(str(path), tokenizer=False) for path in (draft, base))
    export_draft(*checkpoints, folder / "draft_bundle", DraftOptions(dtype))
    return EaglePair(
        layout, base, draft, folder / "bundle", folder / "draft_bundle", folder / "engine"
    )


def build_pair(
    folder: Path, layout: Layout = EAGLE3, precision: str = "none", **options: object
) -> EaglePair:
    """Checkpoints, bundles and an engine with its draft."""
    pair = export_pair(folder, layout, **options)  # type: ignore[arg-type]
    return _built(pair, precision)


def for_several(pair: EaglePair, engine: Path, batch_size: int) -> Path:
    """The same networks for several sequences in a batch, with a shared pool of KV blocks."""
    for product, bundle, plan in (
        ("llm", pair.bundle, BASE_PLAN), ("draft", pair.draft_bundle, draft_plan()),
    ):  # fmt: skip
        shared = replace(plan, max_batch_size=batch_size, options=CpuOptions("edgellm"))
        build_engine(product, bundle, engine, shared, "onnxruntime", _silent)
    return engine


def build_mtp(
    folder: Path, make: Callable[[Path], Path] = make_base, dtype: str = "fp32"
) -> EaglePair:
    """A base with its own MTP layer (default: a hybrid base)."""
    base = make(folder / "base")
    source, options = open_checkpoint(str(base)), DraftOptions(dtype)
    export_llm(source, folder / "bundle", ExportOptions(dtype=dtype, draft_model_dir=str(base)))
    export_draft(open_draft(str(base)), source, folder / "draft_bundle", options)
    pair = EaglePair(
        EAGLE1, base, base, *(folder / n for n in ("bundle", "draft_bundle", "engine"))
    )
    return _built(pair)


def build_assistant(folder: Path, form: str = "gemma4") -> EaglePair:
    """A base of Gemma 4 with its assistant, which has a head with centroids."""
    base = gemma4_assistants.make_base(folder / "base", form)
    draft = gemma4_assistants.make_assistant(folder / "draft", form, **gemma4_assistants.CLUSTERS)
    return build_drafted(folder, base, draft)


def build_drafted(folder: Path, base: Path, draft: Path) -> EaglePair:
    """Bundles and engines of two checkpoints."""
    source, options = open_checkpoint(str(base)), DraftOptions("fp32")
    export_llm(source, folder / "bundle", ExportOptions(dtype="fp32", draft_model_dir=str(draft)))
    export_draft(open_draft(str(draft)), source, folder / "draft_bundle", options)
    pair = EaglePair(
        EAGLE1, base, draft, folder / "bundle", folder / "draft_bundle", folder / "engine"
    )
    return _built(pair)


def _built(pair: EaglePair, precision: str = "none") -> EaglePair:
    plans = ("llm", pair.bundle, BASE_PLAN), ("draft", pair.draft_bundle, draft_plan(precision))
    for product, bundle, plan in plans:
        build_engine(product, bundle, pair.engine, plan, "onnxruntime", _silent)
    return pair


def build_medusa(folder: Path, precision: str = "none") -> EaglePair:
    """A base of eight layers with three Medusa heads."""
    sizes = {**models.find("llama").TINY, "num_hidden_layers": 8}
    base, heads = make_checkpoint(folder / "base", **sizes), make_heads(folder / "heads")
    source = open_checkpoint(str(base))
    export_llm(source, folder / "bundle", ExportOptions(dtype="fp32", draft_model_dir=str(heads)))
    export_draft(open_draft(str(heads)), source, folder / "draft_bundle", DraftOptions("fp32"))
    pair = EaglePair(
        EAGLE1, base, heads, folder / "bundle", folder / "draft_bundle", folder / "engine"
    )
    return _built(pair, precision)


def build_blocks(folder: Path, layout: Blocks) -> EaglePair:
    """A base of eight layers with a block draft."""
    sizes = {**models.find("llama").TINY, "num_hidden_layers": 8}
    base, draft = make_checkpoint(folder / "base", **sizes), make_blocks(folder / "draft", layout)
    options = ExportOptions(dtype="fp32", draft_model_dir=str(draft))
    export_llm(open_checkpoint(str(base)), folder / "bundle", options)
    build_engine("llm", folder / "bundle", folder / "engine", BASE_PLAN, "onnxruntime", _silent)
    pair = EaglePair(EAGLE1, base, draft, folder / "bundle", folder, folder / "engine")
    return with_blocks(pair, folder, layout)


def with_blocks(pair: EaglePair, folder: Path, layout: Blocks) -> EaglePair:
    """The same base with another block draft, which reads the same hidden states."""
    return _with_draft(pair, folder, make_blocks(folder / "draft", layout))


def with_eagle(pair: EaglePair, folder: Path, layout: Layout, dtype: str = "fp32") -> EaglePair:
    """The same base with another EAGLE draft, which reads the same hidden states."""
    draft = make_draft(folder / "draft", layout)
    return replace(_with_draft(pair, folder, draft, dtype), layout=layout)


def _with_draft(pair: EaglePair, folder: Path, draft: Path, dtype: str = "fp32") -> EaglePair:
    engine = folder / "engine"
    source = open_checkpoint(str(pair.base_checkpoint))
    export_draft(open_draft(str(draft)), source, folder / "draft_bundle", DraftOptions(dtype))
    if not engine.exists():
        ignored = shutil.ignore_patterns("draft")
        shutil.copytree(pair.engine, engine, ignore=ignored)
    build_engine("draft", folder / "draft_bundle", engine, draft_plan(), "onnxruntime", _silent)
    return replace(
        pair, draft_checkpoint=draft, draft_bundle=folder / "draft_bundle", engine=engine
    )


def with_int8_draft(pair: EaglePair, engine: Path) -> EaglePair:
    """The same base with its draft quantized."""
    shutil.copytree(pair.engine, engine)
    build_engine("draft", pair.draft_bundle, engine, draft_plan("int8"), "onnxruntime", _silent)
    return EaglePair(
        pair.layout,
        pair.base_checkpoint,
        pair.draft_checkpoint,
        pair.bundle,
        pair.draft_bundle,
        engine,
    )


def _silent(_: str) -> None:
    pass

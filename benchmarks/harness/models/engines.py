"""Engines of SmolLM2 and of random weights, built once in a working folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgellm.build.engine import build_engine
from edgellm.build.onnxruntime_cpu.options import CpuOptions
from edgellm.build.plan import Plan
from edgellm.core.manifest import LLM_ENGINE, load_engine
from edgellm.device_runtime.networks.decoder import DecoderNetwork, open_decoder
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.draft import DraftOptions, HeadOptions, export_draft
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint, open_draft
from edgellm.scripts import smollm2
from harness.models import checkpoints, random_gguf, random_weights
from harness.results import ROOT

EAGLE3 = ROOT / "examples" / "smollm2-135m-instruct-eagle3"
PRECISIONS = {"fp32": ("fp32", "auto"), "int8": ("fp32", "int8"), "int4": ("int4", "auto")}
CAPACITY = 2048
TREE_SIZE = 64  # the 63 choices of `mc_sim_7b_63`, and the root


def silent(_: str) -> None:
    """Ignore the progress of a build."""


def plan_of(threads: int, quantize: str = "auto", kernels: str = "auto", **others: int) -> Plan:
    """Return the plan that most benchmarks share; `others` are fields of `Plan`."""
    plan = Plan(
        max_input_len=1024,
        kv_capacity=CAPACITY,
        threads=threads,
        prefill="auto",
        quantize=quantize,
        options=CpuOptions(kernels),
    )
    return replace(plan, **others)


def plain_engine(checkpoint: Path, name: str, plan: Plan, dtype: str = "fp32") -> Path:
    """Build a checkpoint in its folder's place without a draft, unless it exists.

    Args:
        checkpoint: a folder or a GGUF file.
        name: of the engine.
        plan: of the build.
        dtype: of the bundle.
    """
    engine = checkpoint.with_name(f"{checkpoint.name}-{name}")
    if not engine.exists():
        bundle = checkpoint.with_name(f"{checkpoint.name}-bundle")
        if not bundle.exists():
            export_llm(open_checkpoint(str(checkpoint)), bundle, ExportOptions(dtype=dtype))
        build_engine("llm", bundle, engine, plan, "onnxruntime", silent)
    return engine


def smollm2_engine(work: Path, precision: str, threads: int) -> Path:
    """Build SmolLM2 in one of `PRECISIONS` without a draft, unless it exists."""
    stored, quantize = PRECISIONS[precision]
    checkpoint = checkpoints.smollm2_folder(work, stored)
    return plain_engine(checkpoint, f"{precision}-{threads}", plan_of(threads, quantize))


def random_checkpoint(work: Path, shape: str, dtype: str = "F32") -> Path:
    """Return weights of a shape of `random_weights`, with SmolLM2's tokenizer."""
    folder, shapes = work / shape, {**random_weights.SHAPES, **random_weights.GEMMA_4}
    random_weights.write(shapes[shape], folder, dtype)
    for name, data in open_checkpoint(str(smollm2.fetch())).tokenizer_files.items():
        (folder / name).write_bytes(data)
    return folder


def random_q4_0(work: Path, shape: str) -> Path:
    """Return a GGUF file of random weights in Q4_0, which is written once."""
    path = work / f"{shape}-Q4_0.gguf"
    if not path.exists():
        partial = path.with_suffix(".partial")
        random_gguf.write_dense(random_weights.SHAPES[shape], "Q4_0", partial, smollm2.fetch())
        partial.replace(path)
    return path


def random_drafted_engine(work: Path, shape: str, threads: int) -> Path:
    """Build a Q4_0 engine of a shape with an EAGLE3 draft, both of random weights."""
    folder = work / f"{shape}-eagle3-q4_0-{threads}"
    if not folder.exists():
        base = random_q4_0(work, shape)
        draft = random_weights.write_eagle3(
            random_weights.SHAPES[shape], work / f"{shape}-eagle3-draft"
        )
        bundle, drafted = work / f"{shape}-eagle3-bundle", work / f"{shape}-eagle3-draft-bundle"
        opened = open_checkpoint(str(base))
        if not bundle.exists():
            export_llm(opened, bundle, ExportOptions(dtype="fp16", draft_model_dir=str(draft)))
        if not drafted.exists():
            export_draft(open_draft(str(draft)), opened, drafted, DraftOptions("fp16"))
        partial = folder.with_name(f"{folder.name}.partial")
        plan = plan_of(threads, max_verify_tree_size=TREE_SIZE)
        build_engine("llm", bundle, partial, plan, "onnxruntime", silent)
        plan = plan_of(threads, "int4", max_draft_tree_size=TREE_SIZE)
        build_engine("draft", drafted, partial, plan, "onnxruntime", silent)
        partial.rename(folder)
    return folder


def open_engine(engine: Path) -> DecoderNetwork:
    """Open an engine's decoder."""
    return open_decoder(engine, load_engine(engine, LLM_ENGINE))


def base_bundle(work: Path, stored: str, draft: Path) -> Path:
    """Export a checkpoint of SmolLM2 with the auxiliary hidden states of a draft."""
    bundle = work / f"{draft.name}-{stored}-bundle"
    options = ExportOptions(dtype="fp32", draft_model_dir=str(draft))
    export_llm(open_checkpoint(str(checkpoints.smollm2_folder(work, stored))), bundle, options)
    return bundle


def draft_bundle(work: Path, draft: Path, head_rank: int | None = None) -> Path:
    """Export a draft of SmolLM2, with a low-rank head or without."""
    bundle = work / f"{draft.name}{_of_rank(head_rank)}-draft-bundle"
    base = open_checkpoint(str(checkpoints.smollm2_folder(work, "fp32")), tokenizer=False)
    options = DraftOptions("fp32", head=HeadOptions(rank=head_rank))
    export_draft(open_draft(str(draft)), base, bundle, options)
    return bundle


def _of_rank(head_rank: int | None) -> str:
    return "" if head_rank is None else f"-rank{head_rank}"


def drafted_engine(
    work: Path,
    precision: str,
    threads: int,
    draft: Path = EAGLE3,
    head_rank: int | None = None,
    length: int = CAPACITY,
) -> Path:
    """Build SmolLM2 in one of `PRECISIONS` with a draft; reuse all except the draft.

    Args:
        work: folder of the engines.
        precision: of the base.
        threads: of the engine.
        draft: its folder.
        head_rank: of a low-rank head for the draft.
        length: of prompt and output; prompts may fill it if it is not the default.
    """
    name, (stored, quantize) = f"{draft.name}{_of_rank(head_rank)}", PRECISIONS[precision]
    limits = {} if length == CAPACITY else {"kv_capacity": length, "max_input_len": length}
    folder = work / f"{name}-{precision}-{threads}{f'-{length}' if limits else ''}"
    if not folder.exists():
        plan = plan_of(threads, quantize, max_verify_tree_size=TREE_SIZE)
        plan = replace(plan, **limits)
        build_engine("llm", base_bundle(work, stored, draft), folder, plan, "onnxruntime", silent)
    plan = replace(plan_of(threads, max_draft_tree_size=TREE_SIZE), **limits)
    bundle = draft_bundle(work, draft, head_rank)
    build_engine("draft", bundle, folder, plan, "onnxruntime", silent)
    return folder

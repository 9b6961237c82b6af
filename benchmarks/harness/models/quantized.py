"""SmolLM2 and its draft in every precision: checkpoints, bundles and engines, made once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from edgellm.build.engine import build_engine
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint, open_draft
from edgellm.scripts import smollm2
from harness.models import checkpoints
from harness.models.engines import EAGLE3, plan_of, silent

OFF_GRID = "off-grid.gguf"  # of `off_grid.py`, in the working folder
LLAMA_CPP = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "IQ4_XS", "Q4_0")
_TIED = ("--lm_head_quantization", "int8_tied")  # close to llama.cpp's files
_GPTQ, _AUTOROUND = ("--algo", "gptq"), ("--algo", "autoround")
_PLAIN = {"fp8": "max", "nvfp4": "max", "int4_awq": "awq"}  # algorithms of ModelOpt


def plain(scheme: str) -> tuple[str, ...]:
    """Return the flags of ModelOpt's own algorithm, where the command has another default."""
    return ("--algo", _PLAIN[scheme]) if scheme in _PLAIN else ()


def _by(scheme: str, *flags: str) -> tuple[list[str], str]:
    own = () if "--algo" in flags else plain(scheme)
    return ["--quantization", scheme, *own, *flags], "none"


# Name -> (quantize flags, llm_build --quantize)
RECIPES: dict[str, tuple[list[str], str]] = {
    "fp32": ([], "none"),
    "int8, rounded at build": ([], "int8"),
    "int4, rounded at build": ([], "int4"),
    "fp8": _by("fp8"),
    "fp8, gptq": _by("fp8", *_GPTQ),
    "int8_sq": _by("int8_sq"),
    "int8_sq, 8 samples": _by("int8_sq", "--num_samples", "8"),
    "int8_sq, int8 cache": _by("int8_sq", "--kv_cache_quantization", "int8"),
    "int4_awq": _by("int4_awq"),
    "int4_awq, block 32": _by("int4_awq", "--block_size", "32", *_TIED),
    "int4_awq, gptq, block 32": _by("int4_awq", *_GPTQ, "--block_size", "32", *_TIED),
    "int4_awq, gptq, block 32, rotated": _by(
        "int4_awq", *_GPTQ, "--block_size", "32", "--rotate", "residual"
    ),
    "int4_awq, autoround": _by("int4_awq", *_AUTOROUND),
    "int4_awq, autoround, block 32": _by("int4_awq", *_AUTOROUND, "--block_size", "32"),
    "nvfp4": _by("nvfp4"),
    "nvfp4, gptq": _by("nvfp4", *_GPTQ),
    "nvfp4_awq": _by("nvfp4_awq"),
    **{
        f"mixed, {bits} bits": _by("mixed", "--target_bits", bits, *_TIED)
        for bits in ("4.7", "5.2", "5.7", "6.2", "7", "8")
    },
}


def source_of(work: Path) -> Path:
    """Return the float weights of all recipes of a working folder."""
    changed = work / OFF_GRID
    return changed if changed.exists() else smollm2.fetch()


def quantized(work: Path, name: str) -> Path:
    """Return SmolLM2's checkpoint by a recipe; quantize it if missing."""
    flags, source = RECIPES[name][0], work / "fp32"
    if not source.exists():
        checkpoints.float_checkpoint(str(source_of(work)), source)
    if not flags:
        return source
    return _quantize("llm", source, work / f"quality-{slug(name)}", *flags)


def compressed(work: Path, scheme: str, samples: int) -> Path:
    """Return SmolLM2's checkpoint in the layout of compressed-tensors."""
    source, folder = quantized(work, "fp32"), work / f"compressed-{scheme}-{samples}"
    flags = "--quantization", scheme, *plain(scheme), "--format", "compressed-tensors"
    return _quantize("llm", source, folder, *flags, "--num_samples", str(samples))


def _quantize(kind: str, source: Path, folder: Path, *flags: str) -> Path:
    if not folder.exists():
        command = [sys.executable, "-m", "edgellm.quantize", kind, f"--{_MODEL[kind]}", str(source)]
        subprocess.run([*command, "--output_dir", str(folder), *flags], check=True)
    return folder


_MODEL = {"llm": "model_dir", "draft": "draft_model_dir"}


def slug(name: str) -> str:
    """Return a recipe's name as part of a file's name."""
    return name.replace(",", "").replace(" ", "_")


def bundle_of(work: Path, name: str) -> Path:
    """Return the bundle of a recipe, or of llama.cpp's file of that name."""
    bundle = work / f"quality-{slug(name)}-bundle"
    if not bundle.exists():
        source = gguf_of(work, name) if name in LLAMA_CPP else quantized(work, name)
        is_float = name in RECIPES and not RECIPES[name][0]
        options = ExportOptions(dtype="fp32" if is_float else "fp16")
        export_llm(open_checkpoint(str(source)), bundle, options)
    return bundle


def gguf_of(work: Path, kind: str) -> Path:
    """Return llama.cpp's file of a kind."""
    return checkpoints.gguf(source_of(work), work, kind, sys.executable, mixed=True)


def engine_of(work: Path, name: str, threads: int) -> Path:
    """Return the engine of a recipe, or of llama.cpp's file of that name."""
    engine = work / f"quality-{slug(name)}-engine"
    if not engine.exists():
        plan = plan_of(threads, RECIPES.get(name, ([], "auto"))[1])
        build_engine("llm", bundle_of(work, name), engine, plan, "onnxruntime", silent)
    return engine


def quantized_draft(work: Path, draft: Path, scheme: str) -> Path:
    """Return a draft's bundle in a precision; "float": as it is."""
    source, base = draft, quantized(work, "fp32")
    if scheme != "float":
        flags = "--quantization", scheme, "--base_model_dir", str(base)
        source = _quantize("draft", draft, work / f"draft-{scheme}", *flags)
    bundle = work / f"draft-{scheme}-bundle"
    export_draft(open_draft(str(source)), open_checkpoint(str(base)), bundle, DraftOptions("fp32"))
    return bundle


def engine_with_draft(work: Path, name: str, threads: int, draft: Path) -> Path:
    """Return the engine of a recipe with a draft, whose bundle is given.

    Engine and draft are float where neither the checkpoint nor the build quantizes.
    """
    engine, rounding = work / f"drafted-{slug(name)}-engine", RECIPES[name][1]
    if not engine.exists():
        bundle = work / f"drafted-{slug(name)}-bundle"
        dtype = "fp16" if rounding == "none" and RECIPES[name][0] else "fp32"
        options = ExportOptions(dtype=dtype, draft_model_dir=str(EAGLE3))
        export_llm(open_checkpoint(str(quantized(work, name))), bundle, options)
        plan = plan_of(threads, rounding, max_verify_tree_size=60)
        build_engine("llm", bundle, engine, plan, "onnxruntime", silent)
    plan = plan_of(threads, "none", max_draft_tree_size=60)
    build_engine("draft", draft, engine, plan, "onnxruntime", silent)
    return engine

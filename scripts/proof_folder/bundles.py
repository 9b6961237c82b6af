"""Tiny bundles, and the outputs that their portable graphs have in ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from edgellm.build.verify.check import DEVIATIONS, row_errors
from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.device_runtime.arrays import F32, I64
from edgellm.device_runtime.networks.decoder import DecoderNetwork
from edgellm.device_runtime.runners.onnxruntime_cpu.runner import LoadedGraph, OnnxRuntimeRunner
from edgellm.device_runtime.runners.onnxruntime_graphs import GraphOptions, load_graph
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.nvfp4_reference import has_fp4, open_fp4
from edgellm.export.pipeline.open_checkpoint import open_checkpoint, open_draft
from edgellm.scripts.proof_folder.checkpoints import (
    PRECISIONS,
    write_adapter,
    write_checkpoint,
    write_recurrent,
)
from edgellm.scripts.proof_folder.cli import LORA
from edgellm.scripts.proof_folder.engine_step import CAPACITY, KINDS, LENGTH, kind_of, outputs_of

RECURRENT = "recurrent"
NAMES = (*PRECISIONS, LORA, RECURRENT)
SEQUENCES = 2
# Of float16; the runner for CPUs gives no states in float16, so that this is not measured.
_RECURRENT_ERROR = 0.005
_FIRST_TOKEN = 8  # the tokens before are special


def make_bundle(
    bundle: Path, expected: Path, name: str, tokenizer: Path, adapter: Path | None = None
) -> None:
    """Write a tiny bundle and its expected outputs.

    Outputs are those of the graph in float32. The limit is three times the error of the same graph
    in float16, whose activations cross other thresholds of quantization.

    Args:
        bundle: a new folder.
        expected: a .npz file with the outputs of two sequences.
        name: of `NAMES`.
        tokenizer: see `write_checkpoint`.
        adapter: a new folder of the LoRA adapter, which expected outputs have merged.
    """
    with TemporaryDirectory() as folder:
        source, exact, rounded = (Path(folder, one) for one in ("checkpoint", "fp32", "fp16"))
        if name == RECURRENT:
            write_recurrent(source, tokenizer)
        else:
            write_checkpoint(source, name if name in PRECISIONS else "fp16", tokenizer)
        if adapter is not None:
            write_adapter(adapter)
        checkpoint, merged = open_checkpoint(str(source)), None if adapter is None else str(adapter)
        export_llm(checkpoint, bundle, ExportOptions(dtype="fp16"))
        graphs = (exact,) if name == RECURRENT else (exact, rounded)
        for graph in graphs:
            export_llm(checkpoint, graph, ExportOptions(dtype=graph.name, lora_dir=merged))
        texts = _texts(load_bundle(bundle, LLM_BUNDLE).decoder.vocab_size)
        wanted, *others = (_outputs(graph, texts) for graph in graphs)
    errors = _errors(others[0], wanted) if others else dict.fromkeys(KINDS, _RECURRENT_ERROR)
    allowed: dict[str, Any] = {
        f"allowed {kind}": DEVIATIONS * error for kind, error in errors.items()
    }
    np.savez_compressed(expected, texts=texts, **wanted, **allowed)


def make_pair(base: Path, draft: Path, checkpoints: tuple[Path, Path]) -> None:
    """Write the bundles of a base and its EAGLE3 draft; `checkpoints` are theirs."""
    model, drafting = map(str, checkpoints)
    export_llm(open_checkpoint(model), base, ExportOptions(dtype="fp16", draft_model_dir=drafting))
    source = open_checkpoint(model, tokenizer=False)
    export_draft(open_draft(drafting), source, draft, DraftOptions("fp16"))


def _texts(vocabulary: int) -> I64:
    """Random tokens [SEQUENCES, LENGTH]."""
    return np.random.default_rng(1).integers(_FIRST_TOKEN, vocabulary, (SEQUENCES, LENGTH))


def _outputs(bundle: Path, texts: I64) -> dict[str, F32]:
    """Outputs of a portable graph, one sequence after the other."""
    spec = load_bundle(bundle, LLM_BUNDLE).decoder
    runner = OnnxRuntimeRunner(graphs=[_load(bundle / "model.onnx")], kv=spec.kv, capacity=CAPACITY)
    commit = None
    if (path := bundle / "commit.onnx").exists():
        commit = OnnxRuntimeRunner(graphs=[_load(path)])
    network = DecoderNetwork(runner=runner, spec=spec, capacity=CAPACITY, commit=commit)
    found: dict[str, F32] = {}
    for index, text in enumerate(texts):
        of_one = outputs_of(network, [text])
        found |= {name.replace("sequence 0", f"sequence {index}"): of_one[name] for name in of_one}
    return found


def _load(path: Path) -> LoadedGraph:
    """A session that runs the nodes of a portable graph as they are, NVFP4 by arithmetic."""
    if has_fp4(path):
        plain = path.with_name("plain.onnx")
        plain.write_bytes(open_fp4(path))
        path = plain
    return LoadedGraph(load_graph(path, GraphOptions(threads=1, optimize=False)))


def _errors(found: Mapping[str, F32], wanted: Mapping[str, F32]) -> dict[str, float]:
    """The largest error of each kind of output."""
    kinds: dict[str, float] = {}
    for name in wanted:
        error = row_errors(found[name], wanted[name])
        kinds[kind_of(name)] = max(error, kinds.get(kind_of(name), 0.0))
    return kinds

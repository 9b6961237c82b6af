"""Tiny bundles, and the outputs that their portable graphs have in ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

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
from edgellm.export.pipeline.open_checkpoint import open_checkpoint, open_draft
from edgellm.scripts.proof_folder.checkpoints import write_checkpoint
from edgellm.scripts.proof_folder.engine_step import CAPACITY, LENGTH, kind_of, outputs_of

SEQUENCES = 2
_FIRST_TOKEN = 8  # the tokens before are special


def make_bundle(bundle: Path, expected: Path, precision: str, tokenizer: Path) -> None:
    """Write the tiny bundle of a precision and its expected outputs.

    Outputs are those of the graph in float32. The limit is three times the error of the same graph
    in float16, whose activations cross other thresholds of quantization.

    Args:
        bundle: a new folder.
        expected: a .npz file, for one sequence; that of a batch is next to it.
        precision: of `checkpoints.PRECISIONS`.
        tokenizer: see `write_checkpoint`.
    """
    with TemporaryDirectory() as folder:
        source, exact = Path(folder, "checkpoint"), Path(folder, "exact")
        write_checkpoint(source, precision, tokenizer)
        checkpoint = open_checkpoint(str(source))
        export_llm(checkpoint, bundle, ExportOptions(dtype="fp16"))
        export_llm(checkpoint, exact, ExportOptions(dtype="fp32"))
        texts = _texts(load_bundle(bundle, LLM_BUNDLE).decoder.vocab_size)
        wanted, rounded = (_outputs(one, texts) for one in (exact, bundle))
    allowed = {f"allowed {kind}": DEVIATIONS * error for kind, error in _errors(rounded, wanted)}
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
    graph = load_graph(bundle / "model.onnx", GraphOptions(threads=1, optimize=False))
    runner = OnnxRuntimeRunner(graphs=[LoadedGraph(graph)], kv=spec.kv, capacity=CAPACITY)
    network = DecoderNetwork(runner=runner, spec=spec, capacity=CAPACITY)
    found: dict[str, F32] = {}
    for index, text in enumerate(texts):
        of_one = outputs_of(network, [text])
        found |= {name.replace("sequence 0", f"sequence {index}"): of_one[name] for name in of_one}
    return found


def _errors(found: Mapping[str, F32], wanted: Mapping[str, F32]) -> list[tuple[str, float]]:
    """The largest error of each kind of output."""
    kinds: dict[str, float] = {}
    for name in wanted:
        error = row_errors(found[name], wanted[name])
        kinds[kind_of(name)] = max(error, kinds.get(kind_of(name), 0.0))
    return list(kinds.items())

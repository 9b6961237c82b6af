"""Steps of the proof on engines: a tiny bundle, built on this machine, against expected outputs.

    python engine_step.py available
    python engine_step.py machine
    python engine_step.py outputs BUNDLE EXPECTED BACKEND
    python engine_step.py trees BASE DRAFT REQUESTS BACKEND

`--help` has the flags. The last line of the output is a JSON object for `prove`. With `--dry` the
engines are for ONNX Runtime on the CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.build.verify.check import row_errors
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import LLM_BUNDLE, LLM_ENGINE, load_bundle, load_engine
from edgellm.device_runtime import runners
from edgellm.device_runtime.arrays import F32, I64, LoadedAdapter
from edgellm.device_runtime.engine.lora import open_adapters
from edgellm.device_runtime.gpu import compute_capability
from edgellm.device_runtime.kernels.library import instruction_sets
from edgellm.device_runtime.networks.decoder import DecoderNetwork, SequencePart, open_decoder

CAPACITY, MAX_INPUT = 128, 64
_PROMPT, _PARENTS = 24, (-1, 0, 0, 1, 2)
_TREE = _PROMPT + 1  # begin of the tree
LENGTH = _TREE + len(_PARENTS) + 1  # with the token after the tree
_ACCEPTED = np.array([0, 2, 4])  # of the tree's nodes
_CPU, _GPU = "onnxruntime_cpu", "gpu"
_BACKENDS = ("tensorrt", "onnxruntime_cuda")
_MAX_NODES = 60  # of a draft tree, the default of llm_inference
_MAX_RANK = 8  # of LoRA adapters
_SHOWN = 3  # numbers of an output in the report
_LOGITS, _KV = KINDS = ("logits", "K/V")
_LAYER = f"{_KV} of layer"
# ONNX Runtime's engines round activations in blocks of their own, or not at all; unrelated outputs
# differ by 1.4.
_ALLOWED_IN_BLOCKS = 0.3


def outputs_of(
    network: DecoderNetwork, texts: Sequence[I64], adapter: LoadedAdapter | None = None
) -> dict[str, F32]:
    """Logits and KV cache of sequences in one batch: a prompt, a token, a tree, the next token.

    Args:
        network: an engine's, or the portable graph's.
        texts: int64 [LENGTH] of each sequence.
        adapter: of all sequences.

    Returns:
        Logits [R, V] and keys and values of each layer [2, H, S, D], by name.
    """
    found: dict[str, F32] = {}
    kvs = [network.new_kv() for _ in texts]
    for kv in kvs:
        kv.adapter = adapter

    def run(name: str, tokens: slice, length: int, first: int = 0, **tree: Any) -> None:
        parts = [
            SequencePart(kv, ids[tokens], length, np.arange(first, len(ids[tokens])), **tree)
            for kv, ids in zip(kvs, texts, strict=True)
        ]
        for index, result in enumerate(network.run_batch(parts)):
            found[f"{_LOGITS} of {name}, sequence {index}"] = np.array(result.logits, np.float32)

    run("the prompt", slice(_PROMPT), 0, _PROMPT - 1)
    run("a token", slice(_PROMPT, _TREE), _PROMPT)
    depths, mask = _tree()
    run("a tree", slice(_TREE, LENGTH - 1), _TREE, position_ids=_TREE + depths, tree_mask=mask)
    for kv in kvs:
        kv.compact(_TREE, _ACCEPTED)
    run("the next token", slice(LENGTH - 1, LENGTH), _TREE + len(_ACCEPTED))
    for index, kv in enumerate(kvs):
        planes = np.array(kv.read(kv.length), np.float32)
        for layer in range(len(planes) // 2):
            found[f"{_LAYER} {layer}, sequence {index}"] = planes[2 * layer : 2 * layer + 2, 0]
        kv.free()
    return found


def _tree() -> tuple[I64, np.ndarray[Any, Any]]:
    """Depths and attention mask of the nodes."""
    mask = np.eye(len(_PARENTS), dtype=np.bool_)
    for node, parent in enumerate(_PARENTS[1:], 1):
        mask[node] |= mask[parent]
    return mask.sum(axis=1) - 1, mask


def kind_of(name: str) -> str:
    """The kind of an output, whose limit it shares."""
    return _KV if name.startswith(_LAYER) else _LOGITS


def _outputs(
    bundle: Path, expected: Path, backend: str, sequences: int, adapter: Path | None
) -> tuple[bool, dict[str, Any]]:
    """Build an engine and compare its outputs."""
    with np.load(expected) as stored:
        arrays = dict(stored)
    texts = arrays["texts"][:sequences]
    allowed: dict[str, float] = {kind: float(arrays[f"allowed {kind}"]) for kind in KINDS}
    if backend != "tensorrt" and load_bundle(bundle, LLM_BUNDLE).quantization != "none":
        allowed |= dict.fromkeys(KINDS, _ALLOWED_IN_BLOCKS)
    plan = Plan(
        max_input_len=MAX_INPUT,
        kv_capacity=CAPACITY,
        quantize="none",
        kv_cache="float",
        prefill="same",
        max_verify_tree_size=len(_PARENTS),
        max_batch_size=len(texts),
        max_lora_rank=0 if adapter is None else _MAX_RANK,
    )
    with tempfile.TemporaryDirectory() as folder:
        engine = Path(folder, "engine")
        build_engine("llm", bundle, engine, plan, backend, _silent)
        manifest = load_engine(engine, LLM_ENGINE)
        network, loaded = open_decoder(engine, manifest), None
        if adapter is not None:
            adapters = open_adapters(engine, manifest, network, nullcontext)
            loaded = adapters.load(adapter.name, adapter)
        found = outputs_of(network, texts, loaded)
    results: dict[str, dict[str, Any]] = {}
    for name, array in found.items():
        wanted = arrays[name]
        results[name] = {
            "found": array.flat[:_SHOWN].tolist(),
            "expected": wanted.flat[:_SHOWN].tolist(),
            "error": row_errors(array, wanted),
            "allowed": allowed[kind_of(name)],
        }
    passed = all(one["error"] <= one["allowed"] for one in results.values())
    return passed, {"outputs": results}


def _silent(_: str) -> None:
    pass


def _trees(base: Path, draft: Path, requests: Path, backend: str) -> tuple[bool, dict[str, Any]]:
    """Build base and draft; compare decoding with trees and without, token by token."""
    limits = Plan(max_input_len=MAX_INPUT, kv_capacity=CAPACITY)
    plan = replace(limits, is_eagle_base=True, max_verify_tree_size=_MAX_NODES)
    of_draft = replace(limits, max_draft_tree_size=_MAX_NODES)
    with tempfile.TemporaryDirectory() as folder:
        engine = Path(folder, "engine")
        build_engine("llm", base, engine, plan, backend, _silent)
        build_engine("draft", draft, engine, of_draft, backend, _silent)
        words = ("--engineDir", engine, "--inputFile", requests, "--eagle", "--prove", "2")
        code, said = _command("device_runtime", *words)
    return code == 0, {"said": said}


def _machine() -> tuple[bool, dict[str, Any]]:
    """What `edgellm-doctor` says of this machine; it exits with 1 if something is missing."""
    code, said = _command("tools.doctor")
    return code in (0, 1), {"said": said}


def _command(package: str, *words: object) -> tuple[int, list[str]]:
    """Run a command of edgellm; return its exit status and lines."""
    main = f"from edgellm.{package}.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", main, *map(str, words)], capture_output=True, text=True, check=False
    )
    return result.returncode, (result.stdout + result.stderr).strip().splitlines()


def _available(*, dry: bool) -> dict[str, str]:
    """Why this machine cannot run steps, by what they need; "": it can."""
    if dry:
        return {"onnxruntime_cuda": "a dry run has no CUDA", "kernels": _lack_of_kernels()}
    found = {name: _lack_of(name) for name in _BACKENDS}
    try:
        found[_GPU] = "" if compute_capability() is not None else "there is no NVIDIA GPU here"
    except EdgeLLMError as error:
        found[_GPU] = str(error)
    return {name: why or found[_GPU] for name, why in found.items()}


def _lack_of(backend: str) -> str:
    try:
        runners.find(backend).require_device()
    except EdgeLLMError as error:
        return f"{backend}: {error}"
    return ""


def _lack_of_kernels() -> str:
    """Why this machine's CPU runs neither batches nor adapters; "": it does."""
    try:
        instruction_sets()
    except EdgeLLMError as error:
        return f"batches and adapters on the CPU need edgellm's kernels: {error}"
    return ""


def _run(options: argparse.Namespace) -> tuple[bool, dict[str, Any]]:
    """Run a step; its result may be that it is skipped."""
    if options.kind == "machine":
        return _machine()
    *paths, backend = options.words
    if not options.dry and options.capability > (compute_capability() or 0):
        return True, {"skipped": f"it needs compute capability {options.capability / 10}"}
    if options.dry:
        backend = _CPU
    first, second, *others = map(Path, paths)
    if options.kind == "trees":
        return _trees(first, second, others[0], backend)
    return _outputs(first, second, backend, options.sequences, options.adapter)


def main() -> None:
    """Run a step; the exit status is 1 if outputs differ more than they may."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("kind", choices=("available", "machine", "outputs", "trees"))
    parser.add_argument("words", nargs="*")
    parser.add_argument("--dry", action="store_true", help="build for the CPU")
    parser.add_argument("--capability", type=int, default=0, help="least one of the GPU, as 89")
    parser.add_argument("--sequences", type=int, default=1, help="size of the batch")
    parser.add_argument("--adapter", type=Path, help="LoRA adapter of all sequences")
    options = parser.parse_args()
    if options.kind == "available":
        print(json.dumps(_available(dry=options.dry)))
        return
    try:
        passed, result = _run(options)
    except EdgeLLMError as error:
        passed, result = False, {"said": [str(error), error.hint]}
    print(*result.get("said", ()), sep="\n")
    print(json.dumps(result))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()

"""Logits, keys and values of a tiny engine, compared with those of transformers."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.build.engine import build_engine
from edgellm.build.plan import Plan
from edgellm.build.verify.check import row_errors
from edgellm.core.manifest import LLM_BUNDLE, LLM_ENGINE, load_bundle, load_engine
from edgellm.device_runtime.arrays import F32, I64, LoadedAdapter
from edgellm.device_runtime.engine.lora import open_adapters
from edgellm.device_runtime.networks.decoder import DecoderNetwork, SequencePart, open_decoder

CAPACITY, MAX_INPUT = 128, 64
PROMPT, PARENTS = 24, (-1, 0, 0, 1, 2)
TREE = PROMPT + 1  # begin of the tree
LENGTH = TREE + len(PARENTS) + 1  # with the token after the tree
ACCEPTED = (0, 2, 4)  # of the tree's nodes
LOGITS, KV = KINDS = ("logits", "K/V")
LAYER = f"{KV} of layer"  # layers with a KV cache are counted
_MAX_RANK = 8  # of LoRA adapters
_SHOWN = 3  # numbers of an output in the report
# ONNX Runtime's engines round activations in blocks of their own, or not at all; unrelated outputs
# differ by 1.4.
_ALLOWED_IN_BLOCKS = 0.3

Result = tuple[bool, dict[str, Any]]  # whether it passed, and what `prove` records


def name_of(part: str, sequence: int) -> str:
    """The name of an output of a sequence; `part` is as "logits of a tree"."""
    return f"{part}, sequence {sequence}"


def kind_of(name: str) -> str:
    """The kind of an output, whose limit it shares."""
    return KV if name.startswith(LAYER) else LOGITS


def outputs_of(
    network: DecoderNetwork, texts: Sequence[I64], adapter: LoadedAdapter | None = None
) -> dict[str, F32]:
    """Logits and KV cache of sequences in one batch: a prompt, a token, a tree, the next token.

    Args:
        network: an engine's.
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
            logits = np.array(result.logits, np.float32)
            found[name_of(f"{LOGITS} of {name}", index)] = logits

    run("the prompt", slice(PROMPT), 0, PROMPT - 1)
    run("a token", slice(PROMPT, TREE), PROMPT)
    depths, mask = _tree()
    run("a tree", slice(TREE, LENGTH - 1), TREE, position_ids=TREE + depths, tree_mask=mask)
    for kv in kvs:
        kv.compact(TREE, np.array(ACCEPTED))
    run("the next token", slice(LENGTH - 1, LENGTH), TREE + len(ACCEPTED))
    for index, kv in enumerate(kvs):
        planes = np.array(kv.read(kv.length), np.float32)
        for layer in range(len(planes) // 2):
            found[name_of(f"{LAYER} {layer}", index)] = planes[2 * layer : 2 * layer + 2, 0]
        kv.free()
    return found


def _tree() -> tuple[I64, np.ndarray[Any, Any]]:
    """Depths and attention mask of the nodes."""
    mask = np.eye(len(PARENTS), dtype=np.bool_)
    for node, parent in enumerate(PARENTS[1:], 1):
        mask[node] |= mask[parent]
    return mask.sum(axis=1) - 1, mask


def compare_outputs(
    bundle: Path, expected: Path, backend: str, sequences: int, adapter: Path | None
) -> Result:
    """Build an engine and compare its outputs with those in the file `expected`."""
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
        max_verify_tree_size=len(PARENTS),
        max_batch_size=len(texts),
        max_lora_rank=0 if adapter is None else _MAX_RANK,
        checks=False,  # expected outputs are the better reference
    )
    with tempfile.TemporaryDirectory() as folder:
        engine = Path(folder, "engine")
        build_engine("llm", bundle, engine, plan, backend, silent)
        manifest = load_engine(engine, LLM_ENGINE)
        network, loaded = open_decoder(engine, manifest), None
        if adapter is not None:
            adapters = open_adapters(engine, manifest, network, nullcontext)
            loaded = adapters.load(adapter.name, adapter)
        found = outputs_of(network, texts, loaded)
    wanted = {name for name in arrays if name.endswith(tuple(_endings(len(texts))))}
    if found.keys() != wanted:
        return False, {"said": [f"outputs differ: {sorted(found.keys() ^ wanted)}"]}
    rows = {
        name: row(array, arrays[name], row_errors(array, arrays[name]), allowed[kind_of(name)])
        for name, array in found.items()
    }
    return passed(rows), {"outputs": rows}


def _endings(sequences: int) -> list[str]:
    return [name_of("", index) for index in range(sequences)]


def row(found: Any, expected: Any, error: float, allowed: float | None) -> dict[str, Any]:
    """An output in the report: its first numbers as found and expected, error and limit.

    `allowed`: None where a dry run cannot judge it.
    """
    return {
        "found": np.ravel(found)[:_SHOWN].tolist(),
        "expected": np.ravel(expected)[:_SHOWN].tolist(),
        "error": float(error),
        "allowed": None if allowed is None else float(allowed),
    }


def passed(rows: dict[str, dict[str, Any]]) -> bool:
    """Whether no error exceeds its limit."""
    judged = (one for one in rows.values() if one["allowed"] is not None)
    return all(one["error"] <= one["allowed"] for one in judged)


def silent(_: str) -> None:
    """A report of a build's phases that shows nothing."""

"""Tiny bundles, and the outputs that transformers gives for their weights."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from edgellm.build.verify.check import DEVIATIONS
from edgellm.core.errors import EdgeLLMError
from edgellm.core.manifest import LLM_BUNDLE, load_bundle
from edgellm.device_runtime.arrays import I64
from edgellm.export.graph.architecture import ExportOptions
from edgellm.export.pipeline.draft import DraftOptions, export_draft
from edgellm.export.pipeline.llm import export_llm
from edgellm.export.pipeline.open_checkpoint import open_checkpoint, open_draft
from edgellm.export.pipeline.visual import VisualOptions, export_visual
from edgellm.scripts.proof_folder.checkpoints import LARGEST_INPUT, MODELS, write_checkpoints
from edgellm.scripts.proof_folder.oracle import expected_outputs, is_steady, roundings
from edgellm.scripts.proof_folder.pictures import expected_captions
from edgellm.scripts.proof_folder.steps.outputs import LENGTH
from edgellm.scripts.proof_folder.steps.pictures import CAPTIONS

SEQUENCES = 2
_FIRST_TOKEN = 8  # the tokens before are special
_TRIES = 16
# Float16 keeps 11 bits; products in another order differ by this much, whatever the model
_LEAST_ERROR = 2.0**-10


def make_bundle(
    bundle: Path, expected: Path, name: str, tokenizer: Path, adapter: Path | None = None
) -> None:
    """Write a tiny bundle and its expected outputs.

    The limit is three times what float16 changes in transformers, where activations cross other
    thresholds of quantization, too. Texts of mixtures choose the same experts in bfloat16.

    Args:
        bundle: a new folder.
        expected: a .npz file with the outputs of two sequences.
        name: of `checkpoints.MODELS`.
        tokenizer: see `write_checkpoints`.
        adapter: a new folder of the LoRA adapter, which expected outputs have merged.
    """
    with TemporaryDirectory() as folder:
        stored, exact = Path(folder, "stored"), Path(folder, "exact")
        write_checkpoints(name, stored, exact, tokenizer, adapter)
        export_llm(open_checkpoint(str(stored)), bundle, ExportOptions(dtype="fp16"))
        size = load_bundle(bundle, LLM_BUNDLE).decoder.vocab_size
        tries = (_texts(size, seed) for seed in range(1, _TRIES))
        steady = (one for one in tries if not MODELS[name].has_experts or is_steady(exact, one))
        if (texts := next(steady, None)) is None:
            raise EdgeLLMError(
                f"{name}: bfloat16 changes the logits of every text",
                hint="report it with the versions of torch and transformers",
            )
        rounding = roundings(LARGEST_INPUT).get(MODELS[name].precision)
        wanted, errors = expected_outputs(exact, texts, rounding)
    allowed: dict[str, Any] = {
        f"allowed {kind}": DEVIATIONS * max(error, _LEAST_ERROR) for kind, error in errors.items()
    }
    np.savez_compressed(expected, texts=texts, **wanted, **allowed)


def make_pair(base: Path, draft: Path, checkpoints: tuple[Path, Path]) -> None:
    """Write the bundles of a base and its EAGLE3 draft; `checkpoints` are theirs."""
    model, drafting = map(str, checkpoints)
    export_llm(open_checkpoint(model), base, ExportOptions(dtype="fp16", draft_model_dir=drafting))
    source = open_checkpoint(model, tokenizer=False)
    export_draft(open_draft(drafting), source, draft, DraftOptions("fp16"))


def make_pictures(visual: Path, pictures: Path, model: Path) -> None:
    """Write the bundle of a visual encoder, and pictures with the captions of transformers.

    Args:
        visual: a new folder.
        pictures: a new folder.
        model: the checkpoint of `examples/`.
    """
    export_visual(open_checkpoint(str(model), tokenizer=False), visual, VisualOptions("fp16"))
    pictures.mkdir()
    captions = expected_captions(model, pictures)
    (pictures / CAPTIONS).write_text(json.dumps(captions, indent=1), "utf-8")


def _texts(vocabulary: int, seed: int) -> I64:
    """Random tokens [SEQUENCES, LENGTH]."""
    return np.random.default_rng(seed).integers(_FIRST_TOKEN, vocabulary, (SEQUENCES, LENGTH))

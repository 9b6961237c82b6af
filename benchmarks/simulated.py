"""Quantized checkpoints as on GPUs: linear layers have inputs quantized by their scheme.

FP8 with a calibrated scale, FP4 in blocks of 16 with dynamic E4M3 scales, INT8 with a calibrated
scale; all else in float32, in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from edgellm.export.checkpoints.hf import Safetensors
from edgellm.quantize.evaluation.layer_errors import QuantizedLayer
from edgellm.quantize.formats.schemes import Recipe, choose_scheme
from edgellm.quantize.formats.tensors import read_below, read_tensor
from edgellm.quantize.models.language_model import LanguageModel
from edgellm.quantize.models.lm_head import float_head
from edgellm.quantize.models.one_layer_model import quiet_transformers, run_layer

CPU = torch.device("cpu")


def simulated(source: Path, folder: Path, flags: Sequence[str]) -> Callable[..., np.ndarray]:
    """Return a function of token ids [S] to logits [S, V].

    Args:
        source: the float checkpoint.
        folder: the result of `edgellm-quantize`, with a float head.
        flags: of `edgellm-quantize`.
    """
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    scheme = choose_scheme(given["--quantization"], given.get("--algo"))
    quiet_transformers()
    subject = LanguageModel.open(str(source), ())
    recipe = Recipe(scheme, 0, 1.0)
    exported = Safetensors(sorted(folder.glob("*.safetensors")))
    layers = [_layer(subject, index, exported, recipe) for index in range(len(subject.layers))]
    norm = subject.norm_model(None, CPU)
    head = float_head(read_tensor(subject.tensors, subject.head_name), CPU, subject.finish)

    def logits(ids: np.ndarray) -> np.ndarray:
        states = next(subject.embedded(ids[None], 1))
        for layer in layers:
            states = layer(states)
        return head(run_layer(norm, states)[0]).numpy()

    return logits


def _layer(
    subject: LanguageModel, index: int, exported: Safetensors, recipe: Recipe
) -> QuantizedLayer:
    prefix, family = subject.layers[index], subject.family
    source = {name: tensor.floats() for name, tensor in subject.layer_source(index).items()}
    tensors = {
        family.canonical(name): tensor for name, tensor in read_below(exported, prefix).items()
    }
    return QuantizedLayer(
        prefix,
        source,
        tensors,
        recipe,
        lambda values: subject.layer_model(index, values, CPU),
        CPU,
        family,
        subject.config.head_dim,
    )

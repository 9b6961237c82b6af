"""KL divergence of each form with rotations (`edgellm-quantize --rotate`).

    pip install -e '.[dev]'
    python benchmarks/rotations.py

SmolLM2-135M-Instruct, all layers quantized. Its only file is on a 4-bit grid, which would favour
unrotated weights, so noise of the size of a step is added first. Weights are rounded to nearest
(with a search for scales) or with GPTQ; names list the quantization of inputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from edgellm.export.checkpoints.residual_rotation import Computed, Recipe
from edgellm.quantize.activations.layer_inputs import Group, each_input
from edgellm.quantize.algorithms.gptq.float_grids import Nvfp4Grid
from edgellm.quantize.algorithms.gptq.rounding import (
    Feedback,
    Grid,
    IntegerGrid,
    round_nearest,
    round_with_feedback,
)
from edgellm.quantize.algorithms.rotation_r1 import rotated
from edgellm.quantize.algorithms.rotation_r2 import rotate_values
from edgellm.quantize.calibration.text import load_tokenizer, read_calibration
from edgellm.quantize.formats.activation_rounding import round_int8_blocks, round_nvfp4
from edgellm.quantize.formats.schemes import RESIDUAL, ROTATIONS, VALUES
from edgellm.quantize.formats.tensors import read_tensor
from edgellm.quantize.models.families import Family
from edgellm.quantize.models.language_model import LanguageModel
from edgellm.quantize.models.lm_head import float_head
from edgellm.quantize.models.one_layer_model import linears, quiet_transformers, run_layer
from edgellm.scripts import smollm2

CPU = torch.device("cpu")
Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Form:
    """The quantization of weights and inputs."""

    grid: Callable[[Tensor], Grid]
    feeds_back: bool = False
    inputs: Callable[[Tensor], Tensor] | None = None


def _fp4(x: Tensor) -> Tensor:
    return round_nvfp4(x, float(x.abs().max()) / (6 * 448))


FORMS = {
    "int4, blocks of 32": Form(lambda _: IntegerGrid(-8, 7, 32)),
    "int4, blocks of 32, feedback": Form(lambda _: IntegerGrid(-8, 7, 32), feeds_back=True),
    "int8, inputs int8": Form(lambda _: IntegerGrid(-127, 127, 0), inputs=round_int8_blocks),
    "nvfp4": Form(Nvfp4Grid.of),
    "nvfp4, inputs fp4": Form(Nvfp4Grid.of, inputs=_fp4),
    "nvfp4, feedback": Form(Nvfp4Grid.of, feeds_back=True),
    "nvfp4, feedback, inputs fp4": Form(Nvfp4Grid.of, inputs=_fp4, feeds_back=True),
}


def off_grid(model: LanguageModel) -> LanguageModel:
    """Add noise of the size of a Q4_1 step to the linear layers of a model."""
    source, chance = model.whole.tensors, np.random.default_rng(0)

    def noisy(name: str) -> list[np.ndarray]:
        blocks = read_tensor(source, name).floats().reshape(-1, 32)
        step = np.ptp(blocks, 1, keepdims=True) / 15
        noise = step * chance.uniform(-0.5, 0.5, blocks.shape)
        return [(blocks + noise).astype(np.float32).reshape(source.infos()[name].shape)]

    names = [name for name in source.infos() if name.endswith("proj.weight")]
    values = {name: noisy(name) for name in names}
    recipes = {
        name: Recipe(replace(source.infos()[name], dtype="F32"), lambda name=name: values[name])
        for name in names
    }
    return LanguageModel.of(replace(model.whole, tensors=Computed(source, recipes)), ())


def measure(
    model: LanguageModel, rotation: str, fitted: np.ndarray, held_out: np.ndarray
) -> dict[str, tuple[float, float]]:
    """Return KL divergence, and perplexity relative to the float model's, by form."""
    subject = rotated(model, 0, ()) if rotation in RESIDUAL else model
    floats, calibration = (
        torch.cat([*subject.embedded(rows, len(rows))]) for rows in (held_out, fitted)
    )
    streams = dict.fromkeys(FORMS, (floats, calibration))
    for index in range(len(subject.layers)):
        source = {name: value.floats() for name, value in subject.layer_source(index).items()}
        if rotation in VALUES:
            source = rotate_values(source, subject.config.head_dim, subject.family)
        for name, form in FORMS.items():
            layer = subject.layer_model(index, source, CPU)
            streams[name] = _advance(layer, form, subject.family, streams[name])
        floats = run_layer(subject.layer_model(index, source, CPU), floats)
    right = torch.from_numpy(held_out[:, 1:].reshape(-1))
    reference, found = _logs(subject, floats), {}
    for name, (states, _) in streams.items():
        logs = _logs(subject, states)
        losses = [-each.gather(-1, right[:, None]).mean() for each in (logs, reference)]
        divergence = (reference.exp() * (reference - logs)).sum(-1).mean()
        found[name] = float(divergence), float((losses[0] - losses[1]).exp())
    return found


def _advance(
    layer: PreTrainedModel, form: Form, family: Family, states: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return held-out and calibration states after the quantized layer."""
    moments: dict[Group, Tensor] = {}
    for row in each_input(layer, [states[1]], family):
        for names, x in row.items():
            moments[names] = moments.get(names, 0) + x.T @ x / states[1].shape[0] / len(x)
    modules = linears(layer)
    for names, moment in moments.items():
        feedback = Feedback.of(moment) if form.feeds_back else None
        for module in (modules[name] for name in names):
            weight, grid = module.weight.detach(), form.grid(module.weight.detach())
            if feedback is None:
                rounded = round_nearest(weight, moment.diagonal(), grid)
            else:
                rounded = round_with_feedback(weight, feedback, grid)
            module.weight.copy_(rounded.values())
            if (inputs := form.inputs) is not None:
                module.register_forward_pre_hook(lambda _, args: (inputs(args[0]),))
    return run_layer(layer, states[0]), run_layer(layer, states[1])


def _logs(model: LanguageModel, states: Tensor) -> Tensor:
    head = float_head(read_tensor(model.tensors, model.head_name), CPU, model.finish)
    normed = run_layer(model.norm_model(None, CPU), states)[:, :-1].flatten(0, 1)
    parts = [head(normed[at : at + 256]) for at in range(0, len(normed), 256)]
    return torch.log_softmax(torch.cat(parts), -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="another checkpoint, without added noise")
    parser.add_argument("--rotations", nargs="+", default=["none", *ROTATIONS])
    parser.add_argument("--rows", type=int, default=4, help="held-out samples of 256 tokens")
    arguments = parser.parse_args()
    quiet_transformers()
    model = LanguageModel.open(arguments.model or str(smollm2.fetch()), ())
    model = model if arguments.model else off_grid(model)
    text = read_calibration(
        "default", load_tokenizer(model.checkpoint.tokenizer_files), num_samples=10,
        num_held_out=arguments.rows, seq_len=256, vocab_size=model.config.vocab_size, seed=0,
    )  # fmt: skip
    print("KL divergence (perplexity over that of floats)")
    print(f"{'rotated':10} {'form':30} {'KL':>8} {'perplexity':>10}", flush=True)
    with torch.no_grad():
        for rotation in arguments.rotations:
            found = measure(model, rotation, text.rows, text.held_out)
            for name, (divergence, ratio) in found.items():
                print(f"{rotation:10} {name:30} {divergence:8.4f} {ratio:9.3f}x", flush=True)


if __name__ == "__main__":
    main()

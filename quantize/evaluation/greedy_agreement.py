"""Greedy agreement: outputs of the float model that the quantized model changes.

The float model decodes layer by layer: memory holds one layer and the KV caches, and each token
loads the whole model once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from edgellm.quantize.calibration.hidden_states import States
from edgellm.quantize.formats.tensors import read_tensor
from edgellm.quantize.metrics.divergence import Changes, count_changes
from edgellm.quantize.metrics.questions import (
    Questions,
    read_outputs,
    store_outputs,
    stored_outputs,
)
from edgellm.quantize.models.lm_head import Head, float_head, greedy
from edgellm.quantize.models.one_layer_model import run_layer
from edgellm.quantize.plan import Plan


def generate_outputs(plan: Plan, questions: Questions) -> None:
    """Generate the float model's missing outputs, one token of each sequence at a time."""
    folder = plan.task.work.path
    outputs = stored_outputs(questions, folder)
    # transformers derives the sequence length from the caches of attention layers.
    config = plan.subject.config
    attends = len(config.attending_layers) == config.num_hidden_layers
    caches: dict[tuple[int, int], Any] = {}
    while unfinished := [i for i, ids in enumerate(outputs) if not questions.is_finished(ids)]:
        sequences = {i: (*questions.prompts[i], *outputs[i]) for i in unfinished}
        new = {i: ids[-1:] if (0, i) in caches else ids for i, ids in sequences.items()}
        for i, token in _next_tokens(plan, new, caches if attends else None).items():
            outputs[i].append(token)
        store_outputs(outputs, folder)


def _next_tokens(
    plan: Plan, new: dict[int, tuple[int, ...]], caches: dict[tuple[int, int], Any] | None
) -> dict[int, int]:
    """Return the greedy next token of each sequence; `new` are the tokens not yet in `caches`.

    Without caches the whole sequences are computed.
    """
    subject, device = plan.subject, plan.task.device
    reader = subject.reader
    states = {
        i: next(reader.embedded(np.array([ids], np.int64), 1)).to(device) for i, ids in new.items()
    }
    for layer in range(len(subject.layers)):
        source = {name: tensor.floats() for name, tensor in subject.layer_source(layer).items()}
        model = subject.layer_model(layer, source, device)
        for i, values in states.items():
            if caches is None:
                states[i] = run_layer(model, values)
                continue
            with torch.no_grad():
                found = model.model(
                    inputs_embeds=values, past_key_values=caches.get((layer, i)), use_cache=True
                )
            caches[layer, i] = found.past_key_values
            states[i] = found.last_hidden_state
    last = torch.cat([values[:, -1:] for values in states.values()])
    head = float_head(read_tensor(subject.tensors, subject.head_name), device, subject.finish)
    tokens = greedy(run_layer(subject.norm_model(None, device), last), head)
    return dict(zip(new, tokens[:, 0].tolist(), strict=True))


def changes(plan: Plan, questions: Questions, states: States, head: Head) -> Changes:
    """Compare the quantized model's outputs; `states` are its hidden states after all layers."""
    outputs = read_outputs(questions, plan.task.work.path)
    device = plan.task.device
    norm = plan.subject.norm_model(None, device)
    found = []
    for batch in states.batches(device):
        for row in run_layer(norm, batch):
            own = outputs[len(found)]
            decoded = row[own.start : own.start + len(own.output)]
            found.append(greedy(decoded[None], head)[0])
    return count_changes(outputs, found)

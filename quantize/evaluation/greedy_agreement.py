"""Greedy agreement: outputs of the float model, and how many the quantized one changes.

The float model answers layer by layer, as all is computed here: memory stays that of a layer and of
the answers' caches, and each token reads the whole model once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from edgellm.quantize.calibration.hidden_states import States
from edgellm.quantize.formats.tensors import read_tensor
from edgellm.quantize.metrics.divergence import Changes, count_changes
from edgellm.quantize.metrics.questions import Questions, read_asked, store_answers, stored_answers
from edgellm.quantize.models.lm_head import Head, float_head, greedy
from edgellm.quantize.models.one_layer_model import run_layer
from edgellm.quantize.plan import Plan


def find_answers(plan: Plan, questions: Questions) -> None:
    """Generate the float model's missing outputs, one token of each sequence at a time."""
    folder = plan.task.work.path
    answers = stored_answers(questions, folder)
    # Recurrent layers alone do not give transformers the length of their text.
    config = plan.subject.config
    attends = len(config.attending_layers) == config.num_hidden_layers
    caches: dict[tuple[int, int], Any] = {}
    while unfinished := [i for i, ids in enumerate(answers) if not questions.is_answered(ids)]:
        rows = {i: (*questions.prompts[i], *answers[i]) for i in unfinished}
        unread = {i: ids[-1:] if (0, i) in caches else ids for i, ids in rows.items()}
        for i, token in _next_tokens(plan, unread, caches if attends else None).items():
            answers[i].append(token)
        store_answers(answers, folder)


def _next_tokens(
    plan: Plan, unread: dict[int, tuple[int, ...]], caches: dict[tuple[int, int], Any] | None
) -> dict[int, int]:
    """The most likely next token of each text; `unread` are the tokens not yet in `caches`.

    Without caches the whole texts are computed.
    """
    subject, device = plan.subject, plan.task.device
    reader = subject.reader
    states = {
        i: next(reader.embedded(np.array([ids], np.int64), 1)).to(device)
        for i, ids in unread.items()
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
    return dict(zip(unread, tokens[:, 0].tolist(), strict=True))


def changes(plan: Plan, questions: Questions, states: States, head: Head) -> Changes:
    """Agreement of the quantized model; `states` are hidden states after its last layer."""
    asked = read_asked(questions, plan.task.work.path)
    device = plan.task.device
    norm = plan.subject.norm_model(None, device)
    found = []
    for batch in states.batches(device):
        for row in run_layer(norm, batch):
            own = asked[len(found)]
            places = row[own.start : own.start + len(own.answer)]
            found.append(greedy(places[None], head)[0])
    return count_changes(asked, found)

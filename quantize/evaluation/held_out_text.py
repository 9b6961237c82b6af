"""Quantizes the head, and compares the models on held-out text."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgellm.export.checkpoints.checkpoint import TensorSource
from edgellm.quantize.algorithms.modelopt import quantize
from edgellm.quantize.algorithms.tied_embedding import decode_table, store_table
from edgellm.quantize.calibration.hidden_states import States
from edgellm.quantize.evaluation.draft_acceptance import drafted
from edgellm.quantize.evaluation.greedy_agreement import changes
from edgellm.quantize.formats.quantized_linear import PARTS, DecodedLinear, decode_linear
from edgellm.quantize.formats.tensors import read_below, read_tensor
from edgellm.quantize.metrics.divergence import Quality
from edgellm.quantize.models.eagle_draft import Draft
from edgellm.quantize.models.lm_head import Head, float_head, measure, quantized_head
from edgellm.quantize.plan import Plan
from edgellm.quantize.work_folder import ANSWERS, CALIBRATION, FLOAT, HEAD_PART, QUANTIZED, ROUNDED

_HEAD_TOKENS = 1024  # calibration tokens of a head with a smoothing search


def evaluate(plan: Plan, streams: Mapping[str, States], draft: Draft | None = None) -> Quality:
    """Quantize the head if requested, and compare the outputs of the two models.

    Args:
        plan: of the run.
        streams: hidden states after the last layer, by stream name.
        draft: a float draft whose acceptance is measured.
    """
    subject, task = plan.subject, plan.task
    if plan.head is not None and not task.work.has(HEAD_PART):
        if plan.head.scheme.is_table:
            store_table(plan)
        else:
            _quantize_head(plan, streams.get(CALIBRATION) or streams[ROUNDED])
    head = read_tensor(subject.tensors, subject.head_name)
    heads = [float_head(head, task.device, subject.finish)] * 2
    if plan.head is not None:
        is_table = plan.head.scheme.is_table
        stored = task.work.tensors(HEAD_PART)
        decoded = decode_table(plan) if is_table else _decoded_head(plan, stored)
        heads[1] = quantized_head(decoded, task.device, subject.finish)

    def measured(of_quantized: Head) -> Quality:
        return measure(
            subject.targets(task),
            (streams[FLOAT], streams[QUANTIZED]),
            subject.norm_model(None, task.device),
            (heads[0], of_quantized),
            task.device,
        )

    quality = measured(heads[1])
    if task.questions is not None:
        found = changes(plan, task.questions, streams[ANSWERS], heads[1])
        quality = replace(quality, answers=found)
    if draft is not None:
        quality = replace(quality, drafted=drafted(plan, draft, streams, (heads[0], heads[1])))
    if plan.head is None:
        return quality
    return replace(quality, kl_float_head=measured(heads[0]).kl_divergence)


def _decoded_head(plan: Plan, tensors: TensorSource) -> DecodedLinear:
    assert plan.head is not None
    out, width = plan.subject.tensors.infos()[plan.subject.head_name].shape
    found = read_below(tensors, "")
    return decode_linear(found, "lm_head", (out, width), plan.head.scheme.rounds_input)


def _quantize_head(plan: Plan, states: States) -> None:
    assert plan.head is not None
    start = time.perf_counter()
    subject, task = plan.subject, plan.task
    weight = read_tensor(subject.tensors, subject.head_name).floats()
    model = subject.norm_model(weight, task.device)
    limit = _HEAD_TOKENS if plan.head.scheme.is_awq else None

    def calibrate(instrumented: Any) -> None:
        count = 0
        for batch in states.batches(task.device):
            for row in batch[:, None]:  # the logits of one sequence are large
                if limit is None or count < limit:
                    instrumented(inputs_embeds=row, use_cache=False)
                count += row.shape[1]

    exported = quantize(model, plan.head, calibrate, task.work.log)
    names = {f"lm_head.{part}" for part in PARTS}
    tensors = {name: value for name, value in exported.tensors.items() if name in names}
    task.work.store(
        HEAD_PART, tensors,
        {"quantization": exported.quantization, "seconds": time.perf_counter() - start},
    )  # fmt: skip

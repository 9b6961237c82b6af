"""One run of `edgellm-quantize`, layer by layer; finished layers are stored on disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from edgellm.core.commands.output_folder import require_own
from edgellm.core.errors import EdgeLLMError
from edgellm.core.file_lock import hold
from edgellm.core.resources import explain_full_disk
from edgellm.quantize.activations.token_weights import layer_weights, weigh_tokens, weighs_tokens
from edgellm.quantize.algorithms.autoround import autoround
from edgellm.quantize.algorithms.cross_layer_equalization import equalize
from edgellm.quantize.algorithms.gptq.layer import round_layer
from edgellm.quantize.algorithms.kv_cache import cache_scales
from edgellm.quantize.algorithms.mixed_precision.layer_costs import (
    divergence,
    find_gradients,
    measures_layers,
)
from edgellm.quantize.algorithms.mixed_precision.search import mix
from edgellm.quantize.algorithms.modelopt import (
    Exported,
    quantize,
)
from edgellm.quantize.algorithms.smoothquant import smooth
from edgellm.quantize.algorithms.smoothquant_folding import fold_smoothing
from edgellm.quantize.algorithms.tied_embedding import write_quantized_embeddings
from edgellm.quantize.algorithms.value_rotation import rotate_values
from edgellm.quantize.calibration.hidden_states import States
from edgellm.quantize.evaluation.draft_acceptance import open_draft_of, store_taps
from edgellm.quantize.evaluation.greedy_agreement import generate_outputs
from edgellm.quantize.evaluation.held_out_text import evaluate
from edgellm.quantize.evaluation.layer_errors import (
    LayerReport,
    QuantizedLayer,
    check_weight_errors,
    compare,
)
from edgellm.quantize.formats import compressed_tensors
from edgellm.quantize.formats.modelopt import F32
from edgellm.quantize.formats.schemes import VALUES, Recipe
from edgellm.quantize.formats.tensors import Tensor
from edgellm.quantize.job import Job
from edgellm.quantize.metrics.divergence import Quality
from edgellm.quantize.models.eagle_draft import Draft
from edgellm.quantize.models.experts import find_experts, round_experts, watch
from edgellm.quantize.models.families import Family
from edgellm.quantize.models.one_layer_model import LAYER, quiet_transformers, run_layer
from edgellm.quantize.pipeline.checkpoint_writer import write_folder
from edgellm.quantize.pipeline.planning import make_plan
from edgellm.quantize.plan import Plan
from edgellm.quantize.report.html_report import check_page, write_page
from edgellm.quantize.report.report import Report, make_report
from edgellm.quantize.work_folder import (
    ANSWERS,
    CALIBRATION,
    FLOAT,
    LOCK,
    QUANTIZED,
    ROUNDED,
    as_facts,
    layer_part,
)

Progress = Callable[[str, int, int], None]  # finished part, number of finished parts, total
_FULL_HINT = "free some space and run the command again: finished layers are stored"


def run_job(job: Job, progress: Progress) -> Report:
    """Quantize a language model or a draft into `job.output_dir`.

    The same job resumes an interrupted run. The output folder appears at the end.

    Raises:
        EdgeLLMError: the model, text, folders or result are invalid.
    """
    quiet_transformers()
    start = time.perf_counter()
    require_own(job.output_dir)
    check_page(job)
    plan = make_plan(job)
    draft = open_draft_of(plan)
    work = plan.task.work
    work.claim(plan.settings, overwrite=job.overwrite)
    busy = f"another edgellm-quantize works in {work.path}"
    with (
        hold(work.path / LOCK, busy, "wait for it, or give another --output_dir"),
        explain_full_disk(work.path, hint=_FULL_HINT),
    ):
        quality = _quantize(plan, draft, progress)
        report = make_report(plan, quality, time.perf_counter() - start)
        write_page(job, report)
        check_divergence(job, quality)
        write_folder(plan, report)
        work.remove()
    return report


def check_divergence(job: Job, quality: Quality) -> None:
    """Raise `EdgeLLMError` if the result exceeds `--max_kl`; its parts stay."""
    largest = job.max_kl
    if largest is not None and not quality.kl_divergence <= largest:
        raise EdgeLLMError(
            f"a KL divergence of {quality.kl_divergence:.4f} nats is above --max_kl {largest}: "
            f"{job.output_dir} was not written",
            hint="try another --quantization; the same command with a larger --max_kl writes it "
            f"from {job.work_dir}",
        )


def _quantize(plan: Plan, draft: Draft | None, progress: Progress) -> Quality:
    """Quantize the unfinished layers, and compare the two models."""
    work, subject = plan.task.work, plan.subject
    weighs, questions = weighs_tokens(plan), plan.task.questions
    prepared = subject.num_preparations + weighs + (questions is not None)
    layers = len(subject.layers)
    parts = prepared + layers + 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.job.seed)
        if weighs:
            weigh_tokens(plan)
            progress("token weights", 1, parts)
        if questions is not None:
            generate_outputs(plan, questions)
            progress("outputs of the float model", weighs + 1, parts)
        if measures_layers(plan):
            find_gradients(plan)
        for index in range(layers):
            if not work.has(layer_part(index)):
                if index == 0:
                    streams = _streams(plan, 0)
                    subject.prepare(
                        plan.task, streams, lambda what, done: progress(what, done, parts)
                    )
                    if plan.head is not None and plan.head.scheme.is_table:
                        write_quantized_embeddings(plan, streams)
                store_taps(plan, draft, index, _streams(plan, index))
                _quantize_layer(plan, index)
            progress(f"layer {index}", prepared + index + 1, parts)
        last = _streams(plan, layers)
        store_taps(plan, draft, layers, last)
        quality = evaluate(plan, last, draft)
    progress("evaluation", parts, parts)
    return quality


def _streams(plan: Plan, layer: int) -> dict[str, States]:
    """Return the streams of hidden states that enter `layer`."""
    task = plan.task
    batch_tokens = task.batch_rows * plan.subject.states_shape(task.rows(FLOAT), layer)[1]
    names = [FLOAT, QUANTIZED]
    names += [] if plan.recipe.scheme.form else [CALIBRATION]
    names += [ROUNDED] if plan.recipe.scheme.follows_rounded else []
    names += [ANSWERS] if task.questions is not None else []
    shapes = {name: plan.subject.states_shape(task.rows(name), layer) for name in names}
    return {
        name: States(task.work.states(name, layer), shape, max(1, batch_tokens // shape[1]))
        for name, shape in shapes.items()
    }


def _quantize_layer(plan: Plan, index: int) -> None:
    """Quantize one layer, and compute all streams after it."""
    if index in plan.job.keep_layers:
        _keep_layer(plan, index)
        return
    start = time.perf_counter()
    subject, task = plan.subject, plan.task
    task.work.drop_states(before=index)
    before, after = _streams(plan, index), _streams(plan, index + 1)
    raw = subject.layer_source(index)
    source = {name: tensor.floats() for name, tensor in raw.items()}
    if plan.job.rotate in VALUES:
        source = rotate_values(source, subject.config.head_dim, subject.family)
    source = equalize(plan, index, source, before.get(ROUNDED))
    exported, own = _exported(plan, index, source, before, after)
    tensors = {**_kept(exported, raw, subject.family), **own.tensors}
    layer = subject.layers[index]
    quantized = _computing(plan, index, source, tensors, plan.recipe)
    errors = quantized.weight_errors(source)
    check_weight_errors(layer, errors)
    if plan.job.format == compressed_tensors.NAME:
        tensors = fold_smoothing(tensors, source, subject.family, subject.config.head_dim)
        tensors = compressed_tensors.without_input_scales(tensors)
        scheme = compressed_tensors.run_scheme(plan.recipe.scheme)
        quantized = _computing(plan, index, source, tensors, replace(plan.recipe, scheme=scheme))
        tensors = compressed_tensors.pack(tensors)
    for name in [name for name in before if name not in (CALIBRATION, FLOAT)]:
        before[name].advance(after[name], quantized, task.device)
    output, stream = compare(
        quantized,
        before[FLOAT],
        (after[FLOAT], after[QUANTIZED]),
        task.device,
        subject.config.hidden_size,
    )
    bits = {name: linear.bits for name, linear in quantized.decoded.items()}
    added = 0.0
    if measures_layers(plan):
        added = divergence(plan, index, quantized, before[FLOAT], after[FLOAT])
    seconds = time.perf_counter() - start
    report = LayerReport(
        index=index,
        output_error=output,
        stream_error=stream,
        weight_errors=errors,
        bits=bits,
        seconds=seconds,
        few=own.few,
        divergence=added,
    )
    stored = subject.family.stored_name
    named = {layer + stored(name): tensor for name, tensor in tensors.items()}
    facts = as_facts(report, quantization=exported.quantization, producer=exported.producer)
    task.work.store(layer_part(index), named, facts)


def _computing(
    plan: Plan, index: int, source: dict[str, F32], tensors: dict[str, Tensor], recipe: Recipe
) -> QuantizedLayer:
    """Return the layer as an engine computes it."""
    subject, device = plan.subject, plan.task.device
    return QuantizedLayer(
        name=subject.layers[index],
        source=source,
        exported=tensors,
        recipe=recipe,
        make_model=lambda values: subject.layer_model(index, values, device),
        device=device,
        family=subject.family,
        head_dim=subject.config.head_dim,
    )


def _keep_layer(plan: Plan, index: int) -> None:
    """Skip a float layer: compute all streams after it, and store a part without tensors."""
    start = time.perf_counter()
    subject, task = plan.subject, plan.task
    task.work.drop_states(before=index)
    before, after = _streams(plan, index), _streams(plan, index + 1)
    source = {name: tensor.floats() for name, tensor in subject.layer_source(index).items()}
    model = subject.layer_model(index, source, task.device)
    for name in before:
        before[name].advance(after[name], lambda x: run_layer(model, x), task.device)
    streams = after[FLOAT], after[QUANTIZED]
    width = subject.config.hidden_size
    output, stream = compare(
        lambda x: run_layer(model, x), before[FLOAT], streams, task.device, width
    )
    report = LayerReport(
        index=index,
        output_error=output,
        stream_error=stream,
        weight_errors={},
        bits={},
        seconds=time.perf_counter() - start,
    )
    task.work.store(layer_part(index), {}, as_facts(report, quantization=None, producer=None))


def _exported(
    plan: Plan,
    index: int,
    source: dict[str, F32],
    before: dict[str, States],
    after: dict[str, States],
) -> tuple[Exported, _Own]:
    """Compute the float streams after the layer, then quantize it."""
    device = plan.task.device
    model = plan.subject.layer_model(index, source, device)
    names = [FLOAT]
    is_read = index + 1 < len(plan.subject.layers) or plan.head is not None
    if is_read and CALIBRATION in before:
        names.append(CALIBRATION)
    for name in names:
        before[name].advance(after[name], lambda x: run_layer(model, x), device)

    log, states = plan.task.work.log, before.get(CALIBRATION) or before[ROUNDED]
    own, scheme, kv_cache = _Own({}, {}), plan.recipe.scheme, plan.recipe.kv_cache
    attention = plan.subject.family.attention_of(source)
    if kv_cache is not None and attention and (kv_cache == "int8" or not scheme.config):
        scales = cache_scales(model, states.batches(device), kv_cache)
        own.tensors.update({f"{attention}.{name}": scale for name, scale in scales.items()})
    _round_experts(plan, model, states, own)
    family, head_dim = plan.subject.family, plan.subject.config.head_dim
    if scheme.is_smoothed:
        return smooth(model, plan.recipe, states.batches(device), family, head_dim), own
    if scheme.follows_rounded:
        rounded = before[ROUNDED].batches(device)
        if scheme.is_autoround:
            return autoround(model, plan.recipe, states.batches(device), rounded, log), own
        weights = layer_weights(plan, index) if weighs_tokens(plan) else None
        forms = mix(plan).modules[index] if scheme.is_mixed else None
        return round_layer(model, plan.recipe, rounded, family, weights, forms), own

    def calibrate(instrumented: Any) -> None:
        for batch in states.batches(device):
            run_layer(instrumented, batch)

    return quantize(model, plan.recipe, calibrate, log, keeps_norms=bool(family.floats)), own


@dataclass(frozen=True, slots=True)
class _Own:
    """Tensors that edgellm computes: KV cache scales and experts."""

    tensors: dict[str, Tensor]
    few: dict[str, int]  # experts with few tokens: their number


def _round_experts(plan: Plan, model: PreTrainedModel, states: States, own: _Own) -> None:
    """Quantize the experts of the layer, if any."""
    layer, family = model.model.layers[0], plan.subject.family
    experts = find_experts(layer)
    if experts is None or family.experts is None:
        return

    def run() -> None:
        for batch in states.batches(plan.task.device):
            run_layer(model, batch)

    seen, few = watch(experts, run)
    prefix = family.experts.prefix
    own.tensors.update(round_experts(experts, seen, plan.recipe, prefix))
    own.few.update({f"{prefix}.{index}": tokens for index, tokens in few.items()})


def _kept(exported: Exported, raw: dict[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Return the layer's tensors; unchanged ones have the source's dtype."""
    found: dict[str, Tensor] = {}
    for name, tensor in exported.tensors.items():
        if not name.startswith(LAYER.format(0)):
            continue
        local = family.canonical(name.removeprefix(LAYER.format(0)))
        before = raw.get(local)
        if before is None or tensor.info.dtype != "F32":
            found[local] = tensor
        else:
            unchanged = np.array_equal(before.floats(), tensor.floats())
            found[local] = before if unchanged else tensor
    return found

"""One run of `edgellm-quantize llm`: layer by layer, each finished one kept on disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from edgellm.export.checkpoint import TensorSource
from edgellm.quantize.block import LAYER, head_model, layer_model, quiet_transformers, run_layer
from edgellm.quantize.checks import EMBEDDING, NORM
from edgellm.quantize.engine import Exported, quantize
from edgellm.quantize.evaluate import LayerReport, QuantizedLayer, compare, refuse_broken
from edgellm.quantize.folder import check_output, write_folder
from edgellm.quantize.job import Job, Plan, make_plan
from edgellm.quantize.linear import PARTS, DecodedLinear, decode_linear
from edgellm.quantize.logits import Quality, float_head, measure, quantized_head
from edgellm.quantize.report import Report, make_report
from edgellm.quantize.states import States
from edgellm.quantize.tensors import Tensor, read_below, read_tensor
from edgellm.quantize.work import (
    CALIBRATION,
    FLOAT,
    QUANTIZED,
    WorkFolder,
    as_facts,
    layer_part,
)

Progress = Callable[[str, int, int], None]  # what was finished, parts done, parts in all
HEAD_PART = "head"
_HEAD_TOKENS = 1024  # with which a head is calibrated whose smoothing is searched


def run_llm(job: Job, progress: Progress) -> Report:
    """Quantize a checkpoint into `job.output_dir`.

    An interrupted run goes on where it stopped. The output folder appears when all is done.

    Raises:
        EdgeLLMError: model, text, folders or the result are not what they should be.
    """
    quiet_transformers()
    start = time.perf_counter()
    work = WorkFolder(job.work_dir)
    check_output(job.output_dir)
    plan = make_plan(job, resuming=work.is_there)
    work.claim(plan.settings)
    parts = plan.config.num_hidden_layers + 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)
        for index in range(plan.config.num_hidden_layers):
            if not work.has(layer_part(index)):
                _quantize_layer(plan, work, index)
            progress(f"layer {index}", index + 1, parts)
        quality = _finish(plan, work)
    progress("evaluation", parts, parts)
    report = make_report(plan, work, quality, time.perf_counter() - start)
    write_folder(plan, work, report)
    work.remove()
    return report


def _streams(plan: Plan, work: WorkFolder, layer: int) -> dict[str, States]:
    """The three streams of hidden states that enter `layer`."""
    sizes = {
        CALIBRATION: plan.calibration.rows.shape,
        FLOAT: plan.calibration.held_out.shape,
        QUANTIZED: plan.calibration.held_out.shape,
    }
    return {
        name: States(
            work.states(name, layer), (rows, length, plan.config.hidden_size), plan.batch_rows
        )
        for name, (rows, length) in sizes.items()
    }


def _embed(plan: Plan, streams: dict[str, States]) -> None:
    """The states that enter the first layer."""
    table = read_tensor(plan.checkpoint.tensors, EMBEDDING)
    texts = {CALIBRATION: plan.calibration.rows, FLOAT: plan.calibration.held_out}
    for name, states in streams.items():
        rows = texts.get(name, plan.calibration.held_out)
        states.write(_embedded(table, rows, plan.batch_rows))


def _embedded(table: Tensor, rows: np.ndarray, batch_rows: int) -> Iterator[torch.Tensor]:
    for begin in range(0, len(rows), batch_rows):
        batch = rows[begin : begin + batch_rows]
        known, places = np.unique(batch, return_inverse=True)
        vectors = np.concatenate([table.rows(int(i), int(i) + 1).floats() for i in known])
        yield torch.from_numpy(vectors[places.reshape(batch.shape)])


def _quantize_layer(plan: Plan, work: WorkFolder, index: int) -> None:
    """One layer from the source to a finished part, and all streams behind it."""
    start = time.perf_counter()
    work.drop_states(before=index)
    before, after = _streams(plan, work, index), _streams(plan, work, index + 1)
    if index == 0:
        _embed(plan, before)
    raw = read_below(plan.checkpoint.tensors, LAYER.format(index))
    raw = {name: tensor for name, tensor in raw.items() if not name.endswith("inv_freq")}
    source = {name: tensor.floats() for name, tensor in raw.items()}
    exported = _exported(plan, work, index, source, before, after)
    tensors = _kept(exported, raw)
    quantized = QuantizedLayer(
        plan.checkpoint.config, index, source, tensors, plan.recipe.scheme, plan.device
    )
    errors = quantized.weight_errors(source)
    refuse_broken(index, errors)
    before[QUANTIZED].advance(after[QUANTIZED].path, quantized, plan.device)
    output, stream = compare(
        quantized, before[FLOAT], (after[FLOAT], after[QUANTIZED]), plan.device
    )
    bits = {name: linear.bits for name, linear in quantized.decoded.items()}
    report = LayerReport(index, output, stream, errors, bits, time.perf_counter() - start)
    named = {LAYER.format(index) + name: tensor for name, tensor in tensors.items()}
    facts = as_facts(report, quantization=exported.quantization, producer=exported.producer)
    work.store(layer_part(index), named, facts)


def _exported(
    plan: Plan,
    work: WorkFolder,
    index: int,
    source: dict[str, Any],
    before: dict[str, States],
    after: dict[str, States],
) -> Exported:
    """The float streams moved on, then the layer quantized by ModelOpt."""
    model = layer_model(plan.checkpoint.config, index, source, plan.device)
    names = [FLOAT]
    if index + 1 < plan.config.num_hidden_layers or plan.head is not None:
        names.append(CALIBRATION)
    for name in names:
        before[name].advance(after[name].path, lambda x: run_layer(model, x), plan.device)

    def loop(spoiled: Any) -> None:
        for batch in before[CALIBRATION].batches(plan.device):
            run_layer(spoiled, batch)

    return quantize(model, plan.recipe, loop, work.log)


def _kept(exported: Exported, raw: dict[str, Tensor]) -> dict[str, Tensor]:
    """The layer's tensors; what ModelOpt left as it was keeps the source's type."""
    found: dict[str, Tensor] = {}
    for name, tensor in exported.tensors.items():
        if not name.startswith(LAYER.format(0)):
            continue
        local = name.removeprefix(LAYER.format(0))
        before = raw.get(local)
        if before is None or tensor.info.dtype != "F32":
            found[local] = tensor
        else:
            unchanged = np.array_equal(before.floats(), tensor.floats())
            found[local] = before if unchanged else tensor
    return found


def _finish(plan: Plan, work: WorkFolder) -> Quality:
    """Quantize the head if wanted, and compare the two models' answers."""
    streams = _streams(plan, work, plan.config.num_hidden_layers)
    source = plan.checkpoint.tensors
    norm = read_tensor(source, NORM).floats()
    if plan.head is not None and not work.has(HEAD_PART):
        _quantize_head(plan, work, norm, streams[CALIBRATION])
    head = read_tensor(source, plan.head_name)
    heads = [float_head(head, plan.device)] * 2
    if plan.head is not None:
        heads[1] = quantized_head(_decoded_head(plan, work.tensors(HEAD_PART)), plan.device)
    return measure(
        plan.calibration.held_out,
        (streams[FLOAT], streams[QUANTIZED]),
        head_model(plan.checkpoint.config, norm, None, plan.device),
        (heads[0], heads[1]),
        plan.device,
    )


def _decoded_head(plan: Plan, tensors: TensorSource) -> DecodedLinear:
    assert plan.head is not None
    shape = plan.config.vocab_size, plan.config.hidden_size
    return decode_linear(read_below(tensors, ""), "lm_head", shape, plan.head.scheme.rounds_input)


def _quantize_head(plan: Plan, work: WorkFolder, norm: np.ndarray, states: States) -> None:
    assert plan.head is not None
    start = time.perf_counter()
    weight = read_tensor(plan.checkpoint.tensors, plan.head_name).floats()
    model = head_model(plan.checkpoint.config, norm, weight, plan.device)
    limit = _HEAD_TOKENS if plan.head.scheme.is_awq else None

    def loop(spoiled: Any) -> None:
        count = 0
        for batch in states.batches(plan.device):
            for row in batch[:, None]:  # the logits of a row are many
                if limit is None or count < limit:
                    spoiled(inputs_embeds=row, use_cache=False)
                count += row.shape[1]

    exported = quantize(model, plan.head, loop, work.log)
    names = {f"lm_head.{part}" for part in PARTS}
    tensors = {name: value for name, value in exported.tensors.items() if name in names}
    work.store(
        HEAD_PART, tensors,
        {"quantization": exported.quantization, "seconds": time.perf_counter() - start},
    )  # fmt: skip

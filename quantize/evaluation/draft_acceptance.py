"""Acceptance of a float draft with hidden states of the float and the quantized base.

Measured as by `edgellm-quantize draft`: the share of first candidates in the first two draft steps
that equal the base's greedy token, over the held-out text.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping

import torch

from edgellm.core.errors import EdgeLLMError
from edgellm.quantize.calibration.hidden_states import States
from edgellm.quantize.formats.schemes import RESIDUAL
from edgellm.quantize.formats.tensors import read_tensor
from edgellm.quantize.metrics.divergence import Drafted
from edgellm.quantize.models.draft import open_float_draft
from edgellm.quantize.models.eagle_draft import Draft
from edgellm.quantize.models.lm_head import Head, float_head, greedy
from edgellm.quantize.models.one_layer_model import run_layer
from edgellm.quantize.plan import Plan
from edgellm.quantize.work_folder import FLOAT, QUANTIZED


def open_draft_of(plan: Plan) -> Draft | None:
    """Load the draft of `--draft_model_dir`, if given.

    Raises:
        EdgeLLMError: the draft does not belong to this base, or its input would be rotated.
    """
    job = plan.job
    if job.draft_model_dir is None:
        return None
    if job.rotate in RESIDUAL:
        raise EdgeLLMError(
            f"--draft_model_dir: --rotate {job.rotate} rotates the draft's input",
            hint="leave out one of them; engines measure acceptance too",
        )
    return open_float_draft(job.draft_model_dir, job.model_dir, job.ignore_config_keys)


def store_taps(plan: Plan, draft: Draft | None, layer: int, streams: Mapping[str, States]) -> None:
    """Copy the hidden states that enter `layer` if the draft reads them; others are dropped."""
    if draft is None or layer not in draft.taps:
        return
    for name in (FLOAT, QUANTIZED):
        copy = _tap(plan, name, layer, streams)
        if not copy.path.exists():
            partial = copy.path.with_suffix(".partial")
            shutil.copyfile(streams[name].path, partial)
            partial.replace(copy.path)


def _tap(plan: Plan, name: str, layer: int, streams: Mapping[str, States]) -> States:
    states = streams[name]
    path = plan.task.work.path / f"tap_{name}.{layer:05d}.kept"
    return States(path, states.shape, states.batch_rows)


def drafted(
    plan: Plan, draft: Draft, streams: Mapping[str, States], heads: tuple[Head, Head]
) -> Drafted:
    """Measure the draft's acceptance with both bases.

    Args:
        plan: of the run.
        draft: the float draft.
        streams: hidden states after the last layer.
        heads: of the float and the quantized model.
    """
    rates = []
    for name, head in zip((FLOAT, QUANTIZED), heads, strict=True):
        taps = {tap: _tap(plan, name, tap, streams) for tap in draft.taps}
        rates.append(_rate(plan, draft, taps, streams[name], head))
    return Drafted(*rates)


def _rate(plan: Plan, draft: Draft, taps: Mapping[int, States], last: States, head: Head) -> float:
    task = plan.task
    targets = draft.targets_of(last, head, task)
    norm = draft.norm_model(None, task.device)
    own = float_head(read_tensor(draft.tensors, draft.head_name), task.device, draft.finish)
    models = draft.layer_models(task.device)
    taken = at = 0
    for states in draft.first_steps(task.rows(FLOAT), taps, task):
        for model in models:
            states = run_layer(model, states)
        found = torch.from_numpy(greedy(run_layer(norm, states), own))
        taken += int((found == torch.from_numpy(targets[at : at + len(found)])).sum())
        at += len(found)
    return taken / targets.size

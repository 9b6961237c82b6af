"""`--quantization mixed`: the forms of all linear layers, found before the first is rounded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from edgellm.quantize.algorithms.gptq.rounding import WholeNumbers
from edgellm.quantize.algorithms.mixed_precision.allocation import Point, Unit, choose_point, curve
from edgellm.quantize.algorithms.mixed_precision.sensitivity import estimate
from edgellm.quantize.plan import Plan
from edgellm.quantize.work_folder import layer_part

PART = "forms"
_SHOWN = 24  # points of the table
_LEFT = 0.35  # of what rounding to the nearest costs, by error feedback in 4 or 8 bits (SmolLM2)


@dataclass(frozen=True, slots=True)
class Mixture:
    """What was chosen, and what else there was."""

    chosen: Point
    points: tuple[Point, ...]  # some of the curve, without their forms
    modules: tuple[dict[str, str], ...]  # of each layer: the form of each linear layer


def mix(plan: Plan) -> Mixture:
    """The forms for the target of the job; an interrupted run keeps those that it began with."""
    work = plan.task.work
    if not work.has(PART):
        grids = {
            "int4": WholeNumbers(-8, 7, plan.recipe.block_size, plan.recipe.has_signs),
            "int8": WholeNumbers(-127, 127, 0),
        }
        units = [_fed_back(unit) for unit in estimate(plan.subject, plan.task, grids)]
        points = curve(units)
        chosen = choose_point(points, plan.job.target_bits, plan.job.target_kl)
        modules: list[dict[str, str]] = [{} for _ in plan.subject.layers]
        for unit, form in zip(units, chosen.forms, strict=True):
            modules[unit.layer] |= dict.fromkeys(unit.names, form)
        every = math.ceil(len(points) / _SHOWN)
        shown = sorted(
            {*points[::every], points[-1], chosen}, key=lambda each: each.bits_per_weight
        )
        bare = tuple(replace(point, forms=()) for point in shown)
        work.store(PART, {}, asdict(Mixture(chosen, bare, tuple(modules))))
    facts = work.facts(PART)
    points = tuple(_point(each) for each in facts["points"])
    return Mixture(_point(facts["chosen"]), points, tuple(facts["modules"]))


def _fed_back(unit: Unit) -> Unit:
    """With what its forms cost when they are rounded as they will be."""
    forms = (replace(form, divergence=_LEFT * form.divergence) for form in unit.forms)
    return replace(unit, forms=tuple(forms))


def _point(facts: Mapping[str, Any]) -> Point:
    return Point(facts["bits_per_weight"], facts["divergence"], tuple(facts["forms"]))


def quantized_modules(plan: Plan) -> dict[str, dict[str, Any]]:
    """How hf_quant_config.json describes each linear layer, by its name in the source."""
    found: dict[str, dict[str, Any]] = {}
    for index, layer in enumerate(plan.subject.layers):
        if index not in plan.job.keep_layers:
            described = plan.task.work.facts(layer_part(index))["quantization"]["modules"]
            found |= {layer + name: form for name, form in described.items()}
    return found

"""`--quantization mixed`: chooses the forms of all linear layers before quantization."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from edgellm.quantize.algorithms.gptq.rounding import IntegerGrid
from edgellm.quantize.algorithms.mixed_precision.allocation import Point, Unit, choose_point, curve
from edgellm.quantize.algorithms.mixed_precision.sensitivity import estimate
from edgellm.quantize.plan import Plan
from edgellm.quantize.work_folder import layer_part

PART = "forms"
_SHOWN = 24  # points of the table
_GPTQ_SHARE = 0.35  # of the divergence of rounding to nearest, in 4 or 8 bits (SmolLM2)


@dataclass(frozen=True, slots=True)
class Mixture:
    """The chosen allocation, and the alternatives."""

    chosen: Point
    points: tuple[Point, ...]  # part of the curve, without forms
    modules: tuple[dict[str, str], ...]  # of each layer: the form of each linear layer


def mix(plan: Plan) -> Mixture:
    """Choose the forms for the job's target; a resumed run uses the stored ones."""
    work = plan.task.work
    if not work.has(PART):
        grids = {
            "int4": IntegerGrid(
                lowest=-8, highest=7, block=plan.recipe.block_size, has_signs=plan.recipe.has_signs
            ),
            "int8": IntegerGrid(lowest=-127, highest=127, block=0),
        }
        units = [_with_gptq(unit) for unit in estimate(plan.subject, plan.task, grids)]
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


def _with_gptq(unit: Unit) -> Unit:
    """Scale the divergences of rounding to nearest to those of GPTQ."""
    forms = (replace(form, divergence=_GPTQ_SHARE * form.divergence) for form in unit.forms)
    return replace(unit, forms=tuple(forms))


def _point(facts: Mapping[str, Any]) -> Point:
    return Point(facts["bits_per_weight"], facts["divergence"], tuple(facts["forms"]))


def quantized_modules(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return each linear layer's entry of hf_quant_config.json, by its name in the source."""
    found: dict[str, dict[str, Any]] = {}
    for index, layer in enumerate(plan.subject.layers):
        if index not in plan.job.keep_layers:
            described = plan.task.work.facts(layer_part(index))["quantization"]["modules"]
            found |= {layer + name: form for name, form in described.items()}
    return found

"""The figures of a run: sizes, errors, divergence."""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from edgellm.core.safetensors_io import TensorInfo
from edgellm.export.checkpoints.residual_rotation import KEY as ROTATION
from edgellm.quantize.algorithms.mixed_precision.search import Mixture, mix
from edgellm.quantize.evaluation.layer_errors import LayerReport
from edgellm.quantize.metrics.divergence import Quality, read_quality
from edgellm.quantize.models.checks import EMBEDDING, HEAD
from edgellm.quantize.plan import Plan
from edgellm.quantize.work_folder import HEAD_PART, layer_part

_PACKAGES = ("edgellm", "nvidia-modelopt", "torch", "transformers", "numpy")
_WORST = 5
_PACKED = {"U8": 2, "I32": 8}  # quantized values in one element
_FLOAT_BYTES = 2  # of a weight in engines, as exports have float16 unless told otherwise
_FAR, _FEW = 2, 6  # minimum error of outliers over the median; layers for each outlier


@dataclass(frozen=True, slots=True)
class Tried:
    """Figures of a candidate of a search."""

    kl_divergence: float
    accuracy: float  # see `Quality`
    num_bytes: int  # of the result


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A float layer, or a candidate for one."""

    layer: int
    divergence: float  # if it alone is quantized, nats a token
    share: float  # of the divergence of all layers
    num_bytes: int  # saved by quantizing it


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All figures of a run, measured on the exported tensors."""

    subject: str  # "language model" or "draft"
    quantization: str
    lm_head: str
    kv_cache: str
    settings: dict[str, Any]
    calibration: dict[str, Any]
    quality: Quality
    layers: tuple[LayerReport, ...]
    quantized_modules: int
    bits_per_weight: float  # of quantized layers, scales included
    bytes_before: int
    bytes_after: int
    seconds: float  # of the process that finished
    peak_memory_bytes: int
    device: str
    versions: dict[str, str]
    read_bytes: int = 0  # of weights, by a token; 0: a mixture of experts reads some only
    untied_bytes: int = 0  # of the head that a rotation untied
    mixture: Mixture | None = None  # of mixed precision
    tried: dict[str, Tried] | None = None  # candidates of a search
    kept: tuple[Kept, ...] | None = None  # of `--keep_layers auto`

    @property
    def accuracy_means(self) -> str:
        """The quantity that the accuracies of `quality` measure."""
        if self.subject == "draft":
            return "first candidates that the base accepts"
        return "top-1 accuracy of the next token"

    @property
    def worst_layers(self) -> list[LayerReport]:
        """The layers with the largest output errors."""
        quantized = [layer for layer in self.layers if layer.bits]
        return sorted(quantized, key=lambda layer: -layer.output_error)[:_WORST]

    @property
    def few(self) -> dict[str, int]:
        """Experts with few tokens of the calibration text, and their number."""
        return {
            f"model.layers.{layer.index}.{name}": tokens
            for layer in self.layers
            for name, tokens in layer.few.items()
        }

    @property
    def outliers(self) -> list[int]:
        """Layers that should stay float: their errors are far above the median."""
        errors = [layer.output_error for layer in self.layers if layer.bits]
        limit = _FAR * statistics.median(errors)
        found = [layer.index for layer in self.worst_layers if layer.output_error > limit]
        return sorted(found[: len(errors) // _FEW])


def make_report(plan: Plan, quality: Quality, seconds: float) -> Report:
    """Collect the report from the parts in the work folder."""
    work, subject, calibration = plan.task.work, plan.subject, plan.task.calibration
    layers = [layer_part(index) for index in range(len(subject.layers))]
    sources = [work.tensors(name) for name in layers]
    sources += [] if plan.head is None else [work.tensors(HEAD_PART)]
    parts = {name: info for source in sources for name, info in source.infos().items()}
    before = subject.checkpoint.tensors.infos()
    modules = {name.removesuffix("_scale") for name in parts if name.endswith(".weight_scale")}
    weights = stored = 0
    for module in modules:
        codes = parts.get(module) or parts[f"{module}_packed"]
        weights += math.prod(codes.shape) * _PACKED.get(codes.dtype, 1)
        stored += sum(
            info.num_bytes
            for name, info in parts.items()
            if name.startswith(module) or name == module.removesuffix("weight") + "pre_quant_scale"
        )
    replaced = {name.removesuffix("_packed") for name in parts}
    kept = sum(info.num_bytes for name, info in before.items() if name not in replaced)
    added = before[HEAD].num_bytes if _is_untied(subject.checkpoint.config) else 0
    own_head = sum(info.num_bytes for name, info in parts.items() if name.startswith("lm_head."))
    return Report(
        subject=subject.kind,
        quantization=plan.recipe.scheme.name,
        lm_head=plan.job.lm_head_quantization or "float",
        kv_cache=plan.job.kv_cache_quantization or "float",
        settings=plan.settings,
        calibration={
            "name": calibration.name,
            "rows": len(calibration.rows),
            "held_out_rows": len(calibration.held_out),
            "tokens_per_row": calibration.rows.shape[1],
            "sha256": calibration.sha256,
        },
        quality=quality,
        layers=tuple(_layer(work.facts(name)) for name in layers),
        quantized_modules=len(modules),
        bits_per_weight=8 * stored / weights,
        bytes_before=sum(info.num_bytes for info in before.values()) - added,
        bytes_after=kept + sum(info.num_bytes for info in parts.values()),
        seconds=seconds,
        peak_memory_bytes=_peak_memory(),
        device=str(plan.task.device),
        versions={
            **{name: version(name) for name in _PACKAGES},
            "python": platform.python_version(),
        },
        read_bytes=_read_bytes(plan, parts),
        untied_bytes=(own_head or added) if added else 0,
        mixture=mix(plan) if plan.recipe.scheme.is_mixed else None,
    )


def _read_bytes(plan: Plan, parts: Mapping[str, TensorInfo]) -> int:
    """Bytes of weights that a token reads: quantized ones as stored, floats as float16.

    A token reads one row of the embedding, or all if it is the head.
    """
    subject = plan.subject
    if subject.family.experts is not None or subject.kind != "language model":
        return 0
    before = subject.checkpoint.tensors.infos()
    replaced = {name.removesuffix("_packed") for name in parts}
    has_head = any(name.startswith("lm_head.") for name in (*before, *parts))
    read = (*subject.layers, "lm_head." if has_head else EMBEDDING)
    floats = sum(
        math.prod(info.shape)
        for name, info in before.items()
        if name not in replaced and name.startswith(read)
    )
    table = "" if not has_head else EMBEDDING.removesuffix("weight")
    quantized = sum(
        info.num_bytes for name, info in parts.items() if not (table and name.startswith(table))
    )
    return _FLOAT_BYTES * floats + quantized


def _is_untied(config: Mapping[str, Any]) -> bool:
    """Whether a rotation untied the head from the embedding."""
    return bool(config.get(ROTATION, {}).get("untied"))


def as_json(report: Report) -> dict[str, Any]:
    """The content of the side file."""
    return {"kind": "quantized_checkpoint", **asdict(report)}


def read_report(facts: Mapping[str, Any]) -> Report:
    """Parse the result of `as_json`, without mixed precision."""
    fields = [name for name in Report.__dataclass_fields__ if name != "mixture"]
    own = {name: facts[name] for name in fields if name in facts}  # an older version has fewer
    own["quality"] = read_quality(facts["quality"])
    own["layers"] = tuple(LayerReport(**layer) for layer in facts["layers"])
    return Report(**own)


def _layer(facts: dict[str, Any]) -> LayerReport:
    names = LayerReport.__dataclass_fields__
    return LayerReport(**{name: facts[name] for name in names if name in facts})


def _peak_memory() -> int:
    """Return the peak memory of this process; 0: unknown."""
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

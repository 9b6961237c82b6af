"""Choice of attention kernels and KV cache type for an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from edgellm.build.lowering.experts import ExpertLayer
from edgellm.build.plan import Plan
from edgellm.build.tensorrt.lowering import kernel_experts, kernel_recurrence
from edgellm.build.tensorrt.lowering.kernel_attention import Kernels, missing, why_not
from edgellm.build.tensorrt.lowering.op_table import takes_plugins
from edgellm.build.tensorrt.options import AUTO, EDGELLM, TENSORRT, options_of
from edgellm.build.tensorrt.target import Target
from edgellm.core.errors import EdgeLLMError
from edgellm.core.graph_roles import ROLES
from edgellm.core.manifest import Bundle
from edgellm.core.model_spec import DecoderSpec
from edgellm.device_runtime.gpu import compute_capability, driver_cuda, newest_ptx
from edgellm.device_runtime.kernels.triton.catalog import FIRST_FP8, PICK_SHARES, SEQUENCES
from edgellm.device_runtime.runners.tensorrt.kernel_cache import KV_DTYPES
from edgellm.device_runtime.runners.tensorrt.library.trt_import import Library
from edgellm.device_runtime.runners.tensorrt.state_memory import CHUNK_ROWS

_PRECISIONS = {"float16": ir.DataType.FLOAT16, "float32": ir.DataType.FLOAT}


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """Attention and KV cache of an engine."""

    dtype: str  # of the cache, as in manifests
    kernels: Kernels | None = None  # edgellm's own; None: TensorRT's operators
    why_not: str = ""  # edgellm's, unless the user chose TensorRT's
    num_experts: int = 0  # of a layer; 0: there are no mixtures of experts

    @property
    def way(self) -> str:
        """The choice as a value of `--kernels`."""
        return EDGELLM if self.kernels is not None else TENSORRT


def plan_cache(
    models: Mapping[str, ir.Model], bundle: Bundle, plan: Plan, target: Target
) -> CachePlan:
    """Plan attention and KV cache of a bundle.

    Args:
        models: portable graphs by role.
        bundle: of them.
        plan: with the flags.
        target: library and GPU.

    Raises:
        EdgeLLMError: a flag is not supported, with the reason.
    """
    if plan.kv_cache in ("float16", "bfloat16", "int4"):
        raise EdgeLLMError(
            f"--kvCache {plan.kv_cache} is for the CPU",
            hint="leave it out: TensorRT's cache has the type that attention computes in, or give "
            "--kvCache int8",
        )
    wanted, codes = options_of(plan).kernels, _codes(bundle, plan, target)
    if wanted == TENSORRT and plan.kv_cache in ("int8", "fp8"):
        raise EdgeLLMError(
            f"--kvCache {plan.kv_cache}: TensorRT updates caches of floats only",
            hint="leave out --kernels tensorrt, or --kvCache",
        )
    graphs = [model.graph for role, model in models.items() if ROLES[role].has_cache]
    num_experts = max((e.count for graph in graphs for e in ExpertLayer.all_of(graph)), default=0)
    own = _layers_of_kernels(graphs, bundle, plan, target)
    if wanted == TENSORRT:
        _require_none(own, "--kernels tensorrt")
        return CachePlan(dtype=bundle.dtype, num_experts=num_experts)
    kernels, fault = (
        Kernels(sm=target.sm, codes=codes, sequences=plan.max_batch_size),
        library_fault(target.library),
    )
    for graph in graphs:
        fault = fault or why_not(graph, _PRECISIONS[bundle.dtype], kernels, _driver_ptx(plan))
        fault = fault or kernel_recurrence.why_not(graph, kernels.sm, _driver_ptx(plan))
        fault = fault or kernel_experts.why_not(graph, kernels.sm, _driver_ptx(plan))
    if not fault:
        _require_few(plan)
        return CachePlan(dtype=KV_DTYPES[codes], kernels=kernels)
    _require_none(own, fault)
    _require_one(plan, fault)
    if wanted == EDGELLM:
        raise EdgeLLMError(
            f"--kernels edgellm: {fault}", hint="give --kernels tensorrt, or neither"
        )
    if plan.kv_cache in ("int8", "fp8"):
        raise EdgeLLMError(
            f"--kvCache {plan.kv_cache} needs edgellm's kernels: {fault}",
            hint="leave out --kvCache: TensorRT's operators take caches of floats",
        )
    return CachePlan(dtype=bundle.dtype, why_not=fault, num_experts=num_experts)


def _layers_of_kernels(
    graphs: Sequence[ir.Graph], bundle: Bundle, plan: Plan, target: Target
) -> list[str]:
    """Layers that only edgellm's kernels compute; none on TensorRT-RTX, whose operators do.

    Raises:
        EdgeLLMError: batches of recurrent models, or states that no kernels advance.
    """
    is_recurrent = isinstance(bundle.spec, DecoderSpec) and bundle.spec.recurrent is not None
    if is_recurrent:
        _require_alone(plan)
    if target.library.is_ahead_of_time:
        if is_recurrent:
            _require_commits(graphs, bundle, plan, target)
        return []
    has_experts = any(ExpertLayer.all_of(graph) for graph in graphs)
    both = (is_recurrent, "recurrent layers"), (has_experts, "mixtures of experts")
    return [name for is_there, name in both if is_there]


def _require_alone(plan: Plan) -> None:
    """Reject batches of recurrent models; raises `EdgeLLMError`."""
    if plan.max_batch_size > 1:
        raise EdgeLLMError(
            f"--maxBatchSize {plan.max_batch_size}: on TensorRT a model with recurrent layers "
            "computes one sequence at a time",
            hint="leave --maxBatchSize out, or give --backend onnxruntime --device cpu",
        )


def _require_commits(
    graphs: Sequence[ir.Graph], bundle: Bundle, plan: Plan, target: Target
) -> None:
    """Reject recurrent layers whose states edgellm's kernels cannot advance.

    Raises:
        EdgeLLMError: they cannot, with the reason.
    """
    fault = ""
    if bundle.dtype != "float16":
        fault = f"the kernels compute in float16, the bundle in {bundle.dtype}"
    elif plan.max_verify_tree_size > CHUNK_ROWS:
        fault = f"--maxVerifyTreeSize {plan.max_verify_tree_size} exceeds {CHUNK_ROWS}"
    for graph in graphs:
        fault = fault or kernel_recurrence.why_no_commits(graph, target.sm, _driver_ptx(plan))
    if fault:
        raise EdgeLLMError(
            f"on {target.library.label} edgellm's kernels advance the states of recurrent layers: "
            f"{fault}",
            hint="give --backend onnxruntime --device cpu",
        )


def _require_none(own: Sequence[str], fault: str) -> None:
    """Reject layers that need edgellm's kernels; raises `EdgeLLMError` with the `fault`."""
    if own:
        raise EdgeLLMError(
            f"on TensorRT only edgellm's kernels compute {' and '.join(own)}: {fault}",
            hint="give --backend onnxruntime --device cpu",
        )


def _require_one(plan: Plan, fault: str) -> None:
    """Reject batches with TensorRT's operators; raises `EdgeLLMError` with the `fault`."""
    if plan.max_batch_size > 1:
        raise EdgeLLMError(
            f"--maxBatchSize {plan.max_batch_size} needs edgellm's kernels: {fault}",
            hint="leave --maxBatchSize out, or give --backend onnxruntime",
        )


def _require_few(plan: Plan) -> None:
    """Reject batches larger than the kernels support; raises `EdgeLLMError`."""
    if plan.max_batch_size > SEQUENCES:
        raise EdgeLLMError(
            f"--maxBatchSize {plan.max_batch_size} exceeds the {SEQUENCES} sequences that "
            "edgellm's kernels for GPUs take",
            hint=f"give --maxBatchSize {SEQUENCES} or less",
        )


def library_fault(library: Library) -> str:
    """Why a library does not support plugins with edgellm's kernels; "" if it does."""
    if library.is_ahead_of_time:
        return f"{library.label} takes no plugins"
    if takes_plugins(library.version):
        return ""
    return f"plugins do not work in {library.label}; they do in 10.13 and 10.16"


def machine_fault(library: Library) -> str:
    """Why edgellm's kernels are unavailable here (library, GPU, driver); "" if they are."""
    sm = compute_capability()
    if (fault := library_fault(library)) or sm is None:
        return fault
    return missing([PICK_SHARES], sm, _here_ptx())


def _codes(bundle: Bundle, plan: Plan, target: Target) -> str:
    """Type of the cache; "auto" is the calibrated type, if the GPU supports it.

    Raises:
        EdgeLLMError: the GPU does not support it.
    """
    has_fp8 = target.sm >= FIRST_FP8
    if plan.kv_cache == "fp8" and not has_fp8:
        raise EdgeLLMError(
            f"--kvCache fp8 needs a GPU of compute capability {FIRST_FP8 / 10} or newer, not "
            f"{target.sm / 10}",
            hint="give --kvCache int8",
        )
    if plan.kv_cache in ("fp8", "int8"):
        return plan.kv_cache
    cache = bundle.cache
    calibrated = cache.ranges.calibrated_for if cache is not None and cache.ranges else ""
    if plan.kv_cache == AUTO and (calibrated == "int8" or (calibrated == "fp8" and has_fp8)):
        return calibrated
    return "fp16"


def _driver_ptx(plan: Plan) -> int | None:
    """The newest PTX of this machine's driver, if an engine is compiled for its GPU."""
    return None if options_of(plan).target_sm else _here_ptx()


def _here_ptx() -> int | None:
    cuda = driver_cuda()
    return None if cuda is None else newest_ptx(cuda)

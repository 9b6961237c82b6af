"""Bundle to graphs for ONNX Runtime's CUDA provider; timed if there is a GPU.

Nothing is folded or prepacked, so engines can be built on a machine without a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir

from edgellm.build.lowering.experts import ExpertLayer
from edgellm.build.lowering.linears.round_int4 import BLOCK_SIZE as INT4_BLOCK
from edgellm.build.lowering.linears.round_int4 import (
    check_quantize,
    load_portable,
    rounded_weights,
)
from edgellm.build.lowering.linears.weights import LinearWeight, linear_layers, weight_kinds
from edgellm.build.lowering.lora import Places, engine_options, write_adapted_layers
from edgellm.build.lowering.weights import WeightFile, parameter_name
from edgellm.build.onnxruntime_cuda.attention import Form
from edgellm.build.onnxruntime_cuda.batches import spare_rows
from edgellm.build.onnxruntime_cuda.experts import expert_bytes
from edgellm.build.onnxruntime_cuda.kernel_choice import ROUNDED_BITS, Choices, choose
from edgellm.build.onnxruntime_cuda.linears import CudaKernel, dense_name, takes_int_gemm
from edgellm.build.onnxruntime_cuda.lower import GraphTraits, lower_for_cuda
from edgellm.build.onnxruntime_cuda.plain_attention import rows_graph
from edgellm.build.pass_timing import measure
from edgellm.build.plan import RUNTIME_BYTES, Compiled, Estimate, Plan, max_rows
from edgellm.build.verify.check import Verdict, require_alike
from edgellm.build.verify.reference import Source, make_reference
from edgellm.build.verify.rounding_simulation import Rounds
from edgellm.core.commands.progress import Report
from edgellm.core.errors import EdgeLLMError
from edgellm.core.graph_roles import DECODER, ROLES
from edgellm.core.manifest import Bundle, GraphSpec, with_kv_dtype
from edgellm.core.model_spec import KVCacheSpec, cache_bytes
from edgellm.device_runtime.gpu import memory_bytes
from edgellm.device_runtime.runners.onnxruntime_cuda import (
    open_graphs,
    provider,
)
from edgellm.device_runtime.runners.onnxruntime_cuda.attention_inputs import (
    ADAPTED_SUFFIX,
    CAUSAL_SUFFIX,
    ROWS_GRAPH,
)
from edgellm.device_runtime.runners.runner import Runner

_INT8_BLOCK = 32
PREFILL_ROWS = 256  # without timing: attention scores of a pass are a matrix
_NOT_MEASURED = "there is no CUDA here: the engine was not run and nothing was measured"
_NOT_COMPARED = "not compared with the portable graph: there is no CUDA here"
_NO_FP8 = "FP8 weights became int8 in blocks of 32: ONNX Runtime's CUDA products do not take FP8"
_NAMES = {DECODER: "llm"}  # of files, if not the role's name


def compile_bundle(
    source: Path, bundle: Bundle, plan: Plan, folder: Path, report: Report
) -> Compiled:
    """See `edgellm.build.backends.Backend.compile`."""
    cache = _cache(bundle, plan)
    quantize, room = _quantize(bundle, plan), (plan.kv_capacity, plan.max_batch_size)
    portable = ir.load(source / next(iter(bundle.graphs.values())).path)
    kinds = weight_kinds(portable)
    check_quantize(kinds, quantize)
    choices = _choices(portable.graph, bundle, plan)
    device, notes = _device()
    if device:
        provider.require_version(choices.options)
    verdicts = [] if device else [Verdict(_NOT_COMPARED)]
    options = {**choices.options, **engine_options(plan)}
    with rounded_weights(folder, quantize) as rounded:
        compiler = _Compiler(
            source=source,
            bundle=bundle,
            plan=plan,
            folder=folder,
            rounded=rounded,
            quantize=quantize,
            choices=choices,
        )
        graphs = {role: compiler.compile(role, report) for role in bundle.graphs}
        if cache is not None and (DECODER in graphs or plan.max_batch_size > 1):
            ir.save(rows_graph(cache, plan.kv_capacity + spare_rows(plan)), folder / ROWS_GRAPH)
        if not device:
            costs, prefill_rows = {}, min(PREFILL_ROWS, plan.max_input_len)
        else:
            report("timing forward passes")
            spec, threads = with_kv_dtype(bundle.spec, bundle.dtype), plan.threads
            opened = open_graphs(folder, graphs, spec, room, threads, device, options)
            verdicts = [compiler.check(role, opened[role], device) for role in graphs]
            costs, prefill_rows = measure(opened, spec, plan)
    if plan.max_lora_rank:
        write_adapted_layers(compiler.portable(DECODER), folder)
    return Compiled(
        graphs=graphs,
        kv_dtype=cache.dtype if cache is not None else "",
        cost_ms=costs,
        prefill_rows=prefill_rows,
        notes=(
            *([_NO_FP8] if "fp8" in kinds else []),
            *choices.notes,
            *notes,
        ),
        options=options,
        checks=tuple(each.text for each in verdicts),
        check_s=sum(each.seconds for each in verdicts),
    )


def _device() -> tuple[str, list[str]]:
    """The GPU that engines run on here, or "" and a note."""
    try:
        return provider.require_cuda(), []
    except EdgeLLMError as error:
        return "", [f"{_NOT_MEASURED}: {error}"]


class _Compiler:
    """Lowers the graphs of one bundle into a folder."""

    def __init__(
        self,
        *,
        source: Path,
        bundle: Bundle,
        plan: Plan,
        folder: Path,
        rounded: WeightFile | None,
        quantize: str,
        choices: Choices,
    ) -> None:
        self._source, self._bundle, self._plan = source, bundle, plan
        self._folder, self._rounded, self._quantize = folder, rounded, quantize
        self._dtype, self._choices = _dtype(bundle), choices
        self._kernel = CudaKernel(self._dtype, quantize == "int8", choices.int_gemm)

    def portable(self, role: str) -> Path:
        """The graph of a role in the bundle."""
        return self._source / self._bundle.graphs[role].path

    def compile(self, role: str, report: Report) -> tuple[GraphSpec, ...]:
        """Write the graphs of a role and their weights."""
        name = _NAMES.get(role, role)
        report(f"lowering the {name} graph for CUDA")

        def load() -> ir.Model:
            return load_portable(self.portable(role), self._rounded)

        kinds = sorted(weight_kinds(load()) - {"dense"})
        rounded = self._quantize in ("int4", "int8")
        precision = self._quantize if rounded else "+".join(kinds) or _short(self._dtype)
        return self._lower(role, load, name, precision)

    def _lower(
        self, role: str, load: Callable[[], ir.Model], name: str, precision: str = ""
    ) -> tuple[GraphSpec, ...]:
        """A graph for each of `_kinds`, sharing one file of weights."""
        weights = WeightFile(self._folder / f"{name}.data")
        has_cache = ROLES[role].has_cache
        capacity, maximum = self._plan.kv_capacity if has_cache else 0, max_rows(role, self._plan)
        graphs = []
        for form, places in self._kinds(role):
            model = load()
            traits = GraphTraits(
                capacity=capacity,
                form=form,
                expert_bits=ROUNDED_BITS.get(self._quantize, 0),
                spare_rows=spare_rows(self._plan) if has_cache else 0,
                places=places,
            )
            lower_for_cuda(model, self._kernel, weights, self._dtype, traits)
            causal, adapted = form == Form.CAUSAL, places is not None
            path = f"{name}{CAUSAL_SUFFIX * causal}{ADAPTED_SUFFIX * adapted}.onnx"
            ir.save(model, self._folder / path)
            graphs.append(GraphSpec(path, maximum, precision))
        weights.close()
        return tuple(graphs)

    def _kinds(self, role: str) -> list[tuple[Form, Places | None]]:
        """Form of attention, and places of adapters.

        Passes without adapters run on a graph without them, unless a second graph would duplicate
        experts.
        """
        forms = self._choices.forms if ROLES[role].has_cache else (Form.PLAIN,)
        places = Places.of(self._plan) if role == DECODER else None
        both = (None, places) if places and not self._choices.is_one_graph else (places,)
        return [(form, each) for each in both for form in forms]

    def check(self, role: str, runner: Runner, device: str) -> Verdict:
        """See `require_alike`."""
        bundle, plan = self._bundle, self._plan
        cache = bundle.cache_of(role)
        source = Source(
            role=role,
            bundle=bundle,
            path=self.portable(role),
            rounded=self._rounded,
            cache=cache,
            capacity=plan.kv_capacity,
        )
        engine = Rounds((self._kernel,), halves=self._dtype == ir.DataType.FLOAT16)

        def open_lowered(load: Callable[[], ir.Model]) -> Runner:
            searched = {role: self._lower(role, load, "searched")}
            spec = with_kv_dtype(bundle.spec, bundle.dtype if cache is not None else "")
            room = plan.kv_capacity, plan.max_batch_size
            own = engine_options(plan)
            return open_graphs(self._folder, searched, spec, room, plan.threads, device, own)[role]

        reference = make_reference(source, plan.kv_capacity, engine, wanted=plan.checks)
        return require_alike(reference, runner, open_lowered)


def _quantize(bundle: Bundle, plan: Plan) -> str:
    """Resolve "auto": there is no int8 GEMM for CUDA that would speed up a draft."""
    return "none" if plan.quantize == "auto" and DECODER not in bundle.graphs else plan.quantize


def _dtype(bundle: Bundle) -> ir.DataType:
    return ir.DataType[{"float16": "FLOAT16", "float32": "FLOAT"}[bundle.dtype]]


def _short(dtype: ir.DataType) -> str:
    return "fp16" if dtype == ir.DataType.FLOAT16 else "fp32"


def _cache(bundle: Bundle, plan: Plan) -> KVCacheSpec | None:
    """The cache in the activations' type; raises `EdgeLLMError` for other types."""
    if plan.kv_cache not in ("auto", "float"):
        raise EdgeLLMError(
            f"--kvCache {plan.kv_cache} is not for ONNX Runtime on CUDA: its cache has the "
            "activations' type",
            hint="leave out --kvCache",
        )
    if plan.prefill == "int8":
        raise EdgeLLMError(
            "--prefill int8 is for the CPU: ONNX Runtime has no int8 products for CUDA",
            hint="leave out --prefill",
        )
    cache = bundle.cache
    return dataclasses.replace(cache, dtype=bundle.dtype) if cache is not None else None


def _choices(graph: ir.Graph, bundle: Bundle, plan: Plan) -> Choices:
    """Kernels for a bundle's main graph."""
    return choose(
        graph,
        _dtype(bundle),
        plan,
        _quantize(bundle, plan),
        has_cache=bundle.cache is not None,
        is_causal=bundle.main_role != DECODER or bundle.decoder.min_chunk == 1,
    )


def estimate(source: Path, bundle: Bundle, plan: Plan) -> Estimate:
    """See `edgellm.build.backends.Backend.estimate`."""
    cache, dtype = _cache(bundle, plan), _dtype(bundle)
    capacity = plan.kv_capacity + spare_rows(plan)
    main = ir.load(source / next(iter(bundle.graphs.values())).path).graph
    choices = _choices(main, bundle, plan)
    rope = int(dtype.itemsize * capacity * cache.head_dim) if cache is not None else 0
    linears: dict[str, int] = {}
    tables: dict[str, int] = {}
    largest = experts = taken = apart = 0
    for role, graph in bundle.graphs.items():
        portable = ir.load(source / graph.path).graph
        for layer in ExpertLayer.all_of(portable):
            size = expert_bytes(layer, dtype, ROUNDED_BITS.get(plan.quantize, 0))
            experts, taken = experts + size, taken + size * layer.top_k // layer.count
        for node, weight in linear_layers(portable):
            key, size = _stored(weight, f"{role}.{node.name}", dtype, plan.quantize)
            if choices.int_gemm and takes_int_gemm(weight):
                apart += size
            linears[key] = size
            largest = max(largest, weight.count)
        for node in portable:
            table = node.inputs[0] if node.op_type == "Gather" else None
            tensor = table.const_value if table is not None else None
            if table is not None and tensor is not None and tensor.dtype.is_floating_point():
                key = f"{parameter_name(table)}.{dtype.name.lower()}"
                tables[key] = int(tensor.size * dtype.itemsize)
    engine = sum({**tables, **linears}.values()) + experts
    places, num_graphs = Places.of(plan), len(choices.forms)
    if places is not None and not choices.is_one_graph:
        num_graphs *= 2
    return Estimate(
        engine_bytes=engine + rope,
        kv_bytes=cache_bytes(cache, capacity, plan.max_batch_size) if cache is not None else 0,
        peak_build_bytes=RUNTIME_BYTES + 12 * largest,
        decode_bytes=sum(linears.values()) + taken,
        scratch_bytes=apart * (num_graphs - 1),  # each further session's own
        runs_on_cpu=False,
        device_bytes=memory_bytes(),
        adapter_bytes=places.num_bytes(main, dtype) if places is not None else 0,
    )


def _stored(weight: LinearWeight, name: str, dtype: ir.DataType, quantize: str) -> tuple[str, int]:
    """Name and bytes of a linear weight in the engine."""
    itemsize = int(dtype.itemsize)
    if weight.kind != "dense":
        bits, block = weight.packing
    elif quantize == "int4":
        bits, block = 4, INT4_BLOCK
    elif quantize == "int8":
        bits, block = 8, _INT8_BLOCK
    else:
        return dense_name(weight, dtype), itemsize * weight.count
    return name, weight.count * bits // 8 + itemsize * weight.count // block

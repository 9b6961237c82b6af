"""A lowered graph to an engine file: parse, profile, compile, write.

Weights stay in the graph's weight file, which is memory-mapped, and the engine is streamed to its
file, so memory holds one copy of the weights, the compiler's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from edgellm.build.tensorrt.build_monitor import EngineFile, progress_monitor
from edgellm.build.tensorrt.engine_layers import inspect_engine
from edgellm.build.tensorrt.kernel_log import Kernel, read_kernels
from edgellm.build.tensorrt.known_faults import compiler_switches, has_fp4, known_refusal, switches
from edgellm.build.tensorrt.memory_estimate import FullCompiler
from edgellm.build.tensorrt.memory_trim import MappedFile, memory_returned
from edgellm.build.tensorrt.options import TensorRtOptions
from edgellm.build.tensorrt.plugins import register
from edgellm.build.tensorrt.profiles import Pass
from edgellm.build.tensorrt.target import Target
from edgellm.core.artifact import defer_interrupt
from edgellm.core.commands.progress import Report
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.runners.tensorrt.library import python_plugins
from edgellm.device_runtime.runners.tensorrt.library.attention_nodes import ATTEND
from edgellm.device_runtime.runners.tensorrt.library.kernel_nodes import NODES
from edgellm.device_runtime.runners.tensorrt.library.log import LibraryLog
from edgellm.device_runtime.runners.tensorrt.library.trt_import import Library, plugin_module


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """Facts of a compiled engine."""

    kernels: tuple[Kernel, ...]  # empty if the library does not print them and was not asked
    caches: dict[str, str]  # outputs that are inputs updated in place, by the output's name
    attentions: int  # of the library's operators
    own_attentions: int  # of edgellm's kernels
    told_by: str  # of kernels


def build(
    graph: Path,
    passes: Sequence[Pass],
    engine: Path,
    target: Target,
    options: TensorRtOptions,
    report: Report,
    *,
    threads: int = 0,
) -> Built:
    """Compile `graph`, a lowered ONNX file, into the file `engine`.

    Args:
        graph: with its weights in the same folder.
        passes: each becomes a profile, in this order.
        engine: the output file.
        target: library and GPU.
        options: of the compiler.
        report: called with the compiler's phases.
        threads: 0 leaves their number to the library.

    Raises:
        EdgeLLMError: the parser or the compiler failed, with its message; or an input would be
            ignored.
        OSError: the engine cannot be written.
    """
    trt = target.library.trt
    log = LibraryLog(trt)
    model = ir.load(graph)
    weights = _map_weights(model)
    operators = [node.op_type for node in model.graph if node.op_type in NODES]
    if operators:
        register_plugins(target.library)
    with compiler_switches(_switches(target, model, report)), defer_interrupt() as pending:
        builder = trt.Builder(log.logger)
        builder.max_threads = threads or builder.max_threads
        strongly_typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        network = builder.create_network(strongly_typed)
        parser = trt.OnnxParser(network, log.logger)  # constants in the graph live with it
        _parse(parser, graph, model, weights, target, log)
        attentions = _allow_unfused(trt, network)
        config = _configure(trt, builder, target, options)
        _add_profiles(builder, config, list(model.graph.inputs), passes)
        config.progress_monitor = monitor = progress_monitor(trt, report, pending)
        file = EngineFile(trt, engine)
        with memory_returned(weights):
            done = file.receive(builder, network, config)
        file.close()
        if not done and not pending:
            raise _not_compiled(target, options, model, log)
        del monitor
        caches = _caches_in_place(trt, network)
        _save_timing_cache(config, options)
    log.refuse_ignored_inputs()  # they are named when the network is compiled
    kernels, told_by = _kernels(log, target, options, engine, report)
    own = operators.count(ATTEND)
    return Built(
        kernels=kernels, caches=caches, attentions=attentions, own_attentions=own, told_by=told_by
    )


def _switches(target: Target, model: ir.Model, report: Report) -> str:
    """Compiler switches for full TensorRT; TensorRT-RTX never needed them."""
    library = target.library
    if library.is_ahead_of_time:
        return ""
    words = switches(library.version, has_fp4=has_fp4(model))
    if words:
        report(f"leaving out fusions that {library.label} is known to get wrong")
    return words


def _not_compiled(
    target: Target, options: TensorRtOptions, model: ir.Model, log: LibraryLog
) -> EdgeLLMError:
    failure = log.failure(f"{target.library.label} does not compile the graph")
    full = FullCompiler.of(target.library, options)
    known = known_refusal(target, model, str(failure), full.remedy if full else "")
    return EdgeLLMError(str(failure), hint=known) if known else failure


def _kernels(
    log: LibraryLog, target: Target, options: TensorRtOptions, engine: Path, report: Report
) -> tuple[tuple[Kernel, ...], str]:
    """Kernels of the engine, and their source; TensorRT must load the engine again."""
    if target.library.is_ahead_of_time or not options.layer_report:
        return tuple(read_kernels(log.layers)), "the compiler's log"
    report("asking the engine for its layers")
    return inspect_engine(target.library.trt, engine), "the engine's inspector"


def register_plugins(library: Library) -> None:
    """Register edgellm's kernels with TensorRT."""
    trt = library.trt
    if library.runs_python_plugins:
        python_plugins.register(trt)
    else:
        register(trt, plugin_module(trt))


def _external(model: ir.Model) -> dict[str, ir.ExternalTensor]:
    """External weights, by name."""
    tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
    return {name: each for name, each in tensors.items() if isinstance(each, ir.ExternalTensor)}


def _map_weights(model: ir.Model) -> MappedFile | None:
    paths = {Path(tensor.path) for tensor in _external(model).values()}
    return MappedFile(*paths) if paths else None  # lowering writes one file


def _parse(
    parser: Any,
    graph: Path,
    model: ir.Model,
    weights: MappedFile | None,
    target: Target,
    log: LibraryLog,
) -> None:
    """Parse the graph; weights are passed by address, which the network keeps, or by file."""
    if not hasattr(parser, "load_initializer"):  # of 10.13
        if not parser.parse_from_file(str(graph)):
            raise _refusal(parser, target, log)
        return
    taken = parser.load_model_proto(graph.read_bytes(), str(graph))
    for name, tensor in _external(model).items():
        assert weights is not None
        address = weights.address + (tensor.offset or 0)
        taken = taken and parser.load_initializer(name, address, tensor.nbytes)
    if not (taken and parser.parse_model_proto()):
        raise _refusal(parser, target, log)


def _refusal(parser: Any, target: Target, log: LibraryLog) -> EdgeLLMError:
    """An error with the parser's message."""
    refusal = f"{target.library.label} does not take the graph"
    if not parser.num_errors:
        return log.failure(refusal)
    first = parser.get_error(0)
    node = f" ({first.node_operator()} {first.node_name()})" if first.node_name() else ""
    return EdgeLLMError(
        f"{refusal}: {' '.join(first.desc().split())}{node}",
        hint="report it with the bundle's manifest; --backend onnxruntime builds for the CPU",
    )


def _layers(network: Any) -> Iterator[Any]:
    return (network.get_layer(index) for index in range(network.num_layers))


def _allow_unfused(trt: Any, network: Any) -> int:
    """Allow attentions without a fused kernel, as in float32, to be split; returns their number."""
    kind = getattr(trt.LayerType, "ATTENTION_INPUT", None)  # of 10.14
    inputs = [layer for layer in _layers(network) if kind is not None and layer.type == kind]
    for layer in inputs:
        layer.__class__ = trt.IAttentionInputLayer  # the network's own objects know less
        layer.attention.decomposable = True
    return len(inputs)


def _caches_in_place(trt: Any, network: Any) -> dict[str, str]:
    """Outputs that TensorRT writes into the buffer of an input, with these inputs."""
    kind = getattr(trt.LayerType, "KV_CACHE_UPDATE", None)  # of 10.15
    return {
        layer.get_output(0).name: layer.get_input(0).name
        for layer in _layers(network)
        if kind is not None
        and layer.type == kind
        and layer.get_input(0).is_network_input
        and layer.get_output(0).is_network_output
    }


def _configure(trt: Any, builder: Any, target: Target, options: TensorRtOptions) -> Any:
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.clear_flag(trt.BuilderFlag.TF32)  # float32 bundles ask for float32
    if options.strip_weights:
        config.set_flag(trt.BuilderFlag.STRIP_PLAN)
        config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)  # kernels may depend on the weights
    if options.workspace_mib:
        limit = options.workspace_mib << 20
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, limit)
    if options.opt_level is not None:
        config.builder_optimization_level = options.opt_level
    if target.library.is_ahead_of_time:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{target.sm}"), 0)
    if options.timing_cache is not None:
        path = options.timing_cache
        known = path.read_bytes() if path.exists() else b""
        config.set_timing_cache(config.create_timing_cache(known), ignore_mismatch=False)
    return config


def _save_timing_cache(config: Any, options: TensorRtOptions) -> None:
    if options.timing_cache is not None:
        options.timing_cache.write_bytes(config.get_timing_cache().serialize())


def _add_profiles(
    builder: Any, config: Any, inputs: list[ir.Value], passes: Sequence[Pass]
) -> None:
    for each in passes:
        if each.ranges:  # a graph whose sizes are all known has a profile of its own
            config.add_optimization_profile(_profile(builder, inputs, each))


def _profile(builder: Any, inputs: list[ir.Value], each: Pass) -> Any:
    """The pass's ranges of all inputs with symbolic shapes."""
    profile = builder.create_optimization_profile()
    for value in inputs:
        dims = list(value.shape or ())
        if all(isinstance(dim, int) for dim in dims):
            continue
        ranges = [(d, d) if isinstance(d, int) else each.ranges[str(d.value)] for d in dims]
        least, maximum = ([size[end] for size in ranges] for end in (0, 1))
        profile.set_shape(value.name, least, maximum, maximum)
    return profile

"""Bundle to ONNX Runtime engine: lower, optimize, prepack, measure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from edgellm.build.lowering.linear_groups import LinearKernel
from edgellm.build.lowering.linear_weights import LinearWeight, weight_kinds
from edgellm.build.lowering.round_int4 import BLOCK_SIZE as INT4_BLOCK
from edgellm.build.lowering.round_int4 import round_to_int4
from edgellm.build.lowering.weights import WeightFile
from edgellm.build.onnxruntime_cpu.linears import (
    COARSE_INPUTS,
    RowInt8Kernel,
    StoredKernel,
)
from edgellm.build.onnxruntime_cpu.lower import lower_decoder
from edgellm.build.plan import Compiled, Estimate, Plan, Report
from edgellm.contract import (
    BundleManifest,
    DecoderSpec,
    EdgeLLMError,
    KVCacheSpec,
    PassGraph,
    UnsupportedModelError,
)
from edgellm.device_runtime.pass_costs import CONTEXT_ROWS, MEASURED_ROWS, fastest_ms, pass_costs
from edgellm.device_runtime.runners.onnxruntime_cpu.processor import has_fast_int8
from edgellm.device_runtime.runners.onnxruntime_cpu.session import LoadedGraph, OnnxRuntimeSession
from edgellm.device_runtime.runners.onnxruntime_graphs import load_graph, set_threads
from edgellm.device_runtime.session import Session

_PREFILL_ROWS = (64, 128, 256)
RUNTIME_BYTES = 150 << 20  # interpreter, libraries, activations of a pass


@dataclasses.dataclass(frozen=True, slots=True)
class _Variant:
    """One graph of the engine."""

    name: str
    precision: str
    kernel: LinearKernel
    prepacks: bool  # ONNX Runtime 1.31 saves MatMulNBits' packed weights without their scales
    max_rows: int
    needs_mask: bool = True


def compile_engine(
    bundle: Path, manifest: BundleManifest, plan: Plan, folder: Path, report: Report
) -> Compiled:
    """See `edgellm.build.backends.Backend.compile`."""
    spec = engine_spec(manifest.decoder, plan)
    check_heads(spec)
    variants = _variants(ir.load(bundle / "model.onnx"), spec, plan)
    loaded: list[LoadedGraph] = []
    rounded = open_rounded(folder, plan.quantize)
    for variant in variants:
        report(f"lowering the {variant.name} graph")
        lowered = _lower(bundle, folder, variant, plan.kv_capacity, spec.kv, rounded)
        report(f"optimizing and prepacking the {variant.name} graph")
        saved = optimize(
            lowered, folder / f"{variant.name}.onnx", plan.threads, prepacks=variant.prepacks,
            probe=partial(
                _probe, spec=spec, capacity=plan.kv_capacity, max_rows=variant.max_rows,
                num_taps=len(manifest.hidden_taps),
            ),
        )  # fmt: skip
        loaded.append(LoadedGraph(saved, variant.max_rows))
    close_rounded(rounded)
    report("measuring the cost of a pass")
    runner = OnnxRuntimeSession(loaded, spec, plan.kv_capacity, len(manifest.hidden_taps))
    graphs = tuple(
        PassGraph(f"{variant.name}.onnx", variant.max_rows, variant.precision)
        for variant in variants
    )
    return Compiled(
        graphs, spec.kv.dtype, pass_costs(runner, spec), best_prefill_rows(runner, spec, plan)
    )


def estimate(bundle: Path, manifest: BundleManifest, plan: Plan) -> Estimate:
    """See `edgellm.build.backends.Backend.estimate`."""
    model, spec = ir.load(bundle / "model.onnx"), engine_spec(manifest.decoder, plan)
    linears, table = linear_sizes(model, plan.quantize), table_bytes(model)
    decode, int8 = sum(linears["decode"].values()), sum(linears["int8"].values())
    # A prepacked file holds the weights twice: as they were, and as the kernels read them.
    sizes = [
        table + (2 if variant.prepacks else 1) * (int8 if variant.precision == "int8" else decode)
        for variant in _variants(model, spec, plan)
    ]
    largest_layer = max(linears["dense"].values())
    loaded_before = 2 * sizes[0] if len(sizes) > 1 else 0
    return Estimate(
        engine_bytes=sum(sizes),
        kv_bytes=spec.kv.bytes_per_token * plan.kv_capacity,
        peak_build_bytes=RUNTIME_BYTES + loaded_before + max(sizes[-1], 3 * largest_layer),
        decode_bytes=decode,
    )


def open_rounded(folder: Path, quantize: str) -> WeightFile | None:
    """Where weights that this build rounds to INT4 are kept until it is over."""
    return WeightFile(folder / "rounded.data") if quantize == "int4" else None


def close_rounded(rounded: WeightFile | None) -> None:
    """Throw away what `open_rounded` made."""
    if rounded is not None:
        rounded.close()
        rounded.path.unlink()


def table_bytes(model: ir.Model) -> int:
    """The embedding, which is stored as it is, in every graph."""
    tables = [node.inputs[0] for node in model.graph if node.op_type == "Gather"]
    stored = [value.const_value for value in tables if value is not None]
    return max((tensor.nbytes for tensor in stored if tensor is not None), default=0)


def linear_sizes(model: ir.Model, quantize: str) -> dict[str, dict[str, int]]:
    """Bytes of each linear weight by node name: as decoded, as int8, and as a float32 copy."""
    sizes: dict[str, dict[str, int]] = {"decode": {}, "int8": {}, "dense": {}}
    for node in model.graph:
        weight = LinearWeight.of(node.inputs[1]) if node.op_type == "MatMul" else None
        if weight is not None:
            name = str(node.name)
            sizes["decode"][name] = (
                weight.count // 2 + 4 * weight.count // INT4_BLOCK
                if quantize == "int4"
                else weight.decode_bytes
            )
            sizes["int8"][name] = weight.count
            sizes["dense"][name] = 4 * weight.count
    return sizes


def _variants(model: ir.Model, spec: DecoderSpec, plan: Plan) -> list[_Variant]:
    """The graphs that a bundle's precision asks for on this processor."""
    largest = max(plan.max_input_len, plan.max_verify_tree_size, max(MEASURED_ROWS))
    kinds = weight_kinds(model)
    check_quantize(kinds, plan.quantize)
    if plan.quantize == "int4":
        kinds = {"int4"}
    if kinds == {"dense"}:
        if plan.prefill == "int8":
            raise EdgeLLMError(
                "--prefill int8 is for quantized bundles; this one holds floats",
                hint="leave --prefill away; --quantize int8 rounds all of it",
            )
        kernel = RowInt8Kernel() if plan.quantize == "int8" else StoredKernel()
        precision = "int8" if plan.quantize == "int8" else "fp32"
        return [_Variant("decode", precision, kernel, prepacks=True, max_rows=largest)]
    if _rounds_inputs_to_int8(model):
        kernel = RowInt8Kernel(COARSE_INPUTS)
        return [_Variant("decode", "int8", kernel, prepacks=True, max_rows=largest)]
    precision = "+".join(sorted(kinds - {"dense"}))
    decode = _Variant("decode", precision, StoredKernel(), prepacks=False, max_rows=largest)
    if plan.prefill == "same" or (plan.prefill == "auto" and not has_fast_int8()):
        return [decode]
    needs_mask = spec.sliding_window is not None
    return [
        dataclasses.replace(decode, max_rows=1, needs_mask=needs_mask),
        _Variant("prefill", "int8", RowInt8Kernel(COARSE_INPUTS), prepacks=True, max_rows=largest),
    ]


def check_quantize(kinds: set[str], quantize: str) -> None:
    """Refuse to round what is rounded already; raises `EdgeLLMError`."""
    if quantize in ("int4", "int8") and kinds != {"dense"}:
        stored = ", ".join(sorted(kinds - {"dense"}))
        raise EdgeLLMError(
            f"--quantize {quantize} is for bundles with float weights; this one is {stored}",
            hint="leave --quantize away",
        )


def _rounds_inputs_to_int8(model: ir.Model) -> bool:
    """Whether the checkpoint was made for products of int8 with int8 (SmoothQuant)."""
    types = [
        node.inputs[2].dtype if len(node.inputs) > 2 and node.inputs[2] is not None else None
        for node in model.graph
        if node.op_type == "QuantizeLinear"
    ]
    return ir.DataType.INT8 in types


def check_heads(spec: DecoderSpec) -> None:
    """Refuse what the attention kernel cannot do; raises `UnsupportedModelError`."""
    if spec.kv.head_dim % 16:
        raise UnsupportedModelError(
            f"head_dim {spec.kv.head_dim}: GroupQueryAttention wants a multiple of 16"
        )


def float32_spec(spec: DecoderSpec) -> DecoderSpec:
    """The spec of the engine: the CPU computes in float32."""
    return dataclasses.replace(spec, kv=dataclasses.replace(spec.kv, dtype="float32"))


def engine_spec(spec: DecoderSpec, plan: Plan) -> DecoderSpec:
    """As `float32_spec`, with the cache that the plan asks for.

    Raises:
        EdgeLLMError: an int8 cache, and nobody measured the ranges of keys and values.
    """
    ranges, wanted = spec.kv.ranges, plan.kv_cache
    if wanted == "int8" and ranges is None:
        raise EdgeLLMError(
            "--kvCache int8: the bundle does not say which range keys and values have",
            hint="quantize the checkpoint with --kv_cache_quantization int8, and export it again",
        )
    suits = ranges is not None and ranges.calibrated_for == "int8"
    if wanted == "int8" or (wanted == "auto" and suits):
        return dataclasses.replace(spec, kv=dataclasses.replace(spec.kv, dtype="int8"))
    return float32_spec(spec)


def _lower(
    bundle: Path,
    folder: Path,
    variant: _Variant,
    capacity: int,
    cache: KVCacheSpec,
    rounded: WeightFile | None,
) -> Path:
    """Write the lowered graph and its weights; the graph's path."""
    model = ir.load(bundle / "model.onnx")
    weights = WeightFile(folder / f"{variant.name}.lowered.data")
    if rounded is not None:
        round_to_int4(model, rounded)
    lower_decoder(
        model, capacity, variant.kernel, weights, needs_mask=variant.needs_mask,
        int8_cache=cache.ranges if cache.dtype == "int8" else None,
    )  # fmt: skip
    weights.close()
    path = folder / f"{variant.name}.lowered.onnx"
    ir.save(model, path)
    return path


def optimize(
    lowered: Path,
    output: Path,
    threads: int,
    *,
    prepacks: bool,
    probe: Callable[[ort.InferenceSession], np.ndarray],
) -> ort.InferenceSession:
    """Let ONNX Runtime fold, fuse and prepack once, keep what it made, and load that.

    Prepacked weights are mapped from the file when the engine is loaded, not copied.

    Args:
        lowered: a graph with its weights in `.data`; both are used up.
        output: the saved graph.
        threads: 0 takes all cores.
        prepacks: keep the weights as the kernels read them, too.
        probe: numbers that show what a graph computes.

    Raises:
        EdgeLLMError: the saved graph does not compute what the lowered one does.
    """
    options = ort.SessionOptions()
    set_threads(options, threads)
    options.log_severity_level = 3
    options.optimized_model_filepath = str(output)
    for key, value in (
        ("optimized_model_external_initializers_file_name", f"{output.stem}.data"),
        ("optimized_model_external_initializers_min_size_in_bytes", "1024"),
        ("save_external_prepacked_constant_initializers", "1" if prepacks else "0"),
    ):
        options.add_session_config_entry(f"session.{key}", value)
    saving = ort.InferenceSession(str(lowered), options, providers=["CPUExecutionProvider"])
    expected = probe(saving)
    del saving
    lowered.unlink()
    lowered.with_suffix(".data").unlink()
    saved = load_graph(output, threads=threads, optimize=False)
    if not np.allclose(probe(saved), expected, rtol=1e-3, atol=1e-3):
        raise EdgeLLMError(
            f"ONNX Runtime {ort.__version__} saved a {output.stem} graph that computes "
            "something else than the one it was made from",
            hint="install another onnxruntime and report this",
        )
    return saved


def _probe(
    session: ort.InferenceSession, spec: DecoderSpec, capacity: int, max_rows: int, num_taps: int
) -> np.ndarray:
    """Logits of a few rows and one more; NaN when anything is NaN."""
    runner = OnnxRuntimeSession([LoadedGraph(session, max_rows)], spec, capacity, num_taps)
    rows = min(5, capacity - 1, max_rows)
    first = runner.run(np.arange(rows) % spec.vocab_size, 0, np.arange(rows)).logits.copy()
    second = runner.run(np.array([1]), rows, np.array([0])).logits
    return np.concatenate([first, second])


def best_prefill_rows(runner: Session, spec: DecoderSpec, plan: Plan) -> int:
    """Rows per pass at which a long prompt is fastest.

    Large passes make better use of the GEMM kernels; small ones save attention, which computes
    the whole square of a pass, also what the causal mask then hides.
    """
    prompt = np.arange(min(CONTEXT_ROWS, plan.max_input_len)) % spec.vocab_size
    smaller = [rows for rows in _PREFILL_ROWS if rows < len(prompt)]

    def prefill(rows: int) -> None:
        for begin in range(0, len(prompt), rows):
            runner.run(prompt[begin : begin + rows], begin, np.array([0]))

    costs = {rows: fastest_ms(partial(prefill, rows), 3) for rows in (*smaller, len(prompt))}
    best = min(costs, key=costs.__getitem__)
    return plan.max_input_len if best == len(prompt) else best

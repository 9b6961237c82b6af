"""edgellm's kernels against ONNX Runtime's: products of packed weights, and attention.

Both alternate in one process, and medians are compared. Weights are copied until they exceed the
caches, as in a model.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from edgellm.device_runtime.kernels.library import DOMAIN, instruction_sets, register
from edgellm.device_runtime.kernels.pack import PackedForm, pack_codes

F32, I64, I32 = TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32
CONTRIB = "com.microsoft"
COLD_BYTES = 120e6
KV_BLOCK = 64  # positions, as in an engine
PRODUCTS = (  # name, K, N
    ("SmolLM2 gate and up", 576, 3072),
    ("Qwen2.5-0.5B gate and up", 896, 9728),
    ("8B projection", 4096, 4096),
    ("Qwen2.5-0.5B head", 896, 151936),
)
HEADS = (  # name, heads, kv heads, head dim
    ("SmolLM2", 9, 3, 64),
    ("Qwen2.5-0.5B", 14, 2, 64),
    ("8B", 32, 8, 128),
)


def open_session(
    nodes: list, inputs: dict, outputs: dict, weights: dict, threads: int
) -> ort.InferenceSession:
    values = [
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in group.items()]
        for group in (inputs, outputs)
    ]
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "kernels", *values, initializers)
    opsets = [helper.make_opsetid(name, v) for name, v in (("", 21), (DOMAIN, 1), (CONTRIB, 1))]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    register(options)
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def linear_sessions(
    rng: np.random.Generator, bits: int, block: int, shape: tuple[int, int], threads: int
) -> tuple[list[ort.InferenceSession], int, int]:
    """Return edgellm's and ONNX Runtime's sessions, the number of weights, and edgellm's bytes."""
    in_features, out_features = shape
    form = PackedForm(f"int{bits}", in_features, out_features, block)
    codes = rng.integers(0, 1 << bits, (out_features, in_features), np.uint8)
    scales = rng.uniform(0.001, 0.01, (out_features, form.blocks)).astype(np.float32)
    padded = np.full((out_features, form.blocks * block), 1 << (bits - 1), np.uint8)
    padded[:, :in_features] = codes
    theirs = padded if bits == 8 else padded[:, ::2] | padded[:, 1::2] << 4
    theirs = theirs.reshape(out_features, form.blocks, -1)
    ours = np.frombuffer(b"".join(pack_codes(form, codes, scales)), np.uint8)
    copies = max(1, int(COLD_BYTES / ours.nbytes))
    outputs = {f"y{i}": (F32, None) for i in range(copies)}
    inputs = {"x": (F32, [1, "S", in_features])}
    weights = {f"w{i}": _distinct(ours, i) for i in range(copies)}
    nodes = [
        helper.make_node("QuantLinear", ["x", f"w{i}"], [f"y{i}"], domain=DOMAIN)
        for i in range(copies)
    ]
    sessions = [open_session(nodes, inputs, outputs, weights, threads)]
    weights = {f"w{i}": _distinct(theirs, i) for i in range(copies)} | {"s": scales.ravel()}
    attributes = {"K": in_features, "N": out_features, "bits": bits, "block_size": block}
    nodes = [
        helper.make_node(
            "MatMulNBits",
            ["x", f"w{i}", "s"],
            [f"y{i}"],
            domain=CONTRIB,
            accuracy_level=4,
            **attributes,
        )
        for i in range(copies)
    ]
    sessions.append(open_session(nodes, inputs, outputs, weights, threads))
    return sessions, copies, ours.nbytes


def _distinct(array: np.ndarray, index: int) -> np.ndarray:
    """Return a copy with another last byte: ONNX Runtime stores equal weights once."""
    copied = array.copy()
    copied.reshape(-1)[-1] = index
    return copied


def medians(runs: Sequence[Callable[[], object]], args: argparse.Namespace) -> list[float]:
    """Return median seconds of each; runs alternate."""
    clock = time.process_time if args.cpu else time.perf_counter
    for run in runs:
        run()
    times: list[list[float]] = [[] for _ in runs]
    end = time.perf_counter() + args.seconds
    while time.perf_counter() < end or len(times[0]) < 3:
        for run, found in zip(runs, times, strict=True):
            start = clock()
            run()
            found.append(clock() - start)
    return [statistics.median(found) for found in times]


def show_products(args: argparse.Namespace, rng: np.random.Generator) -> None:
    print("| product | block |" + "".join(f" M={m} |" for m in args.rows) + " GB/s at M=1 |")
    for bits, block in args.forms:
        for name, *shape in PRODUCTS:
            sessions, copies, size = linear_sessions(
                rng, bits, block, (shape[0], shape[1]), args.threads
            )
            cells, rate = [], 0.0
            for rows in args.rows:
                x = rng.standard_normal((1, rows, shape[0]), np.float32)
                runs = [lambda s=s, x=x: s.run(None, {"x": x}) for s in sessions]
                own, other = (t / copies for t in medians(runs, args))
                rate = rate or size / own / 1e9
                cells.append(f" {other * 1e3:.3f} -> {own * 1e3:.3f} ({other / own:.1f}x) |")
            print(f"| {name} int{bits} | {block} |" + "".join(cells) + f" {rate:.0f} |", flush=True)


def attention_pass(
    ours: bool, shape: tuple[int, int, int], rows: int, context: int, threads: int, layers: int
) -> Callable[[], None]:
    """Return a run of `layers` attentions over KV caches in place."""
    heads, kv_heads, dim = shape
    width, capacity = (heads + 2 * kv_heads) * dim, context + rows
    inputs = {"qkv": (F32, [1, rows, width]), "cos": (F32, None), "sin": (F32, None)}
    given = {"qkv": np.random.default_rng(0).standard_normal((1, rows, width), np.float32)}
    given |= {name: np.ones((capacity, dim // 2), np.float32) for name in ("cos", "sin")}
    if ours:
        blocks = -(-capacity // KV_BLOCK)
        sequence, table = np.array([[context, rows, 0]]), np.arange(blocks)[None]
        given |= {"sequence": sequence, "table": table}
        given |= {"positions": np.arange(context, capacity)[None]}
        inputs |= dict.fromkeys(("sequence", "table", "positions"), (I64, None))
        cache = [blocks, kv_heads, KV_BLOCK, dim]
    else:
        given |= {"last": np.array([capacity - 1], np.int32), "total": np.array(capacity, np.int32)}
        inputs |= {"last": (I32, [1]), "total": (I32, [])}
        cache = [1, kv_heads, capacity, dim]
    caches = np.zeros((2 * layers, *cache), np.float32)
    nodes, outputs = [], {}
    for i in range(layers):
        past, present = [f"k{i}", f"v{i}"], [f"pk{i}", f"pv{i}"]
        inputs |= dict.fromkeys(past, (F32, cache))
        outputs |= dict.fromkeys((f"y{i}", *present), (F32, None))
        sizes = {"num_heads": heads, "kv_num_heads": kv_heads}
        made = [f"y{i}", *present]
        if ours:
            names = ["qkv", "", "", *past, "sequence", "table", "cos", "sin", "positions"]
            node = helper.make_node("CachedAttention", names, made, domain=DOMAIN, **sizes)
        else:
            names = ["qkv", "", "", *past, "last", "total", "cos", "sin"]
            node = helper.make_node(
                "GroupQueryAttention", names, made, domain=CONTRIB, do_rotary=1, **sizes
            )
        nodes.append(node)
    session = open_session(nodes, inputs, outputs, {}, threads)
    binding = session.io_binding()
    held = [ort.OrtValue.ortvalue_from_numpy(cache) for cache in caches]
    for name, array in given.items():
        binding.bind_cpu_input(name, array)
    for i in range(layers):
        binding.bind_output(f"y{i}")
        for part, value in zip("kv", held[2 * i : 2 * i + 2], strict=True):
            binding.bind_ortvalue_input(f"{part}{i}", value)
            binding.bind_ortvalue_output(f"p{part}{i}", value)

    def run() -> None:
        session.run_with_iobinding(binding)

    run.__dict__["held"] = (caches, held, given)
    return run


def show_attention(args: argparse.Namespace) -> None:
    layers = 4
    print("\n| attention | context |" + "".join(f" M={m} |" for m in args.rows))
    for name, *shape in HEADS:
        for context in args.contexts:
            cells = []
            for rows in args.rows:
                sizes = shape[0], shape[1], shape[2]
                runs = [
                    attention_pass(ours, sizes, rows, context, args.threads, layers)
                    for ours in (True, False)
                ]
                own, other = (t / layers * 1e3 for t in medians(runs, args))
                cells.append(f" {other:.3f} -> {own:.3f} ({other / own:.1f}x) |")
            print(f"| {name} | {context} |" + "".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--cpu", action="store_true", help="measure CPU time, for busy machines; needs one thread"
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds for each pair of cells")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 512])
    parser.add_argument("--contexts", type=int, nargs="+", default=[200, 4096])
    parser.add_argument("--forms", nargs="+", default=["4:32", "4:128", "8:32"], help="bits:block")
    parser.add_argument("--only", choices=["products", "attention"])
    args = parser.parse_args()
    args.forms = [tuple(int(n) for n in form.split(":")) for form in args.forms]
    print(f"{instruction_sets()[0]}, {args.threads} threads, ms: ONNX Runtime's -> edgellm's\n")
    if args.only != "attention":
        show_products(args, np.random.default_rng(0))
    if args.only != "products":
        show_attention(args)


if __name__ == "__main__":
    main()

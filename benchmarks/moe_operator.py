"""The experts of one layer of Qwen3-30B-A3B: edgellm's operator and ONNX Runtime's QMoE.

INT4 in blocks of 32, random weights, tokens and experts; both alternate. QMoE chooses the experts
itself; edgellm's operator gets them as input.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from edgellm.device_runtime.kernels.library import DOMAIN, register
from edgellm.device_runtime.kernels.pack import PackedForm

EXPERTS, TAKEN, HIDDEN, INNER, BLOCK = 128, 8, 2048, 768, 32
ROWS, CALLS = (1, 2, 4, 8, 16), 15
_FLOAT, _INT = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64


def _session(
    node: onnx.NodeProto, inputs: dict[str, int], held: dict[str, np.ndarray], threads: int
) -> ort.InferenceSession:
    graph = helper.make_graph(
        [node],
        "experts",
        [helper.make_tensor_value_info(name, kind, None) for name, kind in inputs.items()],
        [helper.make_tensor_value_info("y", _FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in held.items()],
    )
    opsets = [helper.make_opsetid(*each) for each in (("", 21), ("com.microsoft", 1), (DOMAIN, 1))]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    register(options)
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def own(threads: int) -> ort.InferenceSession:
    """Return a session of edgellm's operator."""
    held = {}
    for name, form in (
        (
            "gates",
            PackedForm(
                kind="int4", in_features=HIDDEN, out_features=2 * INNER, block=BLOCK, is_gated=True
            ),
        ),
        ("downs", PackedForm(kind="int4", in_features=INNER, out_features=HIDDEN, block=BLOCK)),
    ):
        count = EXPERTS * (form.num_bytes - 64) // form.record_bytes
        records = np.random.default_rng(0).integers(0, 256, (count, form.record_bytes), np.uint8)
        records[:, -64:] = np.full(32, 2e-3, np.float16).view(np.uint8)
        headers = np.frombuffer(form.header() * EXPERTS, np.uint8)
        held[name] = np.concatenate([records.reshape(-1), headers])
    names = ["x", "ids", "shares", "gates", "downs"]
    node = helper.make_node("Experts", names, ["y"], domain=DOMAIN, experts=EXPERTS)
    return _session(node, {"x": _FLOAT, "ids": _INT, "shares": _FLOAT}, held, threads)


def theirs(threads: int) -> ort.InferenceSession:
    """Return a session of ONNX Runtime's operator."""
    random = np.random.default_rng(0)
    held = {}
    for index, (rows, width) in enumerate(((2 * INNER, HIDDEN), (HIDDEN, INNER)), 1):
        held[f"w{index}"] = random.integers(0, 256, (EXPERTS, rows, width // 2), np.uint8)
        held[f"s{index}"] = np.full((EXPERTS, rows, width // BLOCK), 2e-3, np.float32)
    node = helper.make_node(
        "QMoE", ["x", "logits", "w1", "s1", "", "w2", "s2"], ["y"], domain="com.microsoft",
        k=TAKEN, activation_type="swiglu", swiglu_fusion=1, normalize_routing_weights=1,
        expert_weight_bits=4, block_size=BLOCK,
    )  # fmt: skip
    return _session(node, {"x": _FLOAT, "logits": _FLOAT}, held, threads)


def compare(threads: int) -> None:
    """Print milliseconds of a call by number of tokens; with one thread, CPU time."""
    clock = time.process_time if threads == 1 else time.perf_counter
    sessions = {"edgellm": own(threads), "QMoE": theirs(threads)}
    random = np.random.default_rng(1)
    for rows in ROWS:
        times: dict[str, list[float]] = {name: [] for name in sessions}
        for _ in range(CALLS):
            x = random.standard_normal((rows, HIDDEN), np.float32)
            ids = np.stack([random.permutation(EXPERTS)[:TAKEN] for _ in range(rows)])
            shares = np.full((rows, TAKEN), 1 / TAKEN, np.float32)
            logits = np.zeros((rows, EXPERTS), np.float32)
            np.put_along_axis(logits, ids, 9, 1)
            given = {"x": x, "ids": ids, "shares": shares, "logits": logits}
            for name, session in sessions.items():
                wanted = {each.name: given[each.name] for each in session.get_inputs()}
                times[name].append(_ms(clock, lambda s=session, w=wanted: s.run(None, w)))
        found = {name: (statistics.median(each), min(each)) for name, each in times.items()}
        line = ", ".join(f"{name} {ms:.2f} (best {best:.2f})" for name, (ms, best) in found.items())
        print(f"{rows:2} rows, ms: {line}", flush=True)


def _ms(clock: Callable[[], float], call: Callable[[], object]) -> float:
    start = clock()
    call()
    return (clock() - start) * 1e3

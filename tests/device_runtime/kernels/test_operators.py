"""The kernels as operators of ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from kernel_calls import Rows, attention, product, quantized_case
from onnx import helper, numpy_helper

from edgellm.device_runtime.kernels.library import DOMAIN, instruction_sets, register

BEST = instruction_sets()[0]
F32, I64, BOOL = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64, onnx.TensorProto.BOOL
CAPACITY, DIM, HEADS, KV_HEADS = 300, 16, 4, 2


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def open_session(node, inputs, outputs, initializers=(), threads=2, path=None):
    graph = helper.make_graph(
        [node], "kernels", [helper.make_tensor_value_info(*i) for i in inputs],
        [helper.make_tensor_value_info(*o) for o in outputs],
        [numpy_helper.from_array(a, n) for n, a in initializers],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    register(options)
    source = model.SerializeToString()
    if path is not None:
        onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=0)
        source = str(path)
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def linear(case, packed=None, names=("x", "w"), outputs=("y",), threads=2, path=None, **attributes):
    node = helper.make_node("QuantLinear", names, outputs, domain=DOMAIN, **attributes)
    given = [(n, F32, None) for n in names if n not in ("", "w")]
    weight = [("w", case.packed if packed is None else packed)]
    return open_session(node, given, [(o, F32, None) for o in outputs], weight, threads, path)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_linear_layer_has_the_kernels_bits(threads, rng, tmp_path):
    case = quantized_case(rng, "int4", 96, 2000, 32, zero_points=True)
    named = {"K": 96, "N": 2000, "block": 32, "form": 1}
    session = linear(case, threads=threads, path=tmp_path / "m.onnx", **named)
    for rows in (0, 1, 7, 40):
        x = rng.standard_normal((1, rows, 96), np.float32)
        y = session.run(None, {"x": x})[0]
        assert y.shape == (1, rows, 2000)
        assert y.tobytes() == product(BEST, case, x[0]).tobytes()


def test_a_linear_layer_with_all_that_stands_around_it(rng):
    case = quantized_case(rng, "int8", 64, 32, 32)
    names = ("x", "w", "gamma", "skip", "bias", "residual")
    session = linear(case, names=names, outputs=("y", "sum"), epsilon=1e-6)
    shapes = {"x": (1, 3, 64), "skip": (1, 3, 64), "gamma": (64,), "bias": (32,)}
    shapes["residual"] = (1, 3, 32)
    given = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    y, total = session.run(None, given)
    rows = {n: a.reshape(-1, a.shape[-1]) if a.ndim > 1 else a for n, a in given.items()}
    expected, expected_total = product(BEST, case, epsilon=1e-6, **rows)
    assert y.tobytes() == expected.tobytes()
    assert total.tobytes() == expected_total.tobytes()
    for name, shape in {"x": (1, 3, 65), "skip": (1, 2, 64), "gamma": (63,), "bias": (33,)}.items():
        with pytest.raises(Exception, match="QuantLinear: "):
            session.run(None, {**given, name: np.zeros(shape, np.float32)})
    assert session.run(None, given)[0].tobytes() == y.tobytes()


def test_foreign_weights_stop_the_session(rng):
    case = quantized_case(rng, "int4", 64, 32, 32)
    with pytest.raises(Exception, match="no packed weight of edgellm"):
        linear(case, np.zeros(1000, np.uint8))
    with pytest.raises(Exception, match="cut off"):
        linear(case, case.packed[:-1])
    with pytest.raises(Exception, match="not the one that the node was made for"):
        linear(case, K=128)
    node = helper.make_node("QuantLinear", ("x", "w"), ("y",), domain=DOMAIN)
    inputs = [("x", F32, None), ("w", onnx.TensorProto.UINT8, None)]
    with pytest.raises(Exception, match="must be an initializer"):
        open_session(node, inputs, [("y", F32, None)])


def test_rows_of_an_embedding(rng):
    case = quantized_case(rng, "int8", 72, 50, 32)
    node = helper.make_node("LookUp", ("ids", "w"), ("y",), domain=DOMAIN)
    inputs = [("ids", I64, None)]
    session = open_session(node, inputs, [("y", F32, None)], [("w", case.packed)])
    ids = np.array([[3, 49, 0], [3, 31, 32]])
    y = session.run(None, {"ids": ids})[0]
    np.testing.assert_allclose(y, case.weight[ids], rtol=1e-6)
    assert session.run(None, {"ids": ids[:, :0]})[0].shape == (2, 0, 72)
    for wrong in (-1, 50):
        with pytest.raises(Exception, match="LookUp: an id is outside of the embedding"):
            session.run(None, {"ids": np.array([wrong])})
    gated = quantized_case(rng, "int8", 72, 64, 32, gated=True)
    with pytest.raises(Exception, match="LookUp: gated weights"):
        open_session(node, inputs, [("y", F32, None)], [("w", gated.packed)])


def attention_session(inputs=(), cache=F32, threads=2, packed=True, **attributes):
    """`inputs` by name, from cos on in the operator's order."""
    known = {
        "cos": F32, "sin": F32, "positions": I64, "mask": BOOL, "q_norm": F32, "k_norm": F32,
        "sinks": F32, "k_scale": F32, "v_scale": F32,
    }  # fmt: skip
    qkv = ("q", "", "") if packed else ("q", "k", "v")
    last = max((list(known).index(i) + 1 for i in inputs), default=0)
    given = (name if name in inputs else "" for name in list(known)[:last])
    names = [*qkv, "past_k", "past_v", "at", *given]
    outputs = ("y", "present_k", "present_v")
    heads = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, **attributes}
    node = helper.make_node("CachedAttention", names, outputs, domain=DOMAIN, **heads)
    types = {"q": F32, "k": F32, "v": F32, "past_k": cache, "past_v": cache, "at": I64, **known}
    return open_session(
        node, [(n, types[n], None) for n in names if n],
        [("y", F32, None), ("present_k", cache, None), ("present_v", cache, None)], threads=threads,
    )  # fmt: skip


def rows_of(qkv, keys, values, write_index):
    width, kv_width = HEADS * DIM, KV_HEADS * DIM
    parts = np.split(qkv, [width, width + kv_width], axis=1)
    q, k, v = (np.ascontiguousarray(part) for part in parts)
    return Rows(q, k, v, keys[0].copy(), values[0].copy(), write_index)


def run_in_place(session, given, keys, values, rows):
    """With past and present in one place, as the sessions of engines bind them."""
    binding = session.io_binding()
    held = [ort.OrtValue.ortvalue_from_numpy(a) for a in (keys, values)]
    for name, array in given.items():
        binding.bind_cpu_input(name, array)
    y = np.full((1, rows, HEADS * DIM), np.nan, np.float32)
    out = ort.OrtValue.ortvalue_from_numpy(y)
    binding.bind_ortvalue_output("y", out)
    for part, value in zip("kv", held, strict=True):
        binding.bind_ortvalue_input(f"past_{part}", value)
        binding.bind_ortvalue_output(f"present_{part}", value)
    session.run_with_iobinding(binding)
    return y[0]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("dtype", "cache"), [
    (np.float32, F32), (np.float16, onnx.TensorProto.FLOAT16), (np.int8, onnx.TensorProto.INT8),
])  # fmt: skip
def test_attention_writes_the_cache_in_place(threads, dtype, cache, rng):
    scales = {"k_scale": np.float32([0.02]), "v_scale": np.float32([0.03])}
    scales = scales if dtype == np.int8 else {}
    tables = {n: rng.standard_normal((400, DIM // 2)).astype(np.float32) for n in ("cos", "sin")}
    session = attention_session([*tables, "positions", "mask", *scales], cache, threads)
    keys, values = (
        (rng.standard_normal((1, KV_HEADS, CAPACITY, DIM)) * 20).astype(dtype) for _ in range(2)
    )
    for rows, write_index in ((1, 0), (1, 270), (5, 255), (40, 200)):
        qkv = rng.standard_normal((rows, (HEADS + 2 * KV_HEADS) * DIM), np.float32)
        mask = np.tri(rows, dtype=np.bool_) & (rng.random((rows, rows)) < 0.7)
        mask |= np.eye(rows, dtype=np.bool_)
        positions = write_index + mask.sum(1)[None] - 1
        given = {
            "q": qkv[None], "at": np.array([write_index]), "positions": positions, "mask": mask,
            **tables, **scales,
        }  # fmt: skip
        expected = rows_of(qkv, keys, values, write_index)
        options = {"mask": mask, "rope": (tables["cos"], tables["sin"]), "positions": positions}
        if scales:
            options["scales"] = (scales["k_scale"][0], scales["v_scale"][0])
        found = attention(BEST, expected, **options)
        plain = session.run(None, {**given, "past_k": keys, "past_v": values})
        assert plain[0].tobytes() == found.tobytes()
        live = np.s_[:, : write_index + rows]
        assert plain[1][0][live].tobytes() == expected.keys[live].tobytes()
        y = run_in_place(session, given, keys, values, rows)
        assert y.tobytes() == found.tobytes()
        assert keys[0].tobytes() == expected.keys.tobytes()
        assert values[0].tobytes() == expected.values.tobytes()


def test_attention_refuses_what_does_not_fit(rng):
    session = attention_session(["cos", "sin", "positions", "mask"], packed=False)
    cache = np.zeros((1, KV_HEADS, 8, DIM), np.float32)
    sound = {
        "q": rng.standard_normal((1, 2, HEADS * DIM)), "k": np.zeros((1, 2, KV_HEADS * DIM)),
        "v": np.zeros((1, 2, KV_HEADS * DIM)), "past_k": cache, "past_v": cache,
        "cos": np.ones((10, 8)), "sin": np.zeros((10, 8)),
    }  # fmt: skip
    sound = {name: array.astype(np.float32) for name, array in sound.items()}
    sound |= {"at": np.array([6]), "positions": np.array([[6, 7]])}
    sound["mask"] = np.tri(2, dtype=np.bool_)
    faults = {
        "at": (np.array([7]), np.array([-1]), np.array([0, 1])),
        "positions": (np.array([[6, 10]]), np.array([[-1, 0]]), np.array([[1]])),
        "mask": (np.ones((2, 1), np.bool_), np.ones((3, 3), np.bool_), np.ones((2, 9), np.bool_)),
        "q": (sound["q"][..., 1:], sound["q"][:, :1], sound["q"][0]),
        "past_v": (cache[:, :1], cache[:, :, 1:]),
        "past_k": (cache[:, :1], cache[0]),
        "cos": (sound["cos"][:, 1:], np.ones((10, 9), np.float32)),
    }
    for name, values in faults.items():
        for value in values:
            with pytest.raises(Exception, match=r"CachedAttention: |Invalid rank"):
                session.run(None, {**sound, name: value})
    assert np.isfinite(session.run(None, sound)[0]).all()
    with pytest.raises(Exception, match="no multiple"):
        attention_session(kv_num_heads=3)


def picks_session(threads=2):
    node = helper.make_node("Picks", ("logits", "k"), ("ids", "tops", "probs"), domain=DOMAIN)
    outputs = [("ids", I64, None), ("tops", F32, None), ("probs", F32, None)]
    return open_session(node, [("logits", F32, None), ("k", I64, None)], outputs, threads=threads)


@pytest.mark.parametrize("width", [1, 17, 1024, 5000, 49152])
def test_picks(width, rng):
    logits = (rng.standard_normal((1, 3, width)) * 4).astype(np.float32)
    logits[0, 1] = np.round(logits[0, 1])  # many are equal
    rows = logits[0].astype(np.float64)
    log_probs = rows - rows.max(-1, keepdims=True)
    log_probs -= np.log(np.exp(log_probs).sum(-1, keepdims=True))
    for k in {1, min(10, width), min(1500, width)}:
        ids, tops, probs = picks_session().run(None, {"logits": logits, "k": np.array([k])})
        expected = np.argsort(-logits[0], axis=-1, kind="stable")[:, :k]
        assert np.array_equal(ids[0], expected)
        assert np.array_equal(tops[0], np.take_along_axis(logits[0], expected, 1))
        np.testing.assert_allclose(probs[0], np.take_along_axis(log_probs, expected, 1), atol=5e-6)


def test_picks_refuse_more_than_there_are():
    logits = np.zeros((1, 1, 3), np.float32)
    for k in (0, 4):
        with pytest.raises(Exception, match="Picks: k is not"):
            picks_session().run(None, {"logits": logits, "k": np.array([k])})

"""Engines that torch computes in TensorRT's place; ONNX Runtime is the oracle of operators."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

torch = pytest.importorskip("torch")

import torch_engine  # noqa: E402 - needs torch
import torch_ops  # noqa: E402 - the same
from fake_gpu import FakeDevice  # noqa: E402 - sorted after them

TYPES = {
    "float16": np.float16,
    "float": np.float32,
    "int64": np.int64,
    "int8": np.int8,
    "bool": np.bool_,
}
X = "float16[2,6,8] x"
ROTARY = "float16[2,6,16] x, float16[2,6,4] c, float16[2,6,4] s"
# Inputs of a graph, and what it computes as y. Integers are places in 6 entries.
CASES = {
    **{
        f"{name} of {kind}": (f"{kind}[2,6,8] x, {kind}[8] z", f"y = {name}(x, z)")
        for name in ("Add", "Sub", "Mul", "Max", "Min")
        for kind in ("float16", "float", "int64")
    },
    **{
        name: (f"{X}, float16[8] z", f"b = {name}(x, z) y = Cast<to = 1>(b)")
        for name in ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
    },
    **{
        name: ("bool[2,6] x, bool[6] z", f"b = {name}(x, z) y = Cast<to = 1>(b)")
        for name in ("And", "Or")
    },
    **{
        name: ("float[2,6,8] x", f"y = {name}(x)")
        for name in (
            "Neg",
            "Abs",
            "Cos",
            "Sin",
            "Exp",
            "Erf",
            "Reciprocal",
            "Sigmoid",
            "Softplus",
            "Tanh",
            "Identity",
            "Softmax",
            "LogSoftmax",
            "Gelu",
        )
    },
    **{name: ("float[2,6,8] x", f"p = Abs(x) y = {name}(p)") for name in ("Sqrt", "Log")},
    "Not": ("bool[2,6] x", "b = Not(x) y = Cast<to = 1>(b)"),
    "Div": (f"{X}, float16[8] z", "y = Div(x, z)"),
    "Div of integers": ("int64[2,6] x", "c = Constant<value = int64 {2}>() y = Div(x, c)"),
    "Pow": ("float[2,6,8] x", "c = Constant<value = float {2.0}>() y = Pow(x, c)"),
    "Where": (f"bool[2,6,1] b, {X}, float16[8] z", "y = Where(b, x, z)"),
    "CastLike": ("float[2,6] x, float16[1] z", "y = CastLike(x, z)"),
    "MatMul": (f"{X}, float16[8,10] z", "y = MatMul(x, z)"),
    "MatMul of batches": (f"{X}, float16[2,8,4] z", "y = MatMul(x, z)"),
    "shape at run time": (
        f"{X}, float16[2,48] z",
        "s = Shape<start = 1>(z) h = Constant<value = int64[1] {0}>() o = Concat<axis = 0>(h, s) "
        "y = Reshape(x, o)",
    ),
    "Transpose": (X, "y = Transpose<perm = [0, 2, 1]>(x)"),
    "Unsqueeze": (X, "a = Constant<value = int64[2] {-1, 1}>() y = Unsqueeze(x, a)"),
    "Squeeze": ("float16[2,1,8] x", "a = Constant<value = int64[1] {1}>() y = Squeeze(x, a)"),
    "Squeeze of all": ("float16[2,1,8] x", "y = Squeeze(x)"),
    "Concat": (f"{X}, float16[2,3,8] z", "y = Concat<axis = 1>(x, z)"),
    "Split": (X, "a, y = Split<axis = -1, num_outputs = 2>(x)"),
    "Split by sizes": (X, "s = Constant<value = int64[2] {2, 6}>() a, y = Split<axis = 2>(x, s)"),
    "Expand": ("float16[2,1,8] x", "s = Constant<value = int64[3] {1, 4, 1}>() y = Expand(x, s)"),
    "Slice": (
        X,
        "a = Constant<value = int64[1] {1}>() b = Constant<value = int64[1] {-1}>() "
        "y = Slice(x, a, b, a)",
    ),
    "Range": (
        X,
        "a = Constant<value = int64 {1}>() b = Constant<value = int64 {9}>() r = Range(a, b, a) "
        "c = CastLike(r, x) y = Mul(x, c)",
    ),
    "Gather": (f"{X}, int64[2,3] z", "y = Gather<axis = 1>(x, z)"),
    "Gather of the last": (X, "a = Constant<value = int64 {-1}>() y = Gather<axis = 1>(x, a)"),
    **{
        name: (X, f"a = Constant<value = int64[1] {{-1}}>() y = {name}<keepdims = 0>(x, a)")
        for name in ("ReduceMax", "ReduceMin", "ReduceSum", "ReduceMean")
    },
    "ReduceMax of all": ("float[2,6] x", "y = ReduceMax(x)"),
    "ArgMax": ("float[2,6,8] x", "y = ArgMax<axis = -1, keepdims = 0>(x)"),
    "ArgMax of equal ones": ("int64[4,6,8] x", "y = ArgMax<axis = -1>(x)"),
    "TopK": ("float[2,6,8] x", "k = Constant<value = int64[1] {3}>() y, i = TopK(x, k)"),
    "places of TopK": ("int64[2,6,8] x", "k = Constant<value = int64[1] {3}>() v, y = TopK(x, k)"),
    "Swish": (X, "y = Swish(x)"),
    "Swish with a factor": (X, "y = Swish<alpha = 1.7>(x)"),
    "Gelu by tanh": ("float[2,6] x", 'y = Gelu<approximate = "tanh">(x)'),
    "Clip": (
        "float[2,6] x",
        "a = Constant<value = float {-0.5}>() b = Constant<value = float {0.5}>() "
        "y = Clip(x, a, b)",
    ),
    "RMSNormalization": (f"{X}, float16[8] z", "y = RMSNormalization<epsilon = 0.001>(x, z)"),
    "LayerNormalization": (
        f"{X}, float16[8] z, float16[8] b",
        "y = LayerNormalization<epsilon = 0.001>(x, z, b)",
    ),
    "RotaryEmbedding": (ROTARY, "y = RotaryEmbedding<num_heads = 2>(x, c, s)"),
    "RotaryEmbedding of pairs": (
        ROTARY,
        "y = RotaryEmbedding<num_heads = 2, interleaved = 1>(x, c, s)",
    ),
    "RotaryEmbedding of a part": (
        "float16[2,6,16] x, float16[6,2] c, float16[6,2] s, int64[2,6] i",
        "y = RotaryEmbedding<num_heads = 2, rotary_embedding_dim = 4>(x, c, s, i)",
    ),
    "Attention": (
        "float16[2,6,16] x, float16[2,6,8] k, float16[2,6,8] v, float16[2,1,6,6] m",
        "y = Attention<q_num_heads = 4, kv_num_heads = 2>(x, k, v, m)",
    ),
    "Attention of heads": (
        "float16[2,4,6,8] x, float16[2,4,6,8] k, float16[2,4,6,8] v, bool[6,6] m",
        "y = Attention(x, k, v, m)",
    ),
    "QuantizeLinear": (
        X,
        "f = Constant<value = float {0.02}>() s = Cast<to = 10>(f) "
        "z = Constant<value = int8 {3}>() q = QuantizeLinear(x, s, z) "
        "y = DequantizeLinear(q, s, z)",
    ),
    "QuantizeLinear to FP8": (
        X,
        "f = Constant<value = float {0.003}>() s = Cast<to = 10>(f) "
        "q = QuantizeLinear<output_dtype = 17>(x, s) "
        "y = DequantizeLinear(q, s)",
    ),
    "DequantizeLinear of rows": (
        "int64[6,8] x, float16[6] s",
        "q = Cast<to = 3>(x) y = DequantizeLinear<axis = 0>(q, s)",
    ),
    "DequantizeLinear of blocks": (
        "int64[6,8] x, float16[6,2] s",
        "q = Cast<to = 3>(x) y = DequantizeLinear<axis = 1, block_size = 4>(q, s)",
    ),
}


def graph_file(inputs, body, folder):
    """A graph of ONNX text in a file, and the types and shapes of its inputs."""
    text = f'<ir_version: 10, opset_import: ["" : 24]> g ({inputs}) => (y) {{ {body} }}'
    model = ir.from_onnx_text(text)
    for node in list(model.graph):
        if node.op_type == "Constant":  # lowered graphs have initializers
            (output,) = node.outputs
            value = ir.val(output.name, const_value=node.attributes["value"].as_tensor())
            output.name = f"{output.name}.old"
            model.graph.initializers.add(value)
            ir.convenience.replace_all_uses_with(output, value)
            model.graph.remove(node, safe=True)
    given = {each.name: (each.dtype, tuple(each.shape)) for each in model.graph.inputs}
    path = folder / "graph.onnx"
    ir.save(model, path)
    return path, given


def random_feeds(given):
    random, feeds = np.random.default_rng(7), {}
    for name, (kind, shape) in given.items():
        dtype = kind.numpy()
        if dtype == np.bool_:
            feeds[name] = random.integers(2, size=shape).astype(dtype)
            feeds[name][..., 0] = True  # attention attends to something
        elif dtype.kind == "i":
            feeds[name] = random.integers(6, size=shape).astype(dtype)
        else:
            feeds[name] = random.normal(size=shape).astype(dtype)
    return feeds


def session_of(path):
    """A session; its graphs have outputs without types, which only engines need."""
    model = ir.load(path)
    for each in model.graph.outputs:
        each.dtype, each.shape = ir.DataType.FLOAT, ir.Shape([1])
    ir.save(model, path)
    return torch_engine.TorchSession(path, torch_engine.OnCpu(FakeDevice()), torch.device("cpu"))


@pytest.mark.parametrize("case", CASES)
def test_operators_compute_what_onnx_runtime_does(case, tmp_path):
    path, given = graph_file(*CASES[case], tmp_path)
    feeds = random_feeds(given)
    (expected,) = onnxruntime.InferenceSession(path).run(None, feeds)
    (found,) = session_of(path).run(["y"], feeds)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    wide, size = found.astype(np.float64), np.abs(expected.astype(np.float64)).max()
    assert np.abs(wide - expected).max() <= (2e-3 if expected.dtype == np.float16 else 2e-6) * size


def test_all_operators_are_tested():
    bodies = " ".join(body for _, body in CASES.values())
    missing = [name for name in torch_ops.OPERATORS if f"{name}(" not in bodies.replace("<", "(")]
    assert missing == ["TRT_FP4DynamicQuantize"]


def test_nvfp4_rounds_as_its_types_do():
    random = np.random.default_rng(3)
    x = random.normal(size=(1, 5, 64)).astype(np.float32) * 10.0 ** random.integers(-3, 3, (5, 1))
    scale = np.float32(0.01)
    inputs = [torch.from_numpy(x), torch.tensor(scale)]
    call = torch_ops.Call("TRT_FP4DynamicQuantize", {"block_size": 16}, inputs, [None, None], 2)
    codes, scales = torch_ops.OPERATORS[call.operator](call)
    blocks = x.reshape(1, 5, 4, 16)
    wanted = np.abs(blocks).max(-1) / np.float32(6) / scale
    rounded = np.clip(wanted, 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(scales.float().numpy(), rounded)
    exact = np.clip(blocks / (rounded * scale)[..., None], -6, 6)
    expected = exact.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(codes.numpy(), expected.reshape(x.shape))


@pytest.mark.parametrize(
    "kind",
    [
        ir.DataType.BFLOAT16,
        ir.DataType.FLOAT8E4M3FN,
        ir.DataType.INT4,
        ir.DataType.FLOAT4E2M1,
        ir.DataType.FLOAT16,
    ],
)
def test_constants_keep_their_values(kind):
    values = np.array([[-2.0, 0.0], [1.0, 3.0]])
    found = torch_ops.tensor_of(ir.tensor(values.astype(kind.numpy()), dtype=kind))
    np.testing.assert_array_equal(found.float().numpy(), values)


def test_what_depends_on_constants_alone_is_computed_once(tmp_path):
    body = "c = Constant<value = float[2] {1, 2}>() s = Cos(c) t = Unsqueeze(s, a) y = Mul(x, t)"
    path, _ = graph_file("float[2,2] x", f"a = Constant<value = int64[1] {{0}}>() {body}", tmp_path)
    session = session_of(path)
    assert [node.operator for node in session._nodes] == ["Mul"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("y = Mish(x)", r"node n \(Mish\) of torch.float16 \[2, 6, 8\]: KeyError"),
        ("i = Cast<to = 7>(x) y = Reshape(x, i)", r"\(Reshape\).*depends on what a GPU computes"),
    ],
)
def test_errors_name_the_node_and_its_types(body, said, tmp_path):
    path, given = graph_file(X, body, tmp_path)
    model = ir.load(path)
    for node in model.graph:
        node.name = "n"
    ir.save(model, path)
    session = session_of(path)
    with pytest.raises(torch_engine.NodeError, match=said):
        session.run(["y"], random_feeds(given))


def test_rows_do_not_depend_on_their_number(tmp_path):
    path, _ = graph_file("float16[1,n,256] x, float16[256,300] z", "y = MatMul(x, z)", tmp_path)
    session, random = session_of(path), np.random.default_rng(5)
    x, z = (random.normal(size=size).astype(np.float16) for size in ((1, 130, 256), (256, 300)))
    (whole,) = session.run(["y"], {"x": x[:, :100], "z": z})
    for count in (1, 7):
        (part,) = session.run(["y"], {"x": x[:, :count], "z": z})
        np.testing.assert_array_equal(part, whole[:, :count])

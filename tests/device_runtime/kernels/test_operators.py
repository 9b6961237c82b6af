"""edgellm's kernels as operators of ONNX Runtime."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from kernel_calls import Rows, attention, product, quantized_case
from kernel_sessions import F32, I64, open_session
from onnx import helper

from edgellm.device_runtime.kernels.library import DOMAIN, instruction_sets

BEST = instruction_sets()[0]
BOOL = onnx.TensorProto.BOOL
DIM, HEADS, KV_HEADS = 16, 4, 2


@pytest.fixture
def rng():
    return np.random.default_rng(3)


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


def test_linear_layer_with_fused_neighbours(rng):
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


def test_foreign_weights_fail_the_session(rng):
    case = quantized_case(rng, "int4", 64, 32, 32)
    with pytest.raises(Exception, match="no packed weight of edgellm"):
        linear(case, np.zeros(1000, np.uint8))
    with pytest.raises(Exception, match="cut off"):
        linear(case, case.packed[:-1])
    with pytest.raises(Exception, match="not the one that the node was made for"):
        linear(case, K=128)
    node = helper.make_node("QuantLinear", ("x", "w"), ("y",), domain=DOMAIN)
    inputs = [("x", F32, None), ("w", onnx.TensorProto.UINT8, None)]
    with pytest.raises(Exception, match="must be initializers"):
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
        "cos": F32, "sin": F32, "positions": I64, "masks": BOOL, "q_norm": F32, "k_norm": F32,
        "sinks": F32, "k_scale": F32, "v_scale": F32,
    }  # fmt: skip
    qkv = ("q", "", "") if packed else ("q", "k", "v")
    last = max((list(known).index(i) + 1 for i in inputs), default=0)
    given = (name if name in inputs else "" for name in list(known)[:last])
    names = [*qkv, "past_k", "past_v", "sequences", "pages", *given]
    outputs = ("y", "present_k", "present_v")
    heads = {"num_heads": HEADS, "kv_num_heads": KV_HEADS, **attributes}
    node = helper.make_node("CachedAttention", names, outputs, domain=DOMAIN, **heads)
    types = {"q": F32, "k": F32, "v": F32, "past_k": cache, "past_v": cache, **known}
    types |= {"sequences": I64, "pages": I64}
    return open_session(
        node,
        [(n, types[n], None) for n in names if n],
        [("y", F32, None), ("present_k", cache, None), ("present_v", cache, None)],
        threads=threads,
    )


def rows_of(qkv, keys, values, write_index):
    width, kv_width = HEADS * DIM, KV_HEADS * DIM
    parts = np.split(qkv, [width, width + kv_width], axis=1)
    q, k, v = (np.ascontiguousarray(part) for part in parts)
    return Rows(q, k, v, keys, values, write_index)


def run_in_place(session, given, keys, values, rows):
    """Run with past and present in one buffer, as the sessions of engines bind them."""
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


BFLOAT16 = ml_dtypes.bfloat16


class Strewn:
    """Sequences with KV blocks in any order in one pool, and the outputs of each alone."""

    def __init__(self, rng, dtype, page_rows, lengths):
        self.rng, self.page_rows = rng, page_rows
        counts = [-(-length // page_rows) for length in lengths]
        order = rng.permutation(sum(counts) + 2)
        self.tables = np.full((len(lengths), max(counts)), -1)
        shape = (len(order), KV_HEADS, page_rows, DIM)
        self.pools = [(rng.standard_normal(shape) * 20).astype(dtype) for _ in range(2)]
        if dtype == BFLOAT16:  # which ONNX Runtime takes from NumPy as its bits
            self.pools = [pool.view(np.uint16) for pool in self.pools]
        for table, count in zip(self.tables, counts, strict=True):
            table[:count], order = order[:count], order[count:]

    def slots(self, pools, at):
        """Keys and values [kv_heads, C, D] of sequence `at`."""
        pages = self.tables[at][self.tables[at] >= 0]
        return [pool[pages].swapaxes(0, 1).reshape(KV_HEADS, -1, DIM) for pool in pools]

    def draw(self, begins, counts, columns):
        """Draw the inputs of a pass, and the mask of each sequence; None if it is causal."""
        masks = []
        for begin, rows, more in zip(begins, counts, columns, strict=True):
            width = min(rows + max(more, 0), begin + rows)
            mask = np.tri(rows, width, width - rows, dtype=np.bool_)
            mask &= self.rng.random(mask.shape) < 0.7
            mask[np.arange(rows), np.arange(rows) + width - rows] = True
            masks.append(mask if more >= 0 else None)
        facts = [
            (begin, rows, 0 if mask is None else mask.shape[1])
            for begin, rows, mask in zip(begins, counts, masks, strict=True)
        ]
        flat = [mask.ravel() for mask in masks if mask is not None]
        rows = sum(counts)
        return {
            "q": self.rng.standard_normal((1, rows, (HEADS + 2 * KV_HEADS) * DIM), np.float32),
            "sequences": np.array(facts),
            "pages": self.tables,
            "positions": self.rng.integers(0, 400, (1, rows)),
            "masks": np.concatenate([*flat, np.zeros(3, np.bool_)]),
        }, masks

    def alone(self, given, masks, pools, **options):
        """Outputs y, and the caches after them, of one sequence after the other."""
        found, first = [], 0
        for at, mask in enumerate(masks):
            begin, rows, _ = given["sequences"][at]
            part = np.s_[first : first + rows]
            own = rows_of(given["q"][0, part], *self.slots(pools, at), int(begin))
            positions = np.ascontiguousarray(given["positions"][0, part])
            y = attention(BEST, own, mask=mask, positions=positions, **options)
            found.append((y, own.keys, own.values))
            first += rows
        return found


HALF, INT8, UINT16 = (getattr(onnx.TensorProto, name) for name in ("FLOAT16", "INT8", "UINT16"))
KINDS = [(np.float32, F32), (np.float16, HALF), (BFLOAT16, UINT16), (np.int8, INT8)]


@pytest.mark.each_change(
    "float16-10-90-2", "bfloat16-4-90-2", "int8-3-90-2", "float32-1-0-1", "float32-1-90-1"
)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("window", [0, 90])
@pytest.mark.parametrize(("dtype", "cache"), KINDS)
def test_batched_sequences_have_the_bits_of_each_alone(threads, window, dtype, cache, rng):
    """Chunks, single tokens and trees; scattered blocks; caches written in place."""
    scales = {"k_scale": np.float32([0.02]), "v_scale": np.float32([0.03])}
    scales = scales if dtype == np.int8 else {}
    tables = {n: rng.standard_normal((400, DIM // 2)).astype(np.float32) for n in ("cos", "sin")}
    attributes = {"local_window_size": window} if window else {}
    names = [*tables, "positions", "masks", *scales]
    session = attention_session(names, cache, threads, **attributes)
    options = {"rope": tuple(tables.values()), "window": window}
    if scales:
        options["scales"] = (scales["k_scale"][0], scales["v_scale"][0])
    for _ in range(100):
        count = int(rng.integers(1, 6))
        begins = rng.choice([0, 3, 60, 255, 290, 530], count)
        counts = rng.choice([1, 1, 2, 5, 13, 40], count)
        strewn = Strewn(rng, dtype, int(rng.choice([16, 64, 256])), begins + counts)
        given, masks = strewn.draw(begins, counts, rng.choice([-1, 0, 4], count))
        given |= tables | scales
        before = [pool.copy() for pool in strewn.pools]
        expected = strewn.alone(given, masks, before, **options)
        copied, *_ = session.run(None, {**given, "past_k": before[0], "past_v": before[1]})
        y = run_in_place(session, given, *strewn.pools, int(counts.sum()))
        assert y.tobytes() == copied.tobytes() == np.concatenate([e[0] for e in expected]).tobytes()
        for at, (_, keys, values) in enumerate(expected):
            for found, wanted in zip(strewn.slots(strewn.pools, at), (keys, values), strict=True):
                assert found.tobytes() == wanted.tobytes()


def test_no_sequence_and_no_rows():
    session = attention_session(["masks"])
    pool = np.zeros((2, KV_HEADS, 16, DIM), np.float32)
    given = {
        "q": np.zeros((1, 0, (HEADS + 2 * KV_HEADS) * DIM), np.float32),
        "past_k": pool,
        "past_v": pool,
        "masks": np.zeros(0, np.bool_),
    }
    for count in (0, 2):
        facts, tables = np.zeros((count, 3), np.int64), np.zeros((count, 1), np.int64)
        y = session.run(None, {**given, "sequences": facts, "pages": tables})[0]
        assert y.shape == (1, 0, HEADS * DIM)


def test_attention_rejects_mismatched_shapes(rng):
    session = attention_session(["cos", "sin", "positions", "masks"], packed=False)
    cache = np.zeros((3, KV_HEADS, 16, DIM), np.float32)
    sound = {
        "q": rng.standard_normal((1, 3, HEADS * DIM)),
        "k": np.zeros((1, 3, KV_HEADS * DIM)),
        "v": np.zeros((1, 3, KV_HEADS * DIM)),
        "past_k": cache,
        "past_v": cache,
        "cos": np.ones((10, 8)),
        "sin": np.zeros((10, 8)),
    }
    sound = {name: array.astype(np.float32) for name, array in sound.items()}
    sound |= {"sequences": np.array([[30, 2, 2], [6, 1, 0]]), "positions": np.array([[6, 7, 6]])}
    sound |= {"masks": np.tri(2, dtype=np.bool_).ravel(), "pages": np.array([[2, 0], [1, -9]])}

    def facts(*first):
        return np.array([first, (6, 1, 0)])

    faults = {
        "sequences": (
            facts(31, 2, 2), facts(-1, 2, 2), facts(2**62, 2, 2), facts(30, 1, 2), facts(30, 3, 3),
            facts(30, -1, 0), facts(30, 2**62, 0), facts(30, 2, 1), facts(30, 2, 3),
            facts(30, 2, -1), facts(30, 2, 33), facts(30, 2, 2**62), facts(30, 2, 2)[:1],
            facts(30, 2, 2)[:, :2],
        ),
        "pages": (
            np.array([[2, 3], [1, 0]]), np.array([[-1, 0], [1, 0]]), np.array([[2, 0], [3, 0]]),
            np.array([[2], [1]]), np.array([[2, 0]]), np.array([2, 0]),
        ),
        "positions": (np.array([[6, 10, 6]]), np.array([[-1, 0, 6]]), np.array([[1, 2]])),
        "masks": (np.ones(3, np.bool_), np.zeros(0, np.bool_)),
        "q": (sound["q"][..., 1:], sound["q"][:, :1], sound["q"][0]),
        "past_v": (cache[:, :1], cache[:, :, 1:]),
        "past_k": (cache[:, :1], cache[0]),
        "cos": (sound["cos"][:, 1:], np.ones((10, 9), np.float32)),
    }  # fmt: skip
    for name, values in faults.items():
        for value in values:
            with pytest.raises(Exception, match=r"CachedAttention: |Invalid rank"):
                session.run(None, {**sound, name: value})
    for rows in (8, 24, 512):
        pool = np.zeros((3, KV_HEADS, rows, DIM), np.float32)
        with pytest.raises(Exception, match="pages of this size"):
            session.run(None, {**sound, "past_k": pool, "past_v": pool})
    assert np.isfinite(session.run(None, sound)[0]).all()
    with pytest.raises(Exception, match="no multiple"):
        attention_session(kv_num_heads=3)


def picks_session(threads=2):
    node = helper.make_node("Picks", ("logits", "k"), ("ids", "tops", "probs"), domain=DOMAIN)
    outputs = [("ids", I64, None), ("tops", F32, None), ("probs", F32, None)]
    return open_session(node, [("logits", F32, None), ("k", I64, None)], outputs, threads=threads)


@pytest.mark.parametrize("width", [1, 17, 1024, 5000, 49152])
def test_picks_equal_a_stable_sort_and_log_softmax(width, rng):
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


def test_picks_reject_too_large_k():
    logits = np.zeros((1, 1, 3), np.float32)
    for k in (0, 4):
        with pytest.raises(Exception, match="Picks: k is not"):
            picks_session().run(None, {"logits": logits, "k": np.array([k])})

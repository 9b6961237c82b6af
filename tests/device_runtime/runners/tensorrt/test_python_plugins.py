"""Plugins in Python, as TensorRT 10.3 builds and runs them; a fake driver."""

from __future__ import annotations

import ctypes
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attention_references import host_memory
from kernel_references import REFERENCES, TYPES
from plugin_stub import Builder, dim, library

from edgellm.build.tensorrt.builder import register_plugins
from edgellm.build.tensorrt.plugins import register as quick
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.kernels.triton import catalog, prebuilt
from edgellm.device_runtime.runners import tensorrt
from edgellm.device_runtime.runners.tensorrt.cuda import driver as cuda
from edgellm.device_runtime.runners.tensorrt.cuda import launch as driver_launch
from edgellm.device_runtime.runners.tensorrt.kernel_cache import MAGIC
from edgellm.device_runtime.runners.tensorrt.library import python_plugins
from edgellm.device_runtime.runners.tensorrt.library.attention_nodes import (
    GIVEN,
    NAMESPACE,
    PLUGINS,
)
from edgellm.device_runtime.runners.tensorrt.library.trt_import import Library, plugin_module

ROWS, LIVE, CAPACITY, HEADS, KV_HEADS, SIZE, STREAM = 5, 9, 32, 6, 2, 80, 7
ATTRIBUTE = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": SIZE, "codes": "fp16"}
ATTRIBUTE |= {"capability": 87, **dict.fromkeys(("layer", "own_tables", "window"), 0)}
ATTRIBUTE |= {"cap_bits": 0, "sunk": 0}


class Machine:
    """A library with the plugins, and memory in which kernels find their arguments."""

    def __init__(self) -> None:
        self.trt: Any = library()
        self.memory: dict[int, np.ndarray] = {}
        python_plugins.register(self.trt, self.load)
        python_plugins.register(self.trt, self.load)  # a second engine of the process

    def node(self, name: str, given: dict[str, Any]) -> Any:
        """Create a node from attributes of graph and plan, and a context."""
        trt = self.trt
        creator = trt.get_plugin_registry().get_creator(name, "1", NAMESPACE)
        assert [field.name for field in creator.field_names] == [GIVEN]
        text = np.frombuffer(json.dumps(given).encode(), np.int8)
        field = trt.PluginField(GIVEN, text, trt.PluginFieldType.CHAR)
        built = creator.create_plugin(name, [field], trt.TensorRTPhase.BUILD)
        assert built.initialized == {
            f"IPluginV3{part}" for part in ("", "OneCore", "OneBuild", "OneRuntime")
        }
        assert built.get_capability_interface(None) is built
        read = creator.create_plugin(name, built.get_fields_to_serialize(), None)
        copied = read.attach_to_context(None)
        assert copied is not read
        assert (copied.plugin_name, copied.plugin_namespace) == (name, NAMESPACE)
        return copied

    def run(
        self, name: str, *inputs: np.ndarray, given: dict[str, Any] = ATTRIBUTE
    ) -> list[np.ndarray]:
        """Run a node; return its outputs."""
        node, trt = self.node(name, given), self.trt
        found = node.get_output_shapes([[dim(n) for n in x.shape] for x in inputs], [], Builder())
        kinds = node.get_output_data_types([])
        names = [kind.name.lower() for kind in kinds]
        shapes = [[each.of({}) for each in shape] for shape in found]
        outputs = [np.full(shape, 7, name) for shape, name in zip(shapes, names, strict=True)]
        linear, other = trt.TensorFormat.LINEAR, trt.TensorFormat.HWC8
        said = (kinds[0], linear, True), (trt.int8, linear, False), (kinds[0], other, False)
        for kind, form, fits in said:
            described = [SimpleNamespace(desc=SimpleNamespace(type=kind, format=form))]
            place = len(inputs)
            assert node.supports_format_combination(place, described * (place + 1), place) == fits
        self.memory |= {each.ctypes.data: each.reshape(-1) for each in (*inputs, *outputs)}
        described = [SimpleNamespace(dims=each.shape) for each in inputs]
        addresses = [[each.ctypes.data for each in part] for part in (inputs, outputs)]
        node.enqueue(described, [], *addresses, 0, STREAM)
        return outputs

    def load(self, compiled: Any) -> Any:
        return lambda *given: self.compute(compiled, *given)

    def compute(self, compiled: Any, grid: Any, arguments: Any, stream: int) -> None:
        assert stream == STREAM
        kinds = compiled.kernel.signature.values()
        given = [
            self.memory[value] if kind in TYPES else value
            for kind, value in zip(kinds, arguments, strict=True)
        ]
        facts = {**compiled.constants, "grid": grid, "memory": host_memory}
        REFERENCES[compiled.kernel.name](*given, constants=facts)


def test_three_nodes_compute_attention():
    random, machine = np.random.default_rng(0), Machine()
    names = [plugin.name for plugin in PLUGINS]
    q, k, v = (
        random.standard_normal((1, ROWS, count * SIZE)).astype(np.float16)
        for count in (HEADS, KV_HEADS, KV_HEADS)
    )
    cache = random.standard_normal((2, KV_HEADS, CAPACITY, SIZE)).astype(np.float16)
    places = [cache[part].ctypes.data for part in range(2)]
    table = np.array([CAPACITY, CAPACITY ^ MAGIC, *places, 0, 0])
    one = np.ones((CAPACITY, SIZE // 2), np.float16)  # no RoPE
    positions, at = np.arange(ROWS)[None] + LIVE, np.array([LIVE])
    tree = np.tri(ROWS, dtype=np.int8)
    (turned,) = machine.run(names[0], q, k, v, one, 0 * one, positions, at, table)
    parts, stats = machine.run(names[1], turned, tree, positions, at, table)
    (y,) = machine.run(names[2], turned, tree, positions, at, table, parts, stats, stats)
    keys, values = cache[:, :, : LIVE + ROWS].astype(np.float64)
    np.testing.assert_array_equal(keys[:, LIVE:], k.reshape(ROWS, KV_HEADS, SIZE).swapaxes(0, 1))
    queries = q.reshape(ROWS, KV_HEADS, -1, SIZE).astype(np.float64)
    scores = np.einsum("rhgd,hld->hgrl", queries, keys) / SIZE**0.5
    scores[..., LIVE:] += np.where(tree, 0, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("hgrl,hld->rhgd", weights / weights.sum(-1, keepdims=True), values)
    np.testing.assert_allclose(y.reshape(expected.shape), expected, atol=4e-3)


def test_nodes_compute_recurrent_layers():
    """A chain whose first row follows the states."""
    random, machine, width = np.random.default_rng(0), Machine(), 24
    half = lambda *shape: random.standard_normal(shape).astype(np.float16)  # noqa: E731
    wide = lambda *shape: random.standard_normal(shape).astype(np.float32)  # noqa: E731
    x, taps, window = half(1, ROWS, width), half(3, 1, width), half(2, width)
    stored, state = np.zeros((CAPACITY, width), np.float16), wide(2, 8, 16)
    keys, deltas = np.zeros((CAPACITY, 1, 8), np.float16), wide(CAPACITY, 2, 16)
    decays = np.zeros((2, CAPACITY, 2), np.float32)
    table = np.zeros(10, np.int64)
    table[:4] = CAPACITY, CAPACITY ^ MAGIC, window.ctypes.data, stored.ctypes.data
    table[6:] = [each.ctypes.data for each in (state, keys, deltas, decays)]
    given = {"capability": 87, "entry": 0, "width": width, "size": 3}
    parents = np.arange(-1, ROWS - 1)
    (y,) = machine.run("convolve_rows", x, taps, parents, table, given=given)
    rows = np.concatenate([window, x[0]]).astype(np.float64)
    expected = sum(rows[at : at + ROWS] * taps[at] for at in range(3))
    np.testing.assert_allclose(y[0], expected, atol=1e-2)
    given |= {"entry": 1, "key_heads": 1, "heads": 2, "key_dim": 8, "value_dim": 16, "takes": 0}
    q, k, v, g = wide(1, ROWS, 8), wide(1, ROWS, 8), wide(1, ROWS, 32), -abs(wide(1, ROWS, 2))
    tree = np.tri(ROWS, dtype=np.int8)
    (read,) = machine.run("delta_rows", q, k, v, g, g, tree, table, given=given)
    after = state.astype(np.float64)
    for row in range(ROWS):
        added = k[0, row][:, None] * v[0, row].reshape(2, 1, 16)
        after = after * np.exp(g[0, row])[:, None, None] + added
        found = read[0, row].reshape(2, 16)
        np.testing.assert_allclose(found, q[0, row] @ after, atol=1e-4)


def test_nodes_compute_experts():
    """Two of three experts for each row by softmax, with a ReLU in the place of Swish."""
    random, machine, experts, hidden, inner = np.random.default_rng(0), Machine(), 3, 32, 16
    half = lambda *shape: random.standard_normal(shape).astype(np.float16)  # noqa: E731
    ups, downs = half(experts, inner, hidden) / 8, half(experts, hidden, inner) / 8
    places = [value for each in (ups, ups, downs) for value in (each.ctypes.data, 0, 0, 0)]
    table = np.array([3, 3 ^ MAGIC, *places])
    numbers = np.array([65504, 3e38, 0, 0], np.float32).view(np.int32).tolist()
    given = {"experts": experts, "top_k": 2, "hidden": hidden, "inner": inner, "capability": 87}
    given |= {"matrix": 0, "codes": "fp16", "block": 16, "gating_bits": numbers}
    given |= {"steps": [0] * 6, "number_bits": np.array([1, 0, 0, 1], "f4").view("i4").tolist()}
    x, logits = half(1, ROWS, hidden), random.standard_normal((1, ROWS, experts)).astype(np.float32)
    ids, shares = machine.run("route_rows", logits, logits, logits, logits, given=given)
    softmax = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_array_equal(ids, np.argsort(-logits, -1)[:, :, :2])
    np.testing.assert_allclose(shares, -np.sort(-softmax)[:, :, :2], atol=1e-3)
    order, begins = machine.run("group_rows", ids, given=given)
    (gated,) = machine.run("expert_gates", x, order, begins, table, given=given)
    given["matrix"] = 2
    (parts,) = machine.run("expert_downs", gated, shares, order, begins, table, given=given)
    (y,) = machine.run("sum_experts", parts, given=given)
    for row in range(ROWS):
        rows = [
            downs[at] @ np.maximum(ups[at] @ x[0, row].astype(float), 0) ** 2 for at in ids[0, row]
        ]
        np.testing.assert_allclose(y[0, row], shares[0, row] @ np.array(rows), atol=0.02)


def test_nodes_look_up_embeddings_and_compute_a_head():
    """Both of one matrix."""
    random, machine, vocab, hidden = np.random.default_rng(0), Machine(), 21, 32
    weights = random.standard_normal((vocab, hidden)).astype(np.float16)
    table = np.array([1, 1 ^ MAGIC, weights.ctypes.data, 0, 0, 0])
    given = {"matrix": 0, "vocab": vocab, "hidden": hidden, "codes": "fp16", "block": hidden}
    given["capability"] = 87
    ids = random.integers(0, vocab, (1, ROWS))
    (rows,) = machine.run("look_up_rows", ids, table, given=given)
    np.testing.assert_array_equal(rows, weights[ids])
    (logits,) = machine.run("head_rows", rows, table, given=given)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, rows.astype(float) @ weights.T.astype(float), rtol=1e-5)


def test_each_layer_keeps_its_own_attribute_in_a_plan():
    """TensorRT copies a field's address; else all layers would use the last one's KV cache."""
    trt: Any = library()
    python_plugins.register(trt, lambda *_: None)
    creator = trt.get_plugin_registry().get_creator(PLUGINS[0].name, "1", NAMESPACE)
    nodes = []
    for layer in range(32):
        text = np.frombuffer(json.dumps({**ATTRIBUTE, "layer": layer}).encode(), np.int8)
        field = trt.PluginField(GIVEN, text, trt.PluginFieldType.CHAR)
        nodes.append(creator.create_plugin(PLUGINS[0].name, [field], trt.TensorRTPhase.BUILD))
        nodes[-1] = nodes[-1].clone()
    written = [bytes(node.get_fields_to_serialize()[0].data) for node in nodes]
    assert [json.loads(text)["layer"] for text in written] == list(range(32))


@pytest.mark.parametrize("register", [python_plugins.register, lambda trt: quick(trt, None)])
def test_bindings_that_change_attributes_are_rejected(register):
    """Those of TensorRT up to 10.15 under NumPy 2, before TensorRT calls the plugins."""
    trt: Any = library(repeats=True)
    trt.__version__ = "10.13.3.9"
    with pytest.raises(EdgeLLMError, match=r"of TensorRT 10\.13\.3\.9 change attributes") as error:
        register(trt)
    assert "numpy<2" in error.value.hint


@pytest.mark.parametrize("package", ["tensorrt", "tensorrt_bindings"])
def test_the_module_plugin_is_found(monkeypatch, package):
    """Pip's TensorRT 10.9 to 10.13 has it in the bindings' package only."""
    trt = ModuleType("tensorrt")
    trt.__version__ = "10.13.3"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    monkeypatch.setitem(sys.modules, "tensorrt_bindings", ModuleType("tensorrt_bindings"))
    for name in ("tensorrt.plugin", "tensorrt_bindings.plugin"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(EdgeLLMError, match=r"has no module tensorrt\.plugin"):
        plugin_module(trt)
    expected = ModuleType("plugin")
    monkeypatch.setitem(sys.modules, f"{package}.plugin", expected)
    assert plugin_module(trt) is expected


@pytest.mark.parametrize(("version", "needs"), [("10.3.0", True), ("10.13.3", False)])
def test_build_and_runtime_register_them(monkeypatch, tmp_path, version, needs):
    def find(trt: Any) -> Any:
        return trt.get_plugin_registry().get_creator(PLUGINS[0].name, "1", NAMESPACE)

    trt = library_of(version)
    monkeypatch.setattr(tensorrt, "_require_origin", lambda *_: trt)
    monkeypatch.setattr(cuda, "open_device", no_device)
    with pytest.raises(EdgeLLMError, match="no GPU"):
        # It stops before it reads the manifest.
        tensorrt.open_engine(tmp_path, SimpleNamespace())  # type: ignore[arg-type]
    assert (find(trt) is not None) == needs
    if needs:
        register_plugins(Library(other := library_of(version), False))
        assert find(other) is not None


def no_device() -> None:
    raise EdgeLLMError("no GPU")


def library_of(version: str) -> Any:
    trt: Any = library()
    trt.__version__ = version
    return trt


class Driver:
    """`libcuda.so.1`; the functions in `refuses` fail."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.loads, self.is_capturing = refuses, 0, False
        self.contexts: list[Any] = []  # of the calling thread
        self.launched: list[tuple[Any, ...]] = []

    def _status(self, name: str) -> int:
        return 222 if name == self.refuses else 0

    def cuInit(self, _flags: int) -> int:  # noqa: N802
        return self._status("cuInit")

    def cuDeviceGet(self, _device: Any, index: int) -> int:  # noqa: N802
        return index

    def cuDevicePrimaryCtxRetain(self, context: Any, _device: Any) -> int:  # noqa: N802
        context._obj.value = 9
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:  # noqa: N802
        self.contexts.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, _context: Any) -> int:  # noqa: N802
        self.contexts.pop()
        return 0

    def cuModuleLoadData(self, _module: Any, ptx: bytes) -> int:  # noqa: N802
        assert b".entry" in ptx
        if not self.contexts:
            return 201  # CUDA_ERROR_INVALID_CONTEXT
        if self.is_capturing:
            return 900  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        self.loads += 1
        return self._status("cuModuleLoadData")

    def cuModuleGetFunction(self, function: Any, _module: Any, name: bytes) -> int:  # noqa: N802
        function._obj.value = len(name)
        return 0

    def cuLaunchKernel(self, function: Any, *given: Any) -> int:  # noqa: N802
        *sizes, stream, places, extra = given
        assert extra is None
        if len(places) != len(catalog.KERNELS["keep_rows"].signature):
            return self._status("cuLaunchKernel")
        kinds = [*catalog.KERNELS["keep_rows"].signature.values()]
        read = [
            (ctypes.c_int64 if kind[0] == "*" else ctypes.c_int32).from_address(place).value
            for kind, place in zip(kinds, places, strict=True)
        ]
        self.launched.append((function.value, sizes, stream.value, read))
        return self._status("cuLaunchKernel")


@pytest.fixture
def pretend(monkeypatch):
    def driver(refuses: str = "") -> Driver:
        found = Driver(refuses)
        library = SimpleNamespace(**{**vars(ctypes), "CDLL": lambda _: found})
        monkeypatch.setattr(driver_launch, "ctypes", library)
        return found

    return driver


def test_the_driver_launches(pretend):
    driver, kernels = pretend(), driver_launch.DriverKernels()
    compiled = prebuilt.find(catalog.keep_rows(SIZE, "int8"), 87)
    for first in (1 << 40, 5):
        kernels.load(compiled)((3, 2, 2), [first, 2, 3, 4, SIZE], STREAM)
        sizes = [3, 2, 2, compiled.threads, 1, 1, compiled.shared_bytes]
        assert driver.launched.pop() == (9, sizes, STREAM, [first, 2, 3, 4, SIZE])
    assert (driver.loads, driver.contexts) == (1, [])


@pytest.mark.parametrize("prepare", ["configured for a build", "attached to a context"])
def test_kernels_are_loaded_before_a_graph_is_recorded(pretend, prepare):
    """TensorRT 10 may time plugins inside a capture; a driver then loads no module."""
    driver, trt = pretend(), library_of("10.3.0")
    python_plugins.register(trt)
    for plugin in PLUGINS:
        creator = trt.get_plugin_registry().get_creator(plugin.name, "1", NAMESPACE)
        text = np.frombuffer(json.dumps(ATTRIBUTE).encode(), np.int8)
        field = trt.PluginField(GIVEN, text, trt.PluginFieldType.CHAR)
        node = creator.create_plugin(plugin.name, [field], trt.TensorRTPhase.BUILD)
        if prepare == "configured for a build":
            node.configure_plugin([], [])
            node = node.clone()
        else:
            node = node.attach_to_context(None)
        loads, driver.is_capturing = driver.loads, True
        described = [SimpleNamespace(dims=(1, ROWS, 1)) for _ in plugin.inputs]
        node.enqueue(described, [], [1] * len(described), [1] * node.num_outputs, 0, STREAM)
        driver.is_capturing = False
        assert loads == driver.loads > 0
    assert driver.contexts == []


@pytest.mark.parametrize("name", ["cuInit", "cuModuleLoadData", "cuLaunchKernel"])
def test_driver_errors_are_reported(pretend, name):
    driver = pretend(name)
    compiled = prebuilt.find(catalog.keep_rows(SIZE, "int8"), 87)
    with pytest.raises(EdgeLLMError, match=f"refuses the kernel keep_rows: {name} gives 222"):
        driver_launch.DriverKernels().load(compiled)((3, 2, 2), [1, 2, 3, 4, SIZE], STREAM)
    assert driver.contexts == []

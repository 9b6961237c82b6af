"""Routing of experts on GPUs: against transformers' routers, and the body of the ONNX function."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from interpreted import by_reference, launch
from model_configs import GEMMA4_EXPERTS
from tensorrt_bundles import two_layer_bundle

from edgellm.build.lowering.function_calls import EXPERT_CALLS, find_calls
from edgellm.build.lowering.graph import GraphEditor
from edgellm.build.lowering.weights import constant_array
from edgellm.build.tensorrt.lowering.kernel_routing import lower_routing
from edgellm.core.onnx_functions import FUNCTIONS, RoutingForm
from edgellm.device_runtime.kernels.triton import routing as kernels
from edgellm.device_runtime.runners.tensorrt.library.attention_nodes import GIVEN
from edgellm.device_runtime.runners.tensorrt.library.expert_nodes import ROUTE_ROWS
from edgellm.device_runtime.runners.tensorrt.library.kernel_nodes import PLUGINS
from edgellm.export import models
from edgellm.export.onnx.functions.experts import routing

PLUGIN = {plugin.name: plugin for plugin in PLUGINS}
NUMBERS = SimpleNamespace(max=max, min=min, cdiv=lambda a, b: -(-a // b))
EXPERTS, ROWS = 70, 9
# Layers of TensorRT that route a row without the kernel.
LAYERS = {
    "qwen3_moe": 6,
    "qwen2_moe": 4,
    "mixtral": 6,
    "olmoe": 4,
    "granitemoe": 6,
    "gpt_oss": 7,
    "ernie4_5_moe": 8,
    "lfm2_moe": 8,
    "nemotron_h": 8,
    "kimi_linear": 9,
    "laguna": 10,
    "gemma4_text": 8,
}
OF_TYPE: dict[str, dict[str, Any]] = {
    "gemma4_text": {key: each for key, each in GEMMA4_EXPERTS.items() if key != "model_type"},
    "laguna": {"moe_routed_scaling_factor": 1.0},  # not of transformers' router
    "nemotron_h": {"layers_block_type": models.find("nemotron_h").TINY["layers_block_type"][2::-1]},
}


def route(
    how: Callable[..., None], node: ir.Node, logits: np.ndarray, operands: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Launch the kernel of a node as its plugin does: ids and shares."""
    plugin, facts = PLUGIN[ROUTE_ROWS], json.loads(node.attributes[GIVEN].as_string())
    shapes = dict.fromkeys(plugin.inputs, (1, *logits.shape))
    outputs = [np.full(shape, 7, kind) for kind, shape in plugin.outputs(NUMBERS, shapes, facts)]
    launched = plugin.launch(NUMBERS, shapes, facts)
    constants = launched.variant.constants
    arrays = [np.ascontiguousarray(each, np.float32) for each in (logits, *operands)]
    how(kernels.route_rows, launched.grid, *arrays, *launched.sizes, *outputs, **constants)
    return outputs[0][0], outputs[1][0]


def operands_of(node: ir.Node, logits: np.ndarray) -> list[np.ndarray]:
    """Stored operands of a node; the logits in place of those that it has not."""
    found = [constant_array(value) for value in node.inputs[1:] if value is not None]
    return [logits if each is None else each.reshape(-1) for each in found]


def expected_routing(
    checkpoint: Path, vocab_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits, ids and shares of the first router of transformers' model, with seeded tokens."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from edgellm.export.pipeline.causal_lm import register_causal_lms

    register_causal_lms()
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    router = next(m for m in model.modules() if type(m).__name__.lower().endswith("router"))
    seen: list[Any] = []
    router.register_forward_hook(lambda _, given, found: seen.append((given[0], found)))
    if hasattr(router, "proj"):  # Gemma 4 normalizes its input
        router.proj.register_forward_hook(lambda *given: seen.append(given[-1]))
    tokens = torch.from_numpy(np.random.default_rng(1).integers(3, vocab_size, (1, ROWS)))
    with torch.no_grad():
        model(tokens)
        if hasattr(router, "proj"):
            logits, (_, (_, shares, ids)) = seen[:2]
        else:
            rows, (_, shares, ids) = seen[0]
            logits = torch.nn.functional.linear(rows.reshape(ROWS, -1), router.weight)
    return tuple(each.reshape(ROWS, -1).numpy() for each in (logits, ids, shares))


def by_expert(ids: np.ndarray, shares: np.ndarray, experts: int) -> np.ndarray:
    """Shares [rows, experts]; 0 of those that a row did not choose."""
    found = np.zeros((len(ids), experts), np.float32)
    np.put_along_axis(found, ids, shares.astype(np.float32), -1)
    return found


@pytest.mark.each_change("gpt_oss", "ernie4_5_moe", "laguna")
@pytest.mark.parametrize("model_type", LAYERS)
def test_the_kernel_routes_as_transformers(model_type, tmp_path):
    """One node a layer for each family, in the place of TensorRT's layers."""
    bundle = two_layer_bundle(tmp_path, model_type, **OF_TYPE.get(model_type, {}))
    model = ir.load(bundle / "model.onnx")
    calls = [node for node in model.graph if RoutingForm.of(node.op_type)]
    assert len(calls) == len(find_calls(model.graph, *EXPERT_CALLS)) > 0
    body = model.functions[calls[0].op_identifier()]
    assert sum(node.op_type != "Constant" for node in body) == LAYERS[model_type]
    lower_routing(GraphEditor(model.graph), 110)
    nodes = [node for node in model.graph if node.op_type == ROUTE_ROWS]
    assert len(nodes) == len(calls)
    assert not any(RoutingForm.of(node.op_type) for node in model.graph)
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    logits, ids, shares = expected_routing(tmp_path / "checkpoint", config["vocab_size"])
    expected = by_expert(ids, shares, 6)
    for how in (launch, by_reference):
        found = route(how, nodes[0], logits, operands_of(nodes[0], logits))
        np.testing.assert_allclose(by_expert(*found, 6), expected, rtol=3e-3, atol=1e-3)


class Call:
    """A call of a function of routing, as ONNX Runtime computes its body, and as a node."""

    def __init__(
        self, form: RoutingForm, top_k: int = 6, experts: int = EXPERTS, to: int = 10
    ) -> None:
        random = np.random.default_rng(len(form.function))
        logits = ir.val("logits", ir.DataType.FLOAT, [1, "rows", experts])
        graph = ir.Graph([logits], [], nodes=[], opset_imports={"": 24, FUNCTIONS: 1})
        self.operands = {
            "offsets": random.standard_normal(experts).astype(np.float32),
            "bias": random.standard_normal(experts).astype(np.float32),
            "factors": random.uniform(0.5, 2, experts).astype(np.float16 if to == 10 else "f4"),
        }
        tensors = {"count": np.array([top_k])} | {n: self.operands[n] for n in form.operands}
        values = []
        for name, array in tensors.items():
            tensor = ir.tensor(array, name=name)
            value = ir.Value(
                name=name,
                type=ir.TensorType(tensor.dtype),
                shape=ir.Shape(array.shape),
                const_value=tensor,
            )
            graph.register_initializer(value)
            values.append(value)
        numbers = {"cap": 1.5, "smallest_sum": 0.9, "added": 0.25, "scale": 2.5}
        attributes = {name: numbers[name] for name in form.numbers}
        attributes |= {"experts": experts, "top_k": top_k, **({"to": to} if form.cast else {})}
        named = ir.convenience.convert_attributes(attributes)
        node = ir.Node(FUNCTIONS, form.function, [logits, *values], named, num_outputs=2)
        for name, value in zip(("ids", "shares"), node.outputs, strict=True):
            value.name = name
        kinds = ir.DataType.INT64, ir.DataType(to) if form.cast else ir.DataType.FLOAT
        for value, kind in zip(node.outputs, kinds, strict=True):
            value.type = ir.TensorType(kind)
        graph.append(node)
        graph.outputs.extend(node.outputs)
        self.model = ir.Model(graph, ir_version=11, functions=[routing(form)])

    def expected(self, folder: Path, logits: np.ndarray) -> list[np.ndarray]:
        ir.save(self.model, folder / "body.onnx")
        session = onnxruntime.InferenceSession(folder / "body.onnx")
        return [each[0] for each in session.run(["ids", "shares"], {"logits": logits[None]})]

    def node(self) -> ir.Node | None:
        """The node of the lowered graph; None: the function stays."""
        lower_routing(GraphEditor(self.model.graph), 110)
        return next((node for node in self.model.graph if node.op_type == ROUTE_ROWS), None)


ALL = dict.fromkeys(RoutingForm.__slots__, True)
FORMS = {
    "softmax": RoutingForm(cast=True),
    "normalized": RoutingForm(normalized=True, cast=True),
    "sigmoid": RoutingForm(sigmoid=True, biased=True, normalized=True, padded=True, cast=True),
    "softmax, every step": RoutingForm(**{**ALL, "sigmoid": False}),
    "sigmoid, every step": RoutingForm(**ALL),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_step_equals_the_body_of_the_function(form, tmp_path):
    """Also of equal experts, and of logits at which all shares are 0 or 1."""
    call = Call(form)
    logits = np.random.default_rng(0).standard_normal((ROWS, EXPERTS)).astype(np.float32) * 3
    logits[1] = 0
    logits[2] = np.arange(EXPERTS) % 5
    logits[3] = np.where(np.arange(EXPERTS) % 3, -40, 40)
    logits[4, 7:] = -np.inf
    ids, shares = call.expected(tmp_path, logits)
    node = call.node()
    assert node is not None
    names = "offsets", "bias", "factors"
    operands = [call.operands[name] if name in form.operands else logits for name in names]
    for how in (launch, by_reference):
        found = route(how, node, logits, operands)
        np.testing.assert_array_equal(found[0], ids)
        np.testing.assert_allclose(
            found[1].astype(np.float32), shares.astype(np.float32), rtol=2e-3, atol=1e-6
        )


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_row_of_nans_chooses_different_experts():
    """TensorRT times plugins on random inputs, and ids are indices for the nodes after this."""
    node = Call(FORMS["sigmoid"]).node()
    assert node is not None
    logits = np.full((2, EXPERTS), np.nan, np.float32)
    ids, _ = route(launch, node, logits, [logits] * 3)
    for row in ids:
        assert len({*row.tolist()}) == 6
        assert row.min() >= 0
        assert row.max() < EXPERTS


def test_what_the_kernel_does_not_support_stays_a_function():
    form = FORMS["normalized"]
    for case in (Call(form, experts=513), Call(form, top_k=33), Call(form, to=1)):
        assert case.node() is None
        assert case.model.graph[0].op_type == form.function
    assert Call(RoutingForm(normalized=True)).node() is None
    assert Call(form, experts=512, top_k=32).node() is not None


def test_names_of_functions_have_their_steps():
    for form in FORMS.values():
        assert RoutingForm.of(form.function) == form
    assert RoutingForm.of("RoutingGroupedNormalized") is None
    assert RoutingForm.of("Router") is None

"""Engines that compute lowered graphs with torch, in TensorRT's place on a GPU.

On a GPU all else is real: edgellm's device with its stream, memory, CUDA graphs, and its compiled
kernels for its own nodes. On the CPU the fake GPU takes their place, so that tests compare this
engine with ONNX Runtime.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import fake_backend
import numpy as np
import onnx_ir as ir
import torch
from fake_gpu import FakeContext, FakeDevice, FakeEngine, GpuMisuseError
from kernel_references import REFERENCES
from numpy.typing import NDArray
from torch import Tensor
from torch_ops import OPERATORS, Call, tensor_of

from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.gpu import compute_capability
from edgellm.device_runtime.kernels.triton.catalog import variants
from edgellm.device_runtime.runners.tensorrt.cuda.protocols import ALIGNMENT
from edgellm.device_runtime.runners.tensorrt.library.attention_nodes import GIVEN, NAMESPACE, Launch
from edgellm.device_runtime.runners.tensorrt.library.kernel_nodes import PLUGINS

_CPU, _GPU = torch.device("cpu"), torch.device("cuda:0")
CPU_SM = 90  # whose kernels the fake GPU has, as the GPU that this engine is for
_NUMBERS = SimpleNamespace(max=max, min=min, cdiv=lambda a, b: -(-a // b))
_PLUGINS = {plugin.name: plugin for plugin in PLUGINS}
_TYPES = {
    ir.DataType.FLOAT16: "float16",
    ir.DataType.FLOAT: "float",
    ir.DataType.INT64: "int64",
    ir.DataType.BOOL: "bool",
}
_POINTERS = {  # types that a kernel's argument may have
    "*fp16": {torch.float16},
    "*fp32": {torch.float32},
    "*i64": {torch.int64},
    "*i32": {torch.int32},
    "*i8": {torch.int8, torch.bool},
}
_PROBES = 64, 128  # sizes of inputs
Values = dict[str, Tensor]


class NodeError(Exception):
    """A node that could not be computed; says which, with the types of its inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """A node of a graph."""

    name: str
    operator: str
    is_kernel: bool
    inputs: tuple[str, ...]  # "": left out
    outputs: tuple[str, ...]
    attributes: dict[str, Any] = field(repr=False)

    @classmethod
    def of(cls, node: ir.Node) -> _Node:
        return cls(
            name=str(node.name),
            operator=node.op_type,
            is_kernel=node.domain == NAMESPACE,
            inputs=tuple("" if value is None else str(value.name) for value in node.inputs),
            outputs=tuple(str(value.name) for value in node.outputs),
            attributes={name: each.value for name, each in node.attributes.items()},
        )


class _Launcher(Protocol):
    """What runs a kernel of edgellm's."""

    def __call__(self, launch: Launch, inputs: list[Tensor], outputs: list[Tensor]) -> None: ...


def _skip(launch: Launch, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """Launch nothing, where a caller asks for shapes only."""


class TorchSession:
    """A lowered graph, with the interface of an ONNX Runtime session.

    Constants, and what follows from them alone, are computed once on the CPU.
    """

    def __init__(self, path: Path, launcher: _Launcher, place: torch.device) -> None:
        """Read the graph; `place` is where it computes."""
        graph = ir.load(path).graph
        self._launcher, self._place = launcher, place
        self._hosts: Values = {
            name: tensor_of(value.const_value)
            for name, value in graph.initializers.items()
            if value.const_value is not None
        }
        self.inputs, self.outputs = (
            [_described(value) for value in values] for values in (graph.inputs, graph.outputs)
        )
        self._nodes: list[_Node] = []
        for node in map(_Node.of, graph):
            if not node.is_kernel and all(each in self._hosts for each in node.inputs if each):
                self._hosts |= self._run(node, self._hosts, self._hosts)
            else:
                self._nodes.append(node)
        used = {name for node in self._nodes for name in node.inputs}
        used |= {each.name for each in self.outputs}
        self._constants = {
            name: each.to(place) for name, each in self._hosts.items() if name in used
        }
        self._fix_sizes()

    def _fix_sizes(self) -> None:
        """Give outputs the sizes that no size of an input changes, such as k of TopK."""
        known = {dim for each in self.inputs for dim in each.shape}
        for output in self.outputs:
            if all(isinstance(dim, int) or dim in known for dim in output.shape):
                continue
            found = [self._shape_at(output.name, size) for size in _PROBES]
            output.shape = [
                sizes[0] if len(set(sizes)) == 1 else dim
                for dim, *sizes in zip(output.shape, *found, strict=True)
            ]

    def _shape_at(self, name: str, size: int) -> Sequence[int]:
        """An output's shape if all sizes that vary are `size`; those that then fit nothing vary."""
        shapes = {
            each.name: [dim if isinstance(dim, int) else size for dim in each.shape]
            for each in self.inputs
        }
        try:
            return self.shape_of(name, shapes)
        except NodeError:
            return [-size for _ in next(each for each in self.outputs if each.name == name).shape]

    def get_inputs(self) -> list[Any]:
        return self.inputs

    def get_outputs(self) -> list[Any]:
        return self.outputs

    def run(self, names: Sequence[str], feeds: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Outputs for arrays of the host."""
        given = {name: torch.from_numpy(each).to(self._place) for name, each in feeds.items()}
        found = self.compute(given)
        return [found[name].cpu().numpy() for name in names]

    def compute(self, feeds: Values) -> Values:
        """Outputs by name; on a GPU nothing waits for it."""
        return self._compute({**self._constants, **feeds}, self._launcher)

    def shape_of(self, name: str, shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
        """The shape of an output, if inputs have these; nothing is computed."""
        meta = torch.device("meta")
        given = {name: each.to(meta) for name, each in self._constants.items()}
        for each in self.inputs:
            dtype = getattr(torch, each.type[7:-1])
            given[each.name] = torch.empty(tuple(shapes[each.name]), dtype=dtype, device=meta)
        return tuple(self._compute(given, _skip)[name].shape)

    def _compute(self, values: Values, launcher: _Launcher) -> Values:
        hosts = dict(self._hosts)
        for node in self._nodes:
            if node.is_kernel:
                values |= self._launch(node, values, launcher)
                continue
            is_known = all(name in hosts for name in node.inputs if name)
            found = self._run(node, hosts if is_known else values, hosts)
            if is_known or node.operator == "Shape":
                hosts |= found
            values |= found
        return {each.name: values[each.name] for each in self.outputs}

    def _run(self, node: _Node, values: Values, hosts: Values) -> Values:
        """Compute a node; raises `NodeError`."""
        given = [values[name] if name else None for name in node.inputs]
        try:
            call = Call(
                operator=node.operator,
                attributes=node.attributes,
                inputs=given,
                hosts=[hosts.get(name) for name in node.inputs],
                num_outputs=len(node.outputs),
            )
            found = OPERATORS[node.operator](call)
        except Exception as error:  # whatever torch raises; the node is named
            why = f"{type(error).__name__}: {error}"
            raise NodeError(f"{_shown(node, given)}: {why}") from error
        many = found if isinstance(found, tuple) else (found,)
        return {name: each for name, each in zip(node.outputs, many, strict=True) if name}

    def _launch(self, node: _Node, values: Values, launcher: _Launcher) -> Values:
        """Launch edgellm's kernel as its plugin would; raises `NodeError`."""
        inputs = [values[name] for name in node.inputs]
        try:
            plugin, given = _PLUGINS[node.operator], json.loads(node.attributes[GIVEN])
            shapes = {
                name: tuple(each.shape) for name, each in zip(plugin.inputs, inputs, strict=True)
            }
            launch = plugin.launch(_NUMBERS, shapes, given)
            outputs = [
                _unwritten(dtype, shape, inputs[0].device)
                for dtype, shape in plugin.outputs(_NUMBERS, shapes, given)
            ]
            _require_types(launch, [*inputs, *outputs])
            launcher(launch, inputs, outputs)
        except Exception as error:  # whatever torch raises; the node is named
            why = f"{type(error).__name__}: {error}"
            raise NodeError(f"{_shown(node, inputs)}: {why}") from error
        return dict(zip(node.outputs, outputs, strict=True))


def _described(value: ir.Value) -> Any:
    """An input or output as ONNX Runtime describes it."""
    assert value.dtype is not None
    assert value.shape is not None
    dims = [each if isinstance(each, int) else str(each.value) for each in value.shape]
    return SimpleNamespace(name=value.name, type=f"tensor({_TYPES[value.dtype]})", shape=dims)


def _shown(node: _Node, given: Sequence[Tensor | None]) -> str:
    types = ", ".join("-" if x is None else f"{x.dtype} {list(x.shape)}" for x in given)
    return f"node {node.name} ({node.operator}) of {types}"


def _unwritten(dtype: str, shape: Sequence[int], place: torch.device) -> Tensor:
    """Memory for a kernel; what it leaves unwritten shows in all that follows."""
    value = float("nan") if dtype.startswith("float") else -1
    return torch.full(tuple(shape), value, dtype=getattr(torch, dtype), device=place)


def _require_types(launch: Launch, arrays: Sequence[Tensor]) -> None:
    kinds = [each for each in launch.variant.kernel.signature.values() if each.startswith("*")]
    for at, (kind, each) in enumerate(zip(kinds, arrays, strict=True)):
        if each.dtype not in _POINTERS[kind]:
            raise TypeError(f"array {at} of {launch.variant.name} is {each.dtype}, not {kind}")


# ----------------------------------------------------------------------------- the CPU's side
class OnCpu:
    """Kernels by their references in NumPy, with the memory of the fake GPU."""

    def __init__(self, device: FakeDevice) -> None:
        self._memory, self._compiled = device.memory, {each.name for each in variants(device.sm)}

    def __call__(self, launch: Launch, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        if launch.variant.name not in self._compiled:
            raise EdgeLLMError(f"no kernel {launch.variant.name} was compiled for this GPU")
        flat = [each.contiguous().reshape(-1).numpy() for each in (*inputs, *outputs)]
        constants = {**launch.variant.constants, "grid": launch.grid}
        REFERENCES[launch.variant.kernel.name](
            *flat[: len(inputs)],
            *launch.sizes,
            *flat[len(inputs) :],
            constants={**constants, "memory": self._memory},
        )


# ----------------------------------------------------------------------------- the GPU's side
@dataclass(frozen=True, slots=True)
class _OnGpu:
    """Edgellm's compiled kernels."""

    device: TorchDevice

    def __call__(self, launch: Launch, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        given = [_aligned(each) for each in inputs]
        addresses, written = ([each.data_ptr() for each in some] for some in (given, outputs))
        arguments = [*addresses, *map(int, launch.sizes), *written]
        self.device.launch(launch.variant, launch.grid, arguments)


def _aligned(x: Tensor) -> Tensor:
    """Contiguous and aligned, as TensorRT's tensors are."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


class TorchDevice:
    """Edgellm's device of a real GPU, on whose stream torch computes; counts CUDA graphs."""

    def __init__(self, device: Any) -> None:
        """`device`: of `driver.open_device`."""
        self._device = device
        self.is_capturing = False
        self.contexts = self.captures = self.refusals = self.launches = self.passes = 0
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_tf32 = False
        with device.current():
            torch.cuda.init()
            self._stream = torch.cuda.ExternalStream(device.stream, device=_GPU)
            # The memory of passes, which share it as they share TensorRT's scratch memory: a
            # replay overwrites nothing that outlives a pass.
            self._pool = torch.cuda.MemPool()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Torch computes on edgellm's stream."""
        with self._device.current(), torch.cuda.stream(self._stream), torch.no_grad():
            yield

    def ask_pass(self, work: Callable[[], None]) -> None:
        """Enqueue a pass."""
        self.passes += 1
        with self.computing(), torch.cuda.use_mem_pool(self._pool):
            work()

    def capture(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """See `device.Device`."""

        def recorded() -> None:
            self.is_capturing = True
            try:
                enqueue()
            finally:
                self.is_capturing = False

        replay = self._device.capture(recorded)
        if replay is recorded:
            self.refusals += 1
            return enqueue
        self.captures += 1

        def counted() -> None:
            self.launches += 1
            replay()

        return counted


@dataclass(frozen=True, slots=True)
class _Memory:
    """Device memory at an address, as torch takes it."""

    __cuda_array_interface__: dict[str, Any]


def _view(address: int, shape: Sequence[int], dtype: np.dtype) -> Tensor:
    """Numbers at an address of the GPU."""
    described = {
        "shape": tuple(shape),
        "typestr": dtype.str,
        "data": (address, False),
        "strides": None,
        "version": 3,
    }
    return torch.as_tensor(_Memory(described), device=_GPU)


class TorchContext(FakeContext):
    """See `device.Context`; the rules of shapes, addresses and graphs are the fake GPU's."""

    _engine: TorchEngine

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # The driver is asked about an address the first time only: never in a capture.
        self._views: dict[tuple[int, tuple[int, ...], str], Tensor] = {}

    def output_shape(self, name: str) -> tuple[int, ...]:
        shapes = {key: self._shape(key) for key, _ in self._tensors(is_input=True)}
        return self._engine.session.shape_of(name, shapes)

    def _compute(self, shapes: Mapping[str, tuple[int, ...]], addresses: Mapping[str, int]) -> None:
        if isinstance(self._device, FakeDevice):
            super()._compute(shapes, addresses)
            return
        feeds = {name: self._at(name, addresses[name], shape) for name, shape in shapes.items()}
        for name, found in self._engine.session.compute(feeds).items():
            target = self._at(name, addresses[name], tuple(found.shape))
            if target.dtype != found.dtype:
                raise GpuMisuseError(f"{name} is {found.dtype}, not {target.dtype}")
            target.copy_(found)

    def _at(self, name: str, address: int, shape: tuple[int, ...]) -> Tensor:
        """A tensor of the engine."""
        dtype = self._engine.tensors[name].dtype
        key = address, shape, dtype.str
        if key not in self._views:
            if 0 in shape:
                kind = getattr(torch, dtype.name)
                self._views[key] = torch.empty(shape, dtype=kind, device=_GPU)
            else:
                self._views[key] = _view(address, shape, dtype)
        return self._views[key]


class TorchEngine(FakeEngine):
    """See `device.CompiledEngine`: a lowered graph in torch."""

    session: TorchSession

    def _open(self, graph: Path, device: Any) -> TorchSession:
        if isinstance(device, FakeDevice):
            return TorchSession(graph, OnCpu(device), _CPU)
        with device.computing():
            return TorchSession(graph, _OnGpu(device), _GPU)

    def _context(self, profile: int, scratch: int) -> FakeContext:
        return TorchContext(self, self._device, profile, scratch)


def install(*, on_cpu: bool) -> Any:
    """Let TensorRT's backend lower for a GPU, and torch run its graphs there, in this process.

    Args:
        on_cpu: on the fake GPU.

    Returns:
        The device, which counts `captures`, `launches` and `passes`.

    Raises:
        EdgeLLMError: there is no GPU, or torch does not run on it.
    """
    if on_cpu:
        device: Any = FakeDevice(4 << 30, CPU_SM)
        fake_backend.install_engines(device, CPU_SM, TorchEngine)
        return device
    from edgellm.device_runtime.runners.tensorrt.cuda.driver import open_device

    if why := lack():
        raise EdgeLLMError(why, hint="give --dry for a run on the CPU")
    device, sm = TorchDevice(open_device()), compute_capability()
    assert sm is not None
    fake_backend.install_engines(device, sm, TorchEngine)
    return device


def lack() -> str:
    """Why torch computes no engines here; "": it does."""
    if compute_capability() is None:
        return "there is no NVIDIA GPU here"
    return "" if torch.cuda.is_available() else "this torch does not run on the GPU"

"""Kernels of a TensorRT engine from its inspector; needs a GPU that can load it.

The inspector prints layers as JSON: in newer versions with `Datatype` and `Format` of each tensor
and `Constants`, in older ones with `Format/Datatype`, a sentence, and `Weights`.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgellm.build.tensorrt.kernel_log import (
    NODE,
    NOT_KERNELS,
    PART,
    PROFILE,
    Kernel,
    Tensor,
    passes_of_parts,
)
from edgellm.core.errors import EdgeLLMError
from edgellm.device_runtime.runners.tensorrt.library.log import LibraryLog

_TYPES = {  # words of the sentences, in search order
    "FP4": "FP4E2M1",
    "FP8": "FP8",
    "BF16": "BFloat16",
    "BFloat16": "BFloat16",
    "FP16": "Half",
    "Half": "Half",
    "FP32": "Float",
    "Float": "Float",
    "Int4": "Int4",
    "Int8": "Int8",
    "Int32": "Int32",
    "Int64": "Int64",
    "Bool": "Bool",
}


def inspect_engine(trt: Any, path: Path) -> tuple[Kernel, ...]:
    """Load a plan onto this machine's GPU, and read its inspector's output.

    Args:
        trt: the module that compiled it, with detailed verbosity.
        path: the plan.

    Raises:
        EdgeLLMError: it cannot be loaded, or the inspector prints names only.
    """
    log = LibraryLog(trt)
    with (
        path.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as plan,
    ):
        runtime = trt.Runtime(log.logger)
        engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        words = " ".join(log.errors[0].split()) if log.errors else "it does not say why"
        raise EdgeLLMError(
            f"TensorRT {trt.__version__} cannot load the engine to list its layers: {words}",
            hint="close other programs that use the GPU, or leave out --layerReport",
        )
    inspector = engine.create_engine_inspector()
    kernels = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    del inspector, engine  # before the runtime, which they belong to
    return read_layers(kernels)


def read_layers(text: str) -> tuple[Kernel, ...]:
    """The kernels in an inspector's JSON, without those that compute shapes.

    Raises:
        EdgeLLMError: it has another form, or names only.
    """
    try:
        layers = json.loads(text)["Layers"]
        lines = [json.dumps(layer) for layer in layers]
        passes = passes_of_parts(lines)
        found = [_kernel(*each, passes) for each in zip(layers, lines, strict=True)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EdgeLLMError(
            f"TensorRT's inspector does not list the layers of the engine: {error!r}"[:300],
            hint="leave out --layerReport, and report it with edgellm-doctor's output",
        ) from None
    return tuple(each for each in found if each.kind not in NOT_KERNELS)


def _kernel(layer: Mapping[str, Any], line: str, passes: Mapping[str, int]) -> Kernel:
    part, profile = PART.search(line), PROFILE.search(line)
    index = passes[part[1]] if part else int(profile[1]) if profile else 0
    constants = _tensors(layer.get("Constants", ()))
    if not constants and "Weights" in layer:
        constants = _weights(layer["Weights"], layer["Outputs"])
    return Kernel(
        pass_index=index,
        name=layer["Name"],
        kind=layer["LayerType"],
        inputs=_tensors(layer["Inputs"]),
        constants=constants,
        outputs=_tensors(layer["Outputs"]),
        nodes=tuple(NODE.findall(layer.get("Metadata") or "")),
        tactic=layer.get("TacticName") or "",
    )


def _tensors(listed: Sequence[Mapping[str, Any]]) -> tuple[Tensor, ...]:
    return tuple(Tensor(each["Name"], tuple(each["Dimensions"]), _dtype(each)) for each in listed)


def _dtype(tensor: Mapping[str, Any]) -> str:
    """The type in the notation of newer versions."""
    said = tensor.get("Datatype") or tensor["Format/Datatype"]
    return next((_TYPES[word] for word in _TYPES if re.search(word, said, re.IGNORECASE)), said)


def _weights(
    weights: Mapping[str, Any], outputs: Sequence[Mapping[str, Any]]
) -> tuple[Tensor, ...]:
    """Weights of a layer with known type and count; columns are those of the output."""
    columns = max(int(outputs[0]["Dimensions"][-1]), 1)
    count = int(weights["Count"])
    return (Tensor("weights", (count // columns, columns), _dtype({"Datatype": weights["Type"]})),)

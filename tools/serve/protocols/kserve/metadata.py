"""Metadata of the server and its models, in KServe's and Triton's form."""

from __future__ import annotations

from typing import Any

from edgellm.tools.serve.protocols.kserve.tensors import DATATYPES, INPUTS, OUTPUTS

VERSION = "1"
PLATFORM = "edgellm"
EXTENSIONS = ("binary_tensor_data", "generate", "model_configuration")


def server(version: str) -> dict[str, Any]:
    """Metadata of the server."""
    return {"name": PLATFORM, "version": version, "extensions": list(EXTENSIONS)}


def model(name: str) -> dict[str, Any]:
    """Metadata of a model: its tensors."""
    return {
        "name": name,
        "versions": [VERSION],
        "platform": PLATFORM,
        "inputs": [_tensor(name, datatype) for name, datatype in INPUTS.items()],
        "outputs": [_tensor(name, datatype) for name, datatype in OUTPUTS.items()],
    }


def _tensor(name: str, datatype: str) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [1]}


def config(name: str) -> dict[str, Any]:
    """Triton's configuration of a model; data types are enum numbers."""
    return {
        "name": name, "platform": PLATFORM, "backend": PLATFORM, "max_batch_size": 0,
        "input": [
            {"name": one, "data_type": DATATYPES[datatype][0], "dims": [1],
             **({} if one == "text_input" else {"optional": True})}
            for one, datatype in INPUTS.items()
        ],
        "output": [
            {"name": one, "data_type": DATATYPES[datatype][0], "dims": [1]}
            for one, datatype in OUTPUTS.items()
        ],
        "model_transaction_policy": {"decoupled": True},
    }  # fmt: skip


def config_in_words(name: str) -> dict[str, Any]:
    """Triton's configuration with names of data types, for HTTP."""
    found = config(name)
    names = {
        number: "TYPE_STRING" if word == "BYTES" else f"TYPE_{word}"
        for word, (number, _) in DATATYPES.items()
    }
    for tensor in (*found["input"], *found["output"]):
        tensor["data_type"] = names[tensor["data_type"]]
    return found

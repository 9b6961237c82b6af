"""Check of a checkpoint's quantization config against its tensors, which take precedence."""

from __future__ import annotations

import json
from collections.abc import Iterable

from edgellm.core.errors import UnsupportedModelError
from edgellm.export.checkpoints.checkpoint import Checkpoint

KEY = "quantization_config"
# The locations of compressed-tensors 0.20 whose transforms are not stored in the weights.
_ONLINE = "input", "output", "k_cache", "q_attn"
# The layouts (`export.checkpoints.quantized`) that each maker writes, by `quant_method`.
_LAYOUTS = {
    "auto-round": {"awq", "compressed_tensors", "gptq", "microscaling", "modelopt"},
    "intel/auto-round": {
        "awq",
        "compressed_tensors",
        "gptq",
        "microscaling",
        "modelopt",
    },  # its first releases
    "awq": {"awq"},
    "compressed-tensors": {"block_fp8", "compressed_tensors", "microscaling", "modelopt"},
    "fbgemm_fp8": {"modelopt"},
    "fp8": {"block_fp8", "modelopt"},
    "gptq": {"gptq"},
    "modelopt": {"block_fp8", "microscaling", "modelopt"},
    "mxfp4": {"mxfp4"},
}


def judge(
    checkpoint: Checkpoint, layouts: Iterable[str], ignored: tuple[str, ...] = ()
) -> tuple[str, dict[str, str]]:
    """Quantization of the exported weights, and contradictions for the provenance.

    Args:
        checkpoint: with the config.
        layouts: of its exported layers that are quantized.
        ignored: config keys that the user ignores; `KEY` relies on the tensors.

    Raises:
        UnsupportedModelError: the tensors contradict the config, or an untested quantization
            method.
    """
    found, said = sorted(layouts), checkpoint.quantization
    if said == "none" or KEY in ignored:
        return ", ".join(found) or "none", {}
    _reject_transforms(checkpoint)
    if not found:
        return "none", {KEY: f"{said}, but all exported weights are floats"}
    config = checkpoint.quant_config
    maker = "modelopt" if config.get("quant_algo") else said.lower()
    if not set(found) <= _LAYOUTS.get(maker, set()):
        raise UnsupportedModelError(
            f"{checkpoint.label}: config.json says {said}, but weights are stored in the layout "
            f"{', '.join(found)}",
            hint=f"methods that were checked: {', '.join(_LAYOUTS)}; if the tensors are what they "
            f"look like: --ignore_config_keys {KEY}",
        )
    return said, {}


def _reject_transforms(checkpoint: Checkpoint) -> None:
    """Transforms of weights are stored in them; those of activations are left to the runtime."""
    config = checkpoint.quant_config.get("transform_config") or {}
    text = json.dumps(config)
    if any(f'"location": "{place}"' in text for place in _ONLINE):
        raise UnsupportedModelError(
            f"{checkpoint.label}: transform_config rotates activations at run time, which is not "
            "supported",
            hint="quantize it without online rotations (SpinQuant R3, R4; QuIP)",
        )


def contradiction(provenance: dict[str, str]) -> str:
    """A sentence on what `judge` found, "" where nothing contradicts."""
    return f"config.json says {provenance[KEY]}" if KEY in provenance else ""

"""Folds smoothing scales into the weights before them, for formats without `pre_quant_scale`.

compressed-tensors is such a format. The factors of a layer's inputs are folded into the norm, or
into the output channels of the linear layer, before it. Query heads with one value head share a
factor. Factors that cannot be folded are dropped. Only layers whose factors change are quantized
again.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgellm.export.checkpoints.checkpoint import TensorInfo
from edgellm.quantize.formats.modelopt import F32, SMOOTHING, pack_int4
from edgellm.quantize.formats.tensors import Tensor
from edgellm.quantize.models.families import Family

# Linear layers before a gated product; in fused weights, the rows after the gate's
_UP = {
    "mlp.down_proj": ("mlp.up_proj", "mlp.gate_up_proj"),
    "shared_mlp.output_linear": ("shared_mlp.input_linear",),
}
_GATES = {"mlp.up_proj": "mlp.gate_proj"}  # without a gate the activation is in between
_O_PROJ, _V_PROJ, _QKV_PROJ = "self_attn.o_proj", "self_attn.v_proj", "self_attn.qkv_proj"


def fold_smoothing(
    tensors: Mapping[str, Tensor], source: Mapping[str, F32], family: Family, head_dim: int
) -> dict[str, Tensor]:
    """Fold or drop all `pre_quant_scale` of a layer in ModelOpt's layout.

    Args:
        tensors: of the layer, such as "self_attn.q_proj.weight"; smoothed ones are INT4 or INT8.
        source: the float layer; layers whose factors change are quantized again from it.
        family: names the norms that factors may be folded into.
        head_dim: of values.
    """
    layer = _Layer(dict(tensors), source)
    for norm, readers in family.readers.items():
        layer.fold_into_norm(norm, readers, family.norm_shift)
    # Layers quantized again lose folded factors: producers come before their consumers.
    layer.drop_factors(except_for=(*_UP, _O_PROJ))
    for down, ups in _UP.items():
        layer.fold_into_rows(down, next((up for up in ups if layer.has(up)), None))
    if family.scales_values:
        layer.fold_into_values(head_dim)
    layer.drop_factors()
    return layer.tensors


class _Layer:
    """The tensors of a layer while factors are folded."""

    def __init__(self, tensors: dict[str, Tensor], source: Mapping[str, F32]) -> None:
        self.tensors, self._source = tensors, source

    def has(self, name: str) -> bool:
        return f"{name}.weight" in self.tensors

    def smoothed(self) -> list[str]:
        return [name.removesuffix(SMOOTHING) for name in self.tensors if name.endswith(SMOOTHING)]

    def factor(self, name: str) -> F32:
        """Return the factor of each input [in]."""
        return self.tensors[name + SMOOTHING].floats()

    def set_factor(self, name: str, factor: F32) -> None:
        """Remove a folded factor; quantize again if `factor` differs from it."""
        before = self.tensors.pop(name + SMOOTHING).floats()
        if not np.array_equal(before, factor):
            weight = self._source[f"{name}.weight"] / factor
            self.tensors |= _rounded(name, weight, self.tensors)

    def drop_factors(self, except_for: tuple[str, ...] = ()) -> None:
        """Quantize the remaining layers again, without smoothing."""
        for name in self.smoothed():
            if name not in except_for:
                self.set_factor(name, np.ones_like(self.factor(name)))

    def fold_into_norm(self, norm: str, readers: tuple[str, ...], shift: float) -> None:
        found = [name for name in readers if name + SMOOTHING in self.tensors]
        if not found or len(found) != len(readers) or f"{norm}.weight" not in self.tensors:
            return
        factor = _geometric_mean(np.stack([self.factor(name) for name in found]), 0)
        for part, offset in (("weight", np.float32(shift)), ("bias", np.float32(0))):
            if (value := self.tensors.get(f"{norm}.{part}")) is not None:
                self._put(f"{norm}.{part}", (value.floats() + offset) * factor - offset)
        for name in found:
            self.set_factor(name, factor)

    def fold_into_rows(self, down: str, up: str | None) -> None:
        is_gated = up is not None and (up not in _GATES or self.has(_GATES[up]))
        if up is None or not is_gated or down + SMOOTHING not in self.tensors:
            return
        factor = self.factor(down)
        self._scale_last_rows(up, factor)
        self.set_factor(down, factor)

    def fold_into_values(self, head_dim: int) -> None:
        values = next((name for name in (_V_PROJ, _QKV_PROJ) if self.has(name)), None)
        if values is None or _O_PROJ + SMOOTHING not in self.tensors:
            return
        factor = self.factor(_O_PROJ)
        rows = len(self._source[f"{values}.weight"])
        count = rows if values == _V_PROJ else (rows - len(factor)) // 2
        heads = factor.reshape(count // head_dim, -1, head_dim)  # [KV heads, group, head_dim]
        shared = _geometric_mean(heads, 1)
        self._scale_last_rows(values, shared.reshape(-1))
        spread = np.broadcast_to(shared[:, None], heads.shape)
        self.set_factor(_O_PROJ, np.ascontiguousarray(spread).reshape(-1))

    def _scale_last_rows(self, name: str, factor: F32) -> None:
        """Multiply the last outputs of a linear layer by `factor` [n]."""
        for part in ("weight_scale", "bias"):
            if (stored := self.tensors.get(f"{name}.{part}")) is not None:
                values = stored.floats().copy()
                rows = factor.reshape(-1, *(1,) * (values.ndim - 1))
                values[len(values) - len(factor) :] *= rows
                self._put(f"{name}.{part}", values)

    def _put(self, name: str, values: F32) -> None:
        self.tensors[name] = _float(values)


def _rounded(name: str, weight: F32, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Round a weight [out, in] to nearest, in the layout of the layer `name` in `like`."""
    before = like[f"{name}.weight_scale"].info
    if like[f"{name}.weight"].info.dtype == "I8":
        scale = np.abs(weight).max(1) / np.float32(127)
        scale = np.where(scale > 0, scale, np.float32(1)).astype(np.float32)
        codes = np.clip(np.rint(weight / scale[:, None]), -127, 127).astype(np.int8)
        stored = Tensor(TensorInfo("I8", codes.shape), codes.tobytes())
    else:
        packed, scale = pack_int4(weight, weight.shape[1] // before.shape[1])
        stored = Tensor(TensorInfo("U8", packed.shape), packed.tobytes())
    return {f"{name}.weight": stored, f"{name}.weight_scale": _float(scale.reshape(before.shape))}


def _geometric_mean(values: F32, axis: int) -> F32:
    """Return the geometric mean; exactly the value if all are equal."""
    first = values.take(0, axis)
    equal = (values == np.expand_dims(first, axis)).all(axis)
    mean = np.exp(np.log(values.astype(np.float64)).mean(axis)).astype(np.float32)
    return np.where(equal, first, mean)


def _float(values: F32) -> Tensor:
    array = np.ascontiguousarray(values, np.float32)
    return Tensor(TensorInfo("F32", array.shape), array.tobytes())

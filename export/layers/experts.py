"""Mixtures of experts: a router, and feed-forward networks, a few of them for each token.

Shapes: S tokens, H hidden size, E experts, K chosen experts, I intermediate size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from edgellm.core.errors import UnsupportedModelError
from edgellm.core.onnx_functions import RoutingForm
from edgellm.export.checkpoints.experts.weights import Operand, Stack
from edgellm.export.checkpoints.quantized_weight import BlockFactors
from edgellm.export.checkpoints.weights import Weights
from edgellm.export.config.reader import ConfigReader
from edgellm.export.layers.linear import stored_codes, stored_factors
from edgellm.export.layers.mlp import MLP
from edgellm.export.onnx.builder import Op
from edgellm.export.onnx.functions.attention import call
from edgellm.export.onnx.functions.experts import LARGEST, experts, router
from edgellm.export.onnx.functions.experts import routing as routing_function


@dataclass(frozen=True, slots=True, kw_only=True)
class Gating:
    """Activation of an expert with gates g and ups u.

    It is g * sigmoid(g * (alpha + cubic * g^2)) * (u + offset). Without `cubic` this is Swish, with
    it GELU by its tanh, since (1 + tanh x) / 2 = sigmoid(2 x).
    """

    alpha: float | None = 1.0  # None: the largest float, which makes Swish a ReLU
    limit: float | None = None  # upper bound of gates, bound of |ups|
    offset: float = 0.0
    cubic: float = 0.0


SWISH = Gating()
SQUARED_RELU = Gating(alpha=None)  # where the ups are the gates
_GELU_SLOPE = 2 * math.sqrt(2 / math.pi)
GELU_TANH = Gating(alpha=_GELU_SLOPE, cubic=0.044715 * _GELU_SLOPE)
_GATINGS = {"silu": SWISH, "swish": SWISH, "gelu_pytorch_tanh": GELU_TANH}


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Number of experts, their activation, and weights of the chosen ones."""

    experts: int
    top_k: int
    size: int  # I
    normalizes: bool = True  # the shares of chosen experts are divided by their sum
    smallest_sum: float = 0.0  # minimum of the divisor
    added: float = 0.0  # to the sum
    scale: float = 1.0  # of the final shares
    gating: Gating = SWISH

    @classmethod
    def read(
        cls,
        reader: ConfigReader,
        *,
        experts: str = "num_local_experts",
        top_k: str = "num_experts_per_tok",
        size: str = "intermediate_size",
        activation: str = "hidden_act",
        **traits: Any,
    ) -> Routing:
        """Read the keys with these names; `traits` are the other facts.

        Raises:
            UnsupportedModelError: K exceeds E, or an unsupported activation.
        """
        reader.skip("router_aux_loss_coef", "output_router_logits")  # for training
        found = cls(
            experts=reader.positive(experts),
            top_k=reader.positive(top_k),
            size=reader.positive(size),
            gating=_GATINGS[reader.choice(activation, *_GATINGS)],
            **traits,
        )
        if found.top_k > found.experts:
            raise UnsupportedModelError(
                f"config.json: {top_k} = {found.top_k}, but {experts} = {found.experts}"
            )
        return found


NO_ROUTING = Routing(experts=1, top_k=1, size=1)  # of an unread config


class Router:
    """Softmax of a token's logits, and the top K experts.

    Attributes:
        is_sigmoid: shares are the sigmoid of the logits.
        cap: soft cap of the logits; 0: none.
    """

    is_sigmoid: bool = False
    cap: float = 0.0

    def __init__(self, weights: Weights, hidden: int, routing: Routing) -> None:
        self.weights, self.hidden, self.routing = weights, hidden, routing

    def __call__(self, op: Op, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        """X [1, S, H] -> ids int64 [1, S, K] and their shares [1, S, K]."""
        with op.scope(self.weights.prefix.rstrip(".")):
            shape = (self.routing.experts, self.hidden)
            weight = op.parameter(self.weights.take("weight", shape, op.dtype))
            logits = call(op, router(), x, weight)  # float32 [1, S, E]
            found = {"offsets": self.offsets(op), "bias": self.bias(op)}
            found["factors"] = self.factors(op)
            form = self._form(found, is_cast=op.dtype != ir.DataType.FLOAT)
            values = {
                "cap": self.cap,
                "smallest_sum": self.routing.smallest_sum,
                "added": self.routing.added,
                "scale": self.routing.scale,
                "to": int(op.dtype),
            }
            names = (*form.numbers, "to") if form.cast else form.numbers
            return call(
                op,
                routing_function(form),
                logits,
                op.constant([self.routing.top_k]),
                *(found[name] for name in form.operands),
                experts=self.routing.experts,
                top_k=self.routing.top_k,
                **{name: values[name] for name in names},
            )

    def _form(self, found: Mapping[str, ir.Value | None], *, is_cast: bool) -> RoutingForm:
        routing = self.routing
        return RoutingForm(
            offset=found["offsets"] is not None,
            capped=self.cap != 0,
            sigmoid=self.is_sigmoid,
            biased=found["bias"] is not None,
            normalized=routing.normalizes,
            bounded=routing.normalizes and routing.smallest_sum != 0,
            padded=routing.normalizes and routing.added != 0,
            scaled=routing.scale != 1,
            cast=is_cast,
            weighted=found["factors"] is not None,
        )

    def offsets(self, op: Op) -> ir.Value | None:
        """Hook for a bias of the logits, float32 [E]."""
        del op
        return None

    def bias(self, op: Op) -> ir.Value | None:
        """Hook for a bias of the choice, float32 [E]."""
        del op
        return None

    def factors(self, op: Op) -> ir.Value | None:
        """Hook for factors of the shares, [E] in the activations' type."""
        del op
        return None


class BiasedRouter(Router):
    """A router with a bias of the logits."""

    def offsets(self, op: Op) -> ir.Value:
        """Float32 [E]."""
        stored = self.weights.take("bias", (self.routing.experts,), op.dtype)
        return op.Cast(op.parameter(stored), to=int(ir.DataType.FLOAT))


class SigmoidRouter(Router):
    """A router with sigmoid shares; an optional bias affects the choice only."""

    is_sigmoid = True

    def __init__(
        self,
        *,
        weights: Weights,
        hidden: int,
        routing: Routing,
        bias: tuple[Weights, str] | None = None,
    ) -> None:
        """`bias`: weights and name of the tensor [E]."""
        super().__init__(weights, hidden, routing)
        self._bias = bias

    def bias(self, op: Op) -> ir.Value | None:
        """Float32 [E]."""
        if self._bias is None:
            return None
        place, name = self._bias
        # Its differences decide: half types would round those of large biases away.
        stored = place.take(name, (self.routing.experts,), ir.DataType.FLOAT)
        return op.Cast(op.parameter(stored), to=int(ir.DataType.FLOAT))


class Chooses(Protocol):
    """A router."""

    def __call__(self, op: Op, x: ir.Value) -> tuple[ir.Value, ir.Value]:
        """X [1, S, H] -> ids int64 [1, S, K] and their shares [1, S, K]."""
        ...


class Mixture:
    """`sum of share * expert(x)` over the chosen experts, and an optional shared expert.

    The weights of all experts of a layer are one operand each: gates, ups and downs.
    """

    def __init__(
        self,
        *,
        route: Chooses,
        stack: Stack,
        routing: Routing,
        shared: MLP | None = None,
        around: tuple[MLP, MLP] | None = None,
    ) -> None:
        """`around`: layers before and after the experts, such as projections to a latent width."""
        self.route, self.stack, self.routing = route, stack, routing
        self.shared, self.around = shared, around

    def __call__(self, op: Op, x: ir.Value) -> ir.Value:
        """Append the network; x [1, S, H] -> [1, S, H]."""
        ids, shares = self.route(op, x)
        gating = self.routing.gating
        rows = x if self.around is None else self.around[0](op, x)
        with op.scope(self.stack.prefix.rstrip(".")):
            stored = self.stack.read(op.dtype)
            operands = [_operand(op, each) for each in stored.operands]
            biases = [
                op.constant(np.zeros((1, 1), op.dtype.numpy()))
                if bias is None
                else op.cast(op.parameter(bias), op.dtype)
                for bias in stored.biases
            ]
            alpha, limit = (
                LARGEST[op.dtype] if bound is None else bound
                for bound in (gating.alpha, gating.limit)
            )
            y = call(
                op, experts(stored.function), rows, ids, shares, *operands, *biases,
                alpha=alpha, limit=limit, offset=gating.offset, cubic=gating.cubic,
                top_k=self.routing.top_k, **stored.blocks,
            )  # fmt: skip
        if self.around is not None:
            y = self.around[1](op, y)
        return y if self.shared is None else op.Add(y, self.shared(op, x))


def _operand(op: Op, stored: Operand) -> ir.Value:
    if stored is None:
        return op.constant(np.zeros((1, 1, 1), np.float16), ir.DataType.FLOAT16)
    return (
        stored_factors(op, stored) if isinstance(stored, BlockFactors) else stored_codes(op, stored)
    )

"""Losses of the methods, computed in chunks of tokens to bound the memory of logits.

U unrolls or heads, R tokens, H hidden size, V tokens of a head.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

PIECE = 256  # tokens per chunk, at least
_GPU_LOGITS = (
    1 << 26
)  # per chunk on a GPU, where many small kernels take longer than few large ones


def piece_size(weight: Tensor) -> int:
    """Return the tokens per chunk for a head [V, H]."""
    return PIECE if weight.device.type == "cpu" else max(PIECE, _GPU_LOGITS // len(weight))


def cut_head(head: Tensor, vocabulary: np.ndarray) -> tuple[Tensor, Tensor]:
    """Select the rows of a head [V, H] for a draft's vocabulary, int64 [Vd].

    Returns:
        The head [Vd, H], and bool [V], whether a token is in the vocabulary.
    """
    ids = torch.from_numpy(vocabulary).to(head.device)
    known = torch.zeros(len(head), dtype=torch.bool, device=head.device)
    known[ids] = True
    return head[ids], known


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, importance: Tensor) -> Tensor:
    """Return the soft cross entropy after the draft's head, as weighted mean over unrolls.

    Args:
        hidden: normed hidden states [U, R, H].
        weight: the head [V, H], in hidden's dtype.
        targets: the base's probabilities over the draft vocabulary [R, V].
        importance: weight of each unroll, float32 [U], with sum 1.
    """
    loss = _HeadLoss.apply(hidden, weight, targets, importance)
    assert isinstance(loss, Tensor)
    return loss


class _HeadLoss(torch.autograd.Function):
    """`head_loss`, whose forward also computes the gradients, chunk by chunk.

    So only one chunk of float32 logits, log-probabilities and targets exists at a time. The
    gradient of all logits is stored, in hidden's dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, importance: Tensor
    ) -> Tensor:
        """See `head_loss`."""
        unrolls, rows, _ = hidden.shape
        loss = torch.zeros((), device=hidden.device)
        logit_grad = hidden.new_empty(unrolls, rows, weight.shape[0])
        size = piece_size(weight)
        for start in range(0, rows, size):
            piece = slice(start, start + size)
            target = targets[piece].float()
            for unroll in range(unrolls):
                log_q = (hidden[unroll, piece] @ weight.T).float().log_softmax(-1)
                share = importance[unroll] / rows
                loss -= torch.dot(target.flatten(), log_q.flatten()) * share
                logit_grad[unroll, piece] = log_q.exp_().sub_(target).mul_(share)
        flat = logit_grad.flatten(0, 1)
        trained = ctx.needs_input_grad[1]  # the base's own head is not
        weight_grad = flat.T @ hidden.flatten(0, 1) if trained else None
        ctx.save_for_backward((flat @ weight).view_as(hidden), weight_grad)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, Tensor | None, None, None]:
        """Scale the gradients that `forward` computed."""
        hidden_grad, weight_grad = ctx.saved_tensors
        scale = grad_outputs[0].to(hidden_grad.dtype)
        return hidden_grad * scale, None if weight_grad is None else weight_grad * scale, None, None


def token_loss(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross entropy of tokens, int64 [R], for hidden states [R, H], head [V, H].

    The backward pass recomputes the logits.
    """
    total = torch.zeros((), device=hidden.device)
    size = piece_size(weight)
    for start in range(0, len(hidden), size):
        piece = slice(start, start + size)
        part = checkpoint(_token_loss, hidden[piece], weight, tokens[piece], use_reentrant=False)
        assert isinstance(part, Tensor)
        total = total + part
    return total / max(len(hidden), 1)


def _token_loss(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy((hidden @ weight.T).float(), tokens, reduction="sum")

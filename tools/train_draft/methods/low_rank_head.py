"""Training of EAGLE-4's low-rank head for a trained EAGLE-3 draft, which does not change.

As NeMo Automodel trains it: both factors start as the truncated SVD of the draft's head, and learn
its distribution by forward KL divergence at each step of the training-time test. U steps, T tokens,
H hidden size, R rank, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from edgellm.core.errors import EdgeLLMError
from edgellm.export.draft_checkpoints.low_rank_head import NUM_CANDIDATES, UP, principal_inputs
from edgellm.tools.train_draft.checkpoint_writers import read_window, write_eagle4
from edgellm.tools.train_draft.data.corpus import Sample
from edgellm.tools.train_draft.data.hidden_states import Batch
from edgellm.tools.train_draft.methods.eagle3 import Eagle3
from edgellm.tools.train_draft.methods.eagle_network import Draft
from edgellm.tools.train_draft.methods.losses import head_loss


class LowRankDraft(nn.Module):
    """A frozen draft and the trained factors, with the published names."""

    def __init__(self, draft: Draft, rank: int) -> None:
        super().__init__()
        self.draft, shape = draft.requires_grad_(requires_grad=False), draft.shape
        self.efficient_lm_head_down_proj = nn.Linear(shape.hidden_size, rank, bias=False)
        self.efficient_lm_head = nn.Linear(rank, shape.draft_vocab_size, bias=False)

    @torch.no_grad()
    def factorize(self) -> None:
        """Set the factors to the truncated SVD of the draft's head."""
        head = self.draft.lm_head.weight.float()
        rank = len(self.efficient_lm_head_down_proj.weight)
        vectors = torch.from_numpy(principal_inputs(head.cpu().numpy(), rank)).to(head.device)
        self.efficient_lm_head_down_proj.weight.copy_(vectors.T)
        self.efficient_lm_head.weight.copy_(head @ vectors)


class TrainedLowRankHead:
    """See `Learner`; it predicts the best token of the retrieved candidates."""

    outputs = frozenset([f"{UP}.weight"])

    def __init__(self, draft: Eagle3, rank: int) -> None:
        """Create the factors; `draft` is loaded or started with this learner."""
        self._draft, self.tapped, self.steps = draft, draft.tapped, draft.steps
        self.module = LowRankDraft(draft.module, rank)
        self.num_candidates = min(NUM_CANDIDATES, draft.module.shape.draft_vocab_size)

    def start(self, samples: Sequence[Sample]) -> None:
        """See `Learner`."""
        self._draft.start(samples)
        self.module.factorize()

    def load(self, folder: Path) -> None:
        """See `Learner`; raises `EdgeLLMError` for a draft with another window, too."""
        window = self._draft.module.shape.sliding_window
        if (theirs := read_window(folder)) != window:
            raise EdgeLLMError(
                f"{folder} was trained with a window of {theirs or 'all'} tokens",
                hint=f"give --sliding_window {theirs}" if theirs else "leave out --sliding_window",
            )
        self._draft.load(folder)
        self.module.factorize()

    def loss(self, batch: Batch, features: Tensor, step: int) -> Tensor:
        """See `Learner`: KL divergence of the low-rank head from the head, as mean over steps."""
        del step  # nothing is random
        module, one = self.module, torch.ones(1, device=features.device)
        total = torch.zeros((), device=features.device)
        shares = self._draft.importance(features.device)
        for share, (states, logits, _) in zip(shares, self._steps(batch, features), strict=True):
            down, up = (
                factor.weight.to(states.dtype)
                for factor in (module.efficient_lm_head_down_proj, module.efficient_lm_head)
            )
            log_probs = logits.float().log_softmax(-1)
            wanted = log_probs.exp()
            entropy = -(wanted * log_probs).sum() / max(len(states), 1)
            low = functional.linear(states, down)[None]  # [1, T, R]
            total = total + share * (head_loss(low, up, wanted, one) - entropy)
        return total

    def _steps(self, batch: Batch, features: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield normed states [T, H], the head's logits [T, V] and the base's tokens [T]."""
        with torch.no_grad():
            hidden, targets = self._draft.predictions(batch, features)
            head, tokens = self.module.draft.lm_head.weight.to(hidden.dtype), targets.argmax(-1)
        for states in hidden:
            with torch.no_grad():
                logits = states @ head.T
            yield states, logits, tokens

    def hits(self, batch: Batch, features: Tensor) -> tuple[Tensor, Tensor]:
        """See `Learner`; tokens that are not retrieved are misses."""
        found = []
        for states, logits, tokens in self._steps(batch, features):
            low = self.module.efficient_lm_head_down_proj(states.float())
            retrieved = self.module.efficient_lm_head(low).topk(self.num_candidates).indices
            best = logits.gather(1, retrieved).argmax(-1, keepdim=True)
            found.append((retrieved.gather(1, best)[:, 0] == tokens).sum())
        hits = torch.stack(found)
        return hits, torch.full_like(hits, int(batch.learned[:, self.steps + 1 :].sum()))

    def write(self, folder: Path, training: dict[str, Any]) -> None:
        """See `Learner`."""
        factors = {
            name: value for name, value in self.module.state_dict().items() if name.startswith(UP)
        }
        draft, num_candidates = self._draft, self.num_candidates
        base, taps = self.tapped.base, self.tapped.taps
        write_eagle4(
            draft.module, folder, draft.vocabulary, taps, base, training, factors, num_candidates
        )

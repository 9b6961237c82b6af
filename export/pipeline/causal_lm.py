"""Language models that transformers has only inside vision-language models, with their heads."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any


@cache
def register_causal_lms() -> None:
    """Make AutoModelForCausalLM take their text configs; needs torch and transformers."""
    if importlib.util.find_spec("transformers.models.muse_glimmer") is None:  # an older version
        return
    import torch
    from transformers import AutoModelForCausalLM, GenerationMixin
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.models.muse_glimmer.configuration_muse_glimmer import MuseGlimmerTextConfig
    from transformers.models.muse_glimmer.modeling_muse_glimmer import (
        MuseGlimmerPreTrainedModel,
        MuseGlimmerTextModel,
    )

    class MuseGlimmerTextForCausalLM(MuseGlimmerPreTrainedModel, GenerationMixin):
        """The language model of `MuseGlimmerForConditionalGeneration`."""

        config_class = MuseGlimmerTextConfig
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

        def __init__(self, config: MuseGlimmerTextConfig) -> None:
            super().__init__(config)
            self.model = MuseGlimmerTextModel(config)
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(
            self, input_ids: torch.Tensor | None = None, logits_to_keep: int = 0, **kwargs: Any
        ) -> CausalLMOutputWithPast:
            """Token ids [B, S] -> logits [B, S, V], or of the last `logits_to_keep` tokens."""
            outputs = {**self.model(input_ids=input_ids, **kwargs)}
            last, cap = outputs.pop("last_hidden_state"), self.config.final_logit_softcapping
            logits = self.lm_head(last[:, -logits_to_keep:]) * self.config.output_multiplier
            return CausalLMOutputWithPast(logits=torch.tanh(logits / cap) * cap, **outputs)

    AutoModelForCausalLM.register(MuseGlimmerTextConfig, MuseGlimmerTextForCausalLM, exist_ok=True)

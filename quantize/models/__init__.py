"""Models that can be quantized, layer by layer: language models, drafts, their families."""

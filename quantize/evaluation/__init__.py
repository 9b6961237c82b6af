"""Evaluation of a quantized model: held-out text, layers, answers, acceptance of drafts."""

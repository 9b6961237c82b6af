"""Evaluation of a quantized model: held-out text, layers, greedy agreement, acceptance."""

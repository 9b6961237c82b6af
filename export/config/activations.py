"""Activations of feed-forward networks, by transformers' names."""

from __future__ import annotations

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "quick_gelu", "relu2")

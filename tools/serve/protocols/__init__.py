"""Protocols: each converts its bodies to a `ChatRequest`, and outputs back."""

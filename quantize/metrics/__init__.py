"""Metrics: KL divergence, perplexity, agreement, and the questions that a model is asked."""

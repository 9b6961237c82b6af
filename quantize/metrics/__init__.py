"""Metrics: KL divergence, perplexity, greedy agreement and its prompts."""

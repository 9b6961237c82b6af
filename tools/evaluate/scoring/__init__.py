"""Scores of outputs: exact match, ROUGE, HumanEval, divergence, confidence intervals."""

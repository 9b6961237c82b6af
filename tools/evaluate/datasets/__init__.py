"""Datasets of an evaluation."""

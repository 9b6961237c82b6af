"""Typed facts of models, drafts and encoders from their configs."""

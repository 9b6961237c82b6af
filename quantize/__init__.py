"""Quantizes float checkpoints with nvidia-modelopt."""

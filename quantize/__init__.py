"""Quantizes float checkpoints with nvidia-modelopt."""

import edgellm.core  # noqa: F401 - it switches off the telemetry of libraries

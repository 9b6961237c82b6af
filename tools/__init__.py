"""The commands around the pipeline."""

import edgellm.core  # noqa: F401 - it switches off the telemetry of libraries
